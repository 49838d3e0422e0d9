"""Hidden Markov topologies: emitting states from left to right, each with a self-loop and one way out.

Shapes: L graph labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree

INITIAL_LOOP = 0.75  # probability of staying before anything was counted, as in Kaldi's topologies


def phone_states(
    nonsilence: Iterable[int], silence: Iterable[int], phone_length: int = 3, silence_length: int = 3
) -> dict[int, int]:
    """How many emitting states each phone id has; `phone_length` and `silence_length` are at least 1."""
    return dict.fromkeys(nonsilence, phone_length) | dict.fromkeys(silence, silence_length)


def state_table(tree: DecisionTree, states_P: Mapping[int, int], loop: float = INITIAL_LOOP) -> StateTable:
    """Every (phone, state, pdf) that `tree` can produce, all with the same probability of staying."""
    triples = [
        (phone, state, pdf)
        for phone, count in sorted(states_P.items())
        for state in range(count)
        for pdf in tree.leaves(phone, state)
    ]
    size = len(triples)
    return StateTable(
        labels_L3=np.array(triples, dtype=np.int32).reshape(size, 3),
        loop_L=np.full(size, np.log(loop), dtype=np.float32),
        next_L=np.full(size, np.log1p(-loop), dtype=np.float32),
        states_P=dict(states_P),
        num_pdfs=tree.num_pdfs,
    )
