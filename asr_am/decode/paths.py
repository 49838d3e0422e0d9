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
    first_S = np.searchsorted(lattice.target_A, np.arange(lattice.num_states + 1)).tolist()
    source_A = lattice.source_A.tolist()
    paths = []
    for cost_A, forward_S in zip(cost_KA, forward_KS, strict=True):
        total_A = forward_S[lattice.source_A] + cost_A
        state, path = lattice.num_states - 1, []
        while state != 0:
            first, last = first_S[state], first_S[state + 1]
            arc = first if last - first == 1 else first + int(total_A[first:last].argmin())
            path.append(arc)
            state = source_A[arc]
        paths.append(np.array(path[::-1], dtype=np.int64))
    return paths


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
