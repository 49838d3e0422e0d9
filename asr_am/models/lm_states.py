"""States of a recurrent LM after histories of units, computed in batches, each once.

Shapes: N states, L layers, C cells, P projection, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asr_am.lang.units import BOUNDARY, Units
from asr_am.models.lm_scorer import LOGITS
from asr_am.models.lstm_lm import LstmLm

FIRST_CAPACITY = 256  # states


class LmStates:
    """States of a recurrent LM by number. State 0 is the start of a sentence.

    Attributes:
        units: spelling of words.
        count: number of states.
    """

    def __init__(self, model: LstmLm, units: Units) -> None:
        """Computes the start state."""
        options = model.options
        self._model, self.units, self.count = model, units, 0
        self._hidden_NLP = torch.zeros(FIRST_CAPACITY, options.layers, options.projection)
        self._cell_NLC = torch.zeros(FIRST_CAPACITY, options.layers, options.cells)
        self._norm_N = torch.zeros(FIRST_CAPACITY)  # log sums over all units
        self._after: dict[tuple[int, int], int] = {}
        self._append(torch.zeros(1, dtype=torch.int64), torch.tensor([BOUNDARY]))  # row 0 holds zeros

    def extend(self, states: Sequence[int], words: Sequence[str]) -> list[int]:
        """Returns the state after each pair of a state and a word."""
        return self._walk(states, [self.units.of(word) for word in words])

    def logprobs(self, states: Sequence[int], words: Sequence[str | None]) -> np.ndarray:
        """Returns float64 [Q]: natural log P(word | state) of each pair. None is the end of the sentence."""
        spelled = [(BOUNDARY,) if word is None else self.units.of(word) for word in words]
        total_Q, rows = np.zeros(len(words)), list(range(len(words)))
        for depth in range(max(map(len, spelled), default=0)):
            rows = [q for q in rows if depth < len(spelled[q])]
            before = self._walk([states[q] for q in rows], [spelled[q][:depth] for q in rows])
            total_Q[rows] += self._unit_logprobs(before, [spelled[q][depth] for q in rows])
        return total_Q

    def _walk(self, states: Sequence[int], spelled: Sequence[Sequence[int]]) -> list[int]:
        """Returns the state after the units of each row."""
        current = list(states)
        for depth in range(max(map(len, spelled), default=0)):
            rows = [q for q, units in enumerate(spelled) if depth < len(units)]
            pairs = [(current[q], spelled[q][depth]) for q in rows]
            unseen = list(dict.fromkeys(pair for pair in pairs if pair not in self._after))
            if unseen:
                first = self._append(*torch.tensor(unseen).T)
                self._after |= {pair: first + i for i, pair in enumerate(unseen)}
            for q, pair in zip(rows, pairs, strict=True):
                current[q] = self._after[pair]
        return current

    @torch.inference_mode()
    def _append(self, parent_Q: Tensor, unit_Q: Tensor) -> int:
        """Computes the states after units. Returns the number of the first of them."""
        hidden_LQP = self._hidden_NLP[parent_Q].transpose(0, 1).contiguous()
        cell_LQC = self._cell_NLC[parent_Q].transpose(0, 1).contiguous()
        embedded = self._model.embedding(unit_Q)[:, None]
        _, (hidden_LQP, cell_LQC) = self._model.lstm(embedded, (hidden_LQP, cell_LQC))
        step = max(1, LOGITS // self._model.size)
        norm_Q = torch.cat([torch.logsumexp(self._model.logits(h), dim=1) for h in hidden_LQP[-1].split(step)])
        first, self.count = self.count, self.count + len(unit_Q)
        self._reserve(self.count)
        self._hidden_NLP[first : self.count] = hidden_LQP.transpose(0, 1)
        self._cell_NLC[first : self.count] = cell_LQC.transpose(0, 1)
        self._norm_N[first : self.count] = norm_Q
        return first

    def _reserve(self, count: int) -> None:
        """Makes room for `count` states."""
        capacity = len(self._norm_N)
        if count > capacity:
            more = max(count, 2 * capacity) - capacity
            self._hidden_NLP, self._cell_NLC, self._norm_N = (
                torch.cat([old, old.new_zeros(more, *old.shape[1:])])
                for old in (self._hidden_NLP, self._cell_NLC, self._norm_N)
            )

    @torch.inference_mode()
    def _unit_logprobs(self, states: Sequence[int], units: Sequence[int]) -> np.ndarray:
        state_Q, unit_Q = torch.tensor(states, dtype=torch.int64), torch.tensor(units, dtype=torch.int64)
        logit_Q = (self._hidden_NLP[state_Q, -1] * self._model.output(unit_Q)).sum(1) + self._model.bias(unit_Q)[:, 0]
        return (logit_Q - self._norm_N[state_Q]).double().numpy()
