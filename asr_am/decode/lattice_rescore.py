"""Rescoring of lattices with a mixture of n-gram and recurrent LM, by pruned composition.

The method of Xu et al., "A pruned RNNLM lattice-rescoring algorithm for automatic speech recognition" (2018), Kaldi's
lattice-lmrescore-kaldi-rnnlm-pruned:

- Histories that end in the same words are one *context*. It has the LSTM state of the history that came first, which is
  the most promising one, as states of the composition are expanded best first.
- The cost of a path through a state is its cost so far, the least cost of the rest in the lattice, and what rescoring
  will probably add to the rest: what it adds to as many words at the end of the first-pass sentence.
- States that exceed the best complete path by more than a beam are not expanded. The first-pass sentence is rescored
  first, so that there is such a path from the beginning.

The composition is with the lattice's word sequences, which are far fewer than its paths. What it has asked of the
mixture is a table of words after contexts, an n-gram model without backoff. With that the lattice itself is rescored as
with any other n-gram model (`asr_am.decode.ngram_rescore`), and keeps its times and its two kinds of costs.

Shapes: A arcs, S states of the acceptor of word sequences, Q queries.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asr_am.decode.lattice import Lattice, LmScale, backward_costs, beam_excess, costs
from asr_am.decode.nbest import word_acceptor
from asr_am.decode.ngram_rescore import rescore as rescore_ngram
from asr_am.decode.ngram_rescore import steps
from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.lang.mixture import MIN_LOGPROB, mixed
from asr_am.lang.ngram_automaton import LmPair, NgramAutomaton
from asr_am.lang.units import Units
from asr_am.models.lm_states import LmStates
from asr_am.models.lstm_lm import LstmLm

BATCH = 64  # states that are expanded together
MAX_EXPANDED = 20_000  # states of a lattice


@dataclass(frozen=True)
class LatticeOptions:
    """Options of pruned composition.

    Attributes:
        words: number of words that tell contexts apart. At least the order of the n-gram LM - 1 is used.
        beam: paths that cost this much more than the best path are left out, in units of graph cost.
    """

    words: int = 3
    beam: float = 6.0

    def __post_init__(self) -> None:
        if self.words < 1 or not self.beam > 0:
            raise InputError("lm.lattice: words must be at least 1, and beam above 0")


@dataclass(frozen=True)
class LatticeModels:
    """Models of a mixture, for lattices.

    Attributes:
        ngram: the n-gram LM that the lattices have the costs of.
        units: units that the recurrent LM predicts.
        weight: weight of the recurrent LM, from 0 to 1.
    """

    ngram: NgramAutomaton
    order: int
    lstm: LstmLm
    units: Units
    weight: float
    word_names: Mapping[int, str]


def rescore(lattice: Lattice, models: LatticeModels, scale: LmScale, options: LatticeOptions) -> FstArrays:
    """Replaces the n-gram LM's costs of a lattice by those of the mixture.

    Args:
        lattice: a lattice with the costs of the n-gram LM.
        scale: LM scale that paths are compared at.

    Returns:
        The lattice with the costs of the mixture, its states in topological order. Its paths are paths of `lattice`.
    """
    table = ContextTable(models, max(options.words, models.order - 1))
    _explore(_word_lattice(lattice, scale, options.beam), table, options.beam)
    return rescore_ngram(lattice, LmPair(models.ngram, table.automaton()), scale, options.beam)


class ContextTable:
    """What the mixture says of words after contexts, as far as it was asked.

    Contexts are numbered as they are met. The first is the start of a sentence.

    Attributes:
        words: number of words that tell contexts apart.
        change: by context and word, what rescoring adds to the cost of the word.
    """

    def __init__(self, models: LatticeModels, words: int) -> None:
        self.models, self.words = models, words
        self.change: dict[tuple[int, int], float] = {}
        self._cost: dict[tuple[int, int], float] = {}
        self._target: dict[tuple[int, int], int] = {}  # context after a word
        self._numbers: dict[tuple[int, ...], int] = {(): 0}  # of contexts, by their words
        self._histories: list[tuple[int, ...]] = [()]
        self._parents = [(0, 0)]  # context and word that led to each context first
        self._states = LmStates(models.lstm, models.units)
        self._lstm = [0]  # state of the recurrent LM in each context
        self._ngram = [models.ngram.start]

    def after(self, context: int, word: int) -> int:
        """Returns the context after a word whose cost is known."""
        pair = context, word
        if pair not in self._target:
            history = (*self._histories[context], word)[-self.words :]
            number = self._numbers.setdefault(history, len(self._numbers))
            if number == len(self._histories):
                self._histories.append(history)
                self._parents.append(pair)
            self._target[pair] = number
        return self._target[pair]

    def score(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Computes the costs of words after contexts, in one batch."""
        unknown = list(dict.fromkeys(pair for pair in pairs if pair not in self.change))
        if not unknown:
            return
        self._complete_contexts()
        models, end = self.models, self.models.ngram.end
        context_Q, word_Q = np.array(unknown).T
        names = [None if word == end else models.word_names[word] for word in word_Q]
        lstm_Q = self._states.logprobs([self._lstm[context] for context in context_Q], names)
        _, ngram_Q = steps(models.ngram, np.array(self._ngram)[context_Q], word_Q)
        ngram_Q = np.minimum(ngram_Q, -MIN_LOGPROB)
        cost_Q = -mixed([lstm_Q], [-ngram_Q], models.weight)[0]
        self._cost |= zip(unknown, cost_Q.tolist(), strict=True)
        self.change |= zip(unknown, (cost_Q - ngram_Q).tolist(), strict=True)

    def _complete_contexts(self) -> None:
        """Computes the states of new contexts. Their parents have states: a word is scored before it is followed."""
        parents = self._parents[len(self._lstm) :]
        if not parents:
            return
        context_Q, word_Q = np.array(parents).T
        names = [self.models.word_names[word] for word in word_Q]
        self._lstm += self._states.extend([self._lstm[context] for context in context_Q], names)
        self._ngram += steps(self.models.ngram, np.array(self._ngram)[context_Q], word_Q)[0].tolist()

    def automaton(self) -> NgramAutomaton:
        """Returns the table as a model without backoff: words that were not asked for have no cost."""
        pairs = sorted(pair for pair in self._cost if pair in self._target or pair[1] == self.models.ngram.end)
        context_A, word_A = np.array(pairs).T
        count = len(self._histories)
        return NgramAutomaton(
            first_S=np.searchsorted(context_A, np.arange(count + 1)),
            word_A=word_A.astype(np.int32),
            cost_A=np.array([self._cost[pair] for pair in pairs], dtype=np.float32),
            target_A=np.array([self._target.get(pair, 0) for pair in pairs], dtype=np.int32),
            backoff_S=np.full(count, -1, dtype=np.int32), backoff_cost_S=np.zeros(count, dtype=np.float32),
            start=0, end=self.models.ngram.end,
        )  # fmt: skip


def _word_lattice(lattice: Lattice, scale: LmScale, beam: float) -> Lattice:
    """Returns the word sequences of a lattice as a deterministic lattice whose graph costs are total costs."""
    found = word_acceptor(lattice, costs(lattice, [scale])[:, 0], beam_excess(lattice, scale), 2 * beam)
    raw = FstArrays.from_fst(found)
    weight_A2, final_S2 = (
        np.stack([cost, np.where(cost < np.inf, 0, np.inf)], 1) for cost in (raw.weight_A, raw.final_S)
    )
    arcs_A4 = np.stack([raw.source_A, raw.target_A, raw.ilabel_A, raw.ilabel_A], axis=1)
    return Lattice.from_arrays(FstArrays.build(raw.start, arcs_A4, weight_A2, final_S2))


def _explore(lattice: Lattice, table: ContextTable, beam: float) -> None:
    """Asks the table for all words on paths within the beam.

    Args:
        lattice: word sequences, see `_word_lattice`.
        beam: paths that cost this much more than the best path are not followed.
    """
    end, last = table.models.ngram.end, lattice.num_states - 1
    word_A = np.where(lattice.target_A == last, end, lattice.word_A)
    arcs = list(zip(word_A.tolist(), lattice.target_A.tolist(), lattice.graph_A.tolist(), strict=True))
    arcs_of: list[list[tuple[int, int, float]]] = [[] for _ in range(last)]
    for source, arc in zip(lattice.source_A.tolist(), arcs, strict=True):
        arcs_of[source].append(arc)
    backward_S, next_S = backward_costs(lattice, LmScale(1.0))
    sentence, words_left_S = _first_sentence(lattice, word_A, next_S)
    changes = _rescore_sentence(sentence, table)
    added = np.concatenate([[0.0], np.cumsum(changes[::-1])])  # to the last words of the sentence, by their number
    rest = (backward_S + added[np.minimum(words_left_S, len(changes))]).tolist()
    best = backward_S[0] + added[-1]  # cost of the best complete path that is known

    cost_of = {(0, 0): 0.0}  # best cost from the start to a state and context
    queue = [(rest[0], 0, 0)]
    expanded = 0
    while queue and queue[0][0] <= best + beam and expanded < MAX_EXPANDED:
        nodes: dict[tuple[int, int], None] = {}
        while queue and queue[0][0] <= best + beam and len(nodes) < BATCH:
            total, state, context = heapq.heappop(queue)
            if total <= cost_of[state, context] + rest[state]:  # else a better path was found later
                nodes[state, context] = None
        expanded += len(nodes)
        table.score([(context, word) for state, context in nodes for word, _, _ in arcs_of[state]])
        for state, context in nodes:
            for word, target, cost in arcs_of[state]:
                cost += cost_of[state, context] + table.change[context, word]
                if word == end:
                    best = min(best, cost)
                    continue
                total = cost + rest[target]
                if total > best + beam:
                    continue
                node = target, table.after(context, word)
                if cost < cost_of.get(node, np.inf):
                    cost_of[node] = cost
                    heapq.heappush(queue, (total, *node))


def _first_sentence(lattice: Lattice, word_A: np.ndarray, next_S: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Returns the words of the best path with the sentence end, and the length of each state's best path [S]."""
    last = lattice.num_states - 1
    left_S = np.zeros(last + 1, dtype=np.int64)
    for state in range(last - 1, -1, -1):
        left_S[state] = left_S[lattice.target_A[next_S[state]]] + 1
    words, state = [], 0
    while state != last:
        words.append(int(word_A[next_S[state]]))
        state = lattice.target_A[next_S[state]]
    return words, left_S


def _rescore_sentence(words: Sequence[int], table: ContextTable) -> list[float]:
    """Returns what rescoring adds to each word of a sentence."""
    context, changes = 0, []
    for word in words:
        table.score([(context, word)])
        changes.append(table.change[context, word])
        context = table.after(context, word) if word != table.models.ngram.end else context
    return changes
