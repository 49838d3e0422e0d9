"""Best paths and posteriors of a lattice for many weightings at once, without searching again.

Shapes: A arcs, S states, K weightings.

The cost of an arc under LM weight w and insertion penalty p (both as Kaldi's score.sh has them) is
graph cost + p [the arc has a word] + acoustic cost / w.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from asr_am.decode.lattice import Lattice


class Weights(NamedTuple):
    """One weighting: LM weight (> 0) and the cost of each word (negative: a bonus)."""

    lm: float
    insertion: float = 0.0


def costs(lattice: Lattice, weights: Sequence[Weights]) -> np.ndarray:
    """float64 [K, A]: the cost of every arc under every weighting."""
    lm_K1 = np.array([[w.lm] for w in weights])
    insertion_K1 = np.array([[w.insertion] for w in weights])
    return lattice.graph_A + insertion_K1 * (lattice.word_A > 0) + lattice.acoustic_A / lm_K1


def best_paths(lattice: Lattice, weights: Sequence[Weights]) -> list[np.ndarray]:
    """For every weighting the arcs of the cheapest path, from start to end. Exact."""
    cost_KA = costs(lattice, weights)
    forward_KS = _forward(lattice, cost_KA, np.minimum)
    # The arcs that attain the minimum, bit for bit: the same sum of the same numbers. Any of them will do.
    weighting, arc = np.nonzero(forward_KS[:, lattice.source_A] + cost_KA == forward_KS[:, lattice.target_A])
    back_KS = np.full(forward_KS.shape, -1, dtype=np.int64)
    back_KS[weighting, lattice.target_A[arc]] = arc
    rows_K = np.arange(len(weights))
    state_K = np.full(len(weights), lattice.num_states - 1)
    steps = []
    while state_K.any():
        arc_K = np.where(state_K > 0, back_KS[rows_K, state_K], -1)
        state_K = np.where(arc_K >= 0, lattice.source_A[arc_K], 0)
        steps.append(arc_K)
    arcs_KN = np.stack(steps[::-1], axis=1)
    return [path[path >= 0] for path in arcs_KN]


def arc_posteriors(lattice: Lattice, weights: Sequence[Weights]) -> np.ndarray:
    """float64 [K, A]: the share of each arc in the sum over all paths, where a path of cost c weighs exp(-c)."""
    score_KA = -costs(lattice, weights)
    forward_KS = _forward(lattice, score_KA, np.logaddexp)
    backward_KS = _backward(lattice, score_KA, np.logaddexp)
    score_KA += forward_KS[:, lattice.source_A] + backward_KS[:, lattice.target_A]
    return np.exp(np.minimum(score_KA - forward_KS[:, -1:], 0.0))


def beam_excess(lattice: Lattice, weights: Weights) -> np.ndarray:
    """float64 [A]: how much dearer the best path through each arc is than the best path."""
    cost_KA = costs(lattice, [weights])
    forward_S, backward_S = (f(lattice, cost_KA, np.minimum)[0] for f in (_forward, _backward))
    return forward_S[lattice.source_A] + cost_KA[0] + backward_S[lattice.target_A] - forward_S[-1]


def _forward(lattice: Lattice, value_KA: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """[K, S]: values of all paths from the start to each state, combined by `combine` (its identity is infinite)."""
    result_KS = np.full((len(value_KA), lattice.num_states), np.inf if combine is np.minimum else -np.inf)
    result_KS[:, 0] = 0.0
    source_A = lattice.source_A
    for first, last, groups, states in _steps(lattice.target_A, lattice.level_S):
        value = result_KS[:, source_A[first:last]] + value_KA[:, first:last]
        result_KS[:, states] = combine.reduceat(value, groups, axis=1)
    return result_KS


def _backward(lattice: Lattice, value_KA: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """[K, S]: values of all paths from each state to the end."""
    result_KS = np.full((len(value_KA), lattice.num_states), np.inf if combine is np.minimum else -np.inf)
    result_KS[:, -1] = 0.0
    order = np.argsort(lattice.source_A, kind="stable")
    source_A, target_A, value_KA = lattice.source_A[order], lattice.target_A[order], value_KA[:, order]
    for first, last, groups, states in reversed(list(_steps(source_A, lattice.level_S))):
        value = result_KS[:, target_A[first:last]] + value_KA[:, first:last]
        result_KS[:, states] = combine.reduceat(value, groups, axis=1)
    return result_KS


def _steps(state_A: np.ndarray, level_S: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Arcs sorted by `state_A`, one level of states at a time.

    Yields (first arc, arc after the last, first arc of each state counted from the first, the states).
    """
    if len(state_A) == 0:
        return
    begins = np.flatnonzero(np.r_[True, state_A[1:] != state_A[:-1]])
    states = state_A[begins]
    cuts = np.flatnonzero(np.diff(level_S[states])) + 1
    bounds = np.r_[0, cuts, len(begins)].tolist()
    arc_bounds = np.r_[begins, len(state_A)]
    for low, high in pairwise(bounds):
        first, last = int(arc_bounds[low]), int(arc_bounds[high])
        yield first, last, begins[low:high] - first, states[low:high]
