"""Probabilities of staying in a state and of leaving it, counted from alignments.

Shapes: L graph labels, N frames, R runs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asr_am.hmm.runs import Runs
from asr_am.hmm.states import StateTable
from asr_am.hmm.topology import INITIAL_LOOP

FLOOR = 0.01  # no probability below this, as in Kaldi
PRIOR = 10.0  # how many visits the pooled estimate of all contexts counts for


def estimate_transitions(table: StateTable, runs: Runs) -> StateTable:
    """`table` with probabilities from `runs`: a visit of length n stays n - 1 times and leaves once.

    A label with few visits leans on all labels of its phone and state, and those on the initial probability.
    """
    size = len(table.labels_L3)
    leave_L = np.bincount(runs.label_R - 1, minlength=size).astype(np.float64)
    stay_L = np.bincount(runs.label_R - 1, runs.length_R - 1, minlength=size)
    _, group_L = np.unique(table.labels_L3[:, :2], axis=0, return_inverse=True)
    pooled_stay = np.bincount(group_L, stay_L) + PRIOR * INITIAL_LOOP
    pooled_leave = np.bincount(group_L, leave_L) + PRIOR * (1 - INITIAL_LOOP)
    pooled_L = (pooled_stay / (pooled_stay + pooled_leave))[group_L]
    # a prior of PRIOR visits stands for PRIOR / (1 - loop) frames
    weight_L = PRIOR / (1 - pooled_L)
    loop_L = np.clip((stay_L + weight_L * pooled_L) / (stay_L + leave_L + weight_L), FLOOR, 1 - FLOOR)
    return replace(table, loop_L=np.log(loop_L).astype(np.float32), next_L=np.log1p(-loop_L).astype(np.float32))
