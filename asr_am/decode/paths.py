"""Best paths and posteriors of a lattice for many weightings at once, without searching again.

Shapes: A arcs, S states, K weightings (the last axis: everything is done for all of them in one stride).

The cost of an arc under LM weight w and insertion penalty p (both as Kaldi's score.sh has them) is
graph cost + p [the arc has a word] + acoustic cost / w.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from asr_am.decode.lattice import Lattice

CELLS = 4_000_000  # arcs x weightings that are looked at together, at 28 bytes


class Weights(NamedTuple):
    """One weighting: LM weight (> 0) and the cost of each word (negative: a bonus)."""

    lm: float
    insertion: float = 0.0


def costs(lattice: Lattice, weights: Sequence[Weights]) -> np.ndarray:
    """float64 [A, K]: the cost of every arc under every weighting."""
    lm_K, insertion_K = np.array(weights, dtype=np.float64).T
    cost_AK = lattice.graph_A[:, None] + lattice.acoustic_A[:, None] / lm_K
    cost_AK[lattice.word_A > 0] += insertion_K
    return cost_AK


def best_paths(lattice: Lattice, weights: Sequence[Weights]) -> list[np.ndarray]:
    """For every weighting the arcs of the cheapest path, from start to end. Exact."""
    step = max(1, CELLS // max(1, len(lattice.source_A)))
    parts = [weights[begin : begin + step] for begin in range(0, len(weights), step)]
    return [path for part in parts for path in _best_paths(lattice, part)]


def _best_paths(lattice: Lattice, weights: Sequence[Weights]) -> list[np.ndarray]:
    cost_AK = costs(lattice, weights)
    forward_SK = _forward(lattice, cost_AK, np.minimum)
    # The arcs that attain the minimum, bit for bit: the same sum of the same numbers. Any of them will do.
    arc, weighting = np.nonzero(forward_SK[lattice.source_A] + cost_AK == forward_SK[lattice.target_A])
    back_SK = np.full(forward_SK.shape, -1, dtype=np.int64)
    back_SK[lattice.target_A[arc], weighting] = arc
    each_K = np.arange(len(weights))
    state_K = np.full(len(weights), lattice.num_states - 1)
    steps = []
    while state_K.any():
        arc_K = back_SK[state_K, each_K]  # -1 at the start, state 0
        state_K = np.where(arc_K >= 0, lattice.source_A[arc_K], 0)
        steps.append(arc_K)
    arcs_KN = np.stack(steps[::-1], axis=1)
    return [path[path >= 0] for path in arcs_KN]


def arc_posteriors(lattice: Lattice, weights: Sequence[Weights]) -> np.ndarray:
    """float64 [A, K]: the share of each arc in the sum over all paths, where a path of cost c weighs exp(-c)."""
    score_AK = -costs(lattice, weights)
    forward_SK = _forward(lattice, score_AK, np.logaddexp)
    backward_SK = _backward(lattice, score_AK, np.logaddexp)
    score_AK += forward_SK[lattice.source_A] + backward_SK[lattice.target_A]
    return np.exp(np.minimum(score_AK - forward_SK[-1], 0.0))


def beam_excess(lattice: Lattice, weights: Weights) -> np.ndarray:
    """float64 [A]: how much dearer the best path through each arc is than the best path."""
    cost_AK = costs(lattice, [weights])
    forward_S, backward_S = (step(lattice, cost_AK, np.minimum)[:, 0] for step in (_forward, _backward))
    return forward_S[lattice.source_A] + cost_AK[:, 0] + backward_S[lattice.target_A] - forward_S[-1]


def _forward(lattice: Lattice, value_AK: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """[S, K]: values of all paths from the start to each state, combined by `combine` (its identity is infinite)."""
    result_SK = _nothing(lattice, value_AK, combine)
    result_SK[0] = 0.0
    source_A = lattice.source_A
    for first, last, groups, states in _steps(lattice.target_A, lattice.level_S):
        value = result_SK[source_A[first:last]] + value_AK[first:last]
        result_SK[states] = combine.reduceat(value, groups, axis=0)
    return result_SK


def _backward(lattice: Lattice, value_AK: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """[S, K]: values of all paths from each state to the end."""
    result_SK = _nothing(lattice, value_AK, combine)
    result_SK[-1] = 0.0
    order = np.argsort(lattice.source_A, kind="stable")
    source_A, target_A, value_AK = lattice.source_A[order], lattice.target_A[order], value_AK[order]
    for first, last, groups, states in reversed(list(_steps(source_A, lattice.level_S))):
        value = result_SK[target_A[first:last]] + value_AK[first:last]
        result_SK[states] = combine.reduceat(value, groups, axis=0)
    return result_SK


def _nothing(lattice: Lattice, value_AK: np.ndarray, combine: np.ufunc) -> np.ndarray:
    identity = np.inf if combine is np.minimum else -np.inf
    return np.full((lattice.num_states, value_AK.shape[1]), identity)


def _steps(state_A: np.ndarray, level_S: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Arcs sorted by `state_A`, one level of states at a time.

    Yields (first arc, arc after the last, first arc of each state counted from the first, the states).
    """
    if len(state_A) == 0:
        return
    begins = np.flatnonzero(np.r_[True, state_A[1:] != state_A[:-1]])
    states = state_A[begins]
    cuts = np.flatnonzero(np.diff(level_S[states])) + 1
    arc_bounds = np.r_[begins, len(state_A)].tolist()
    for low, high in pairwise([0, *cuts.tolist(), len(begins)]):
        first = arc_bounds[low]
        yield first, arc_bounds[high], begins[low:high] - first, states[low:high]
