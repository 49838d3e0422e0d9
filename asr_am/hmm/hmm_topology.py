"""HMM topologies and their transition probabilities.

Topologies are left to right without skips: each emitting state has a self-loop and one exit.

Shapes: L graph labels, R runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from asr_am.hmm.alignments import Runs
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree

INITIAL_LOOP = 0.75  # self-loop probability before estimation, as in Kaldi's topologies
FLOOR = 0.01  # minimum probability, as in Kaldi
PRIOR = 10.0  # visits that the pooled estimate of all contexts counts for


def phone_states(
    nonsilence: Iterable[int], silence: Iterable[int], phone_length: int = 3, silence_length: int = 3
) -> dict[int, int]:
    """Returns the number of emitting states of each phone id."""
    return dict.fromkeys(nonsilence, phone_length) | dict.fromkeys(silence, silence_length)


def state_table(tree: DecisionTree, states_P: Mapping[int, int], loop: float = INITIAL_LOOP) -> StateTable:
    """Returns every (phone, state, pdf) that `tree` can produce, all with the same self-loop probability."""
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


def estimate_transitions(table: StateTable, parts: Iterable[Runs]) -> StateTable:
    """Estimates transition probabilities from the runs of an alignment, in any number of parts.

    A visit of n frames takes the self-loop n - 1 times and the exit once. Labels with few visits are smoothed towards
    all labels of their phone and state, which are smoothed towards the initial probability.
    """
    size = len(table.labels_L3)
    leave_L, stay_L = np.zeros(size), np.zeros(size)
    for runs in parts:
        leave_L += np.bincount(runs.label_R - 1, minlength=size)
        stay_L += np.bincount(runs.label_R - 1, runs.length_R - 1, minlength=size)
    _, group_L = np.unique(table.labels_L3[:, :2], axis=0, return_inverse=True)
    pooled_stay = np.bincount(group_L, stay_L) + PRIOR * INITIAL_LOOP
    pooled_leave = np.bincount(group_L, leave_L) + PRIOR * (1 - INITIAL_LOOP)
    pooled_L = (pooled_stay / (pooled_stay + pooled_leave))[group_L]
    # PRIOR visits are PRIOR / (1 - loop) frames
    weight_L = PRIOR / (1 - pooled_L)
    loop_L = np.clip((stay_L + weight_L * pooled_L) / (stay_L + leave_L + weight_L), FLOOR, 1 - FLOOR)
    return replace(table, loop_L=np.log(loop_L).astype(np.float32), next_L=np.log1p(-loop_L).astype(np.float32))
