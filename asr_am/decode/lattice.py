"""Raw lattices: reading Kaldi's archives, best paths and posteriors under many LM scales at once.

An archive has for each utterance its id, a blank and the bytes of an OpenFst `lattice4` FST. Input labels are graph
labels (`asr_am.hmm.states`), output labels are words, and weights are pairs of graph cost and unscaled acoustic cost.
Kaldi's tools read them.

The cost of an arc under LM weight w and insertion penalty p (as in Kaldi's score.sh) is
graph cost + p [the arc has a word] + acoustic cost / w.

Shapes: A arcs, K LM scales (the last axis, all are computed together), S states, T frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asr_am.compiled import compiled
from asr_am.data.checksums import intact
from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays

MAX_CELLS = 4_000_000  # arcs x scales computed together, at 28 bytes each


@dataclass(frozen=True)
class Lattice:
    """An acyclic word lattice with states in topological order and arcs sorted by target state.

    State 0 is the start. The last state is the only final one: arcs without labels lead to it from where the decoder
    ended.

    Attributes:
        source_A, target_A: int32 states.
        label_A: graph label of the frame that the arc consumes, 0 for none.
        word_A: word id, 0 for none.
        graph_A, acoustic_A: float64 costs (negative log), acoustic costs unscaled.
        frame_S: number of frames consumed before the state.
        level_S: largest number of arcs from the start to the state, non-decreasing.
    """

    source_A: np.ndarray
    target_A: np.ndarray
    label_A: np.ndarray
    word_A: np.ndarray
    graph_A: np.ndarray
    acoustic_A: np.ndarray
    frame_S: np.ndarray
    level_S: np.ndarray

    @property
    def num_states(self) -> int:
        return len(self.frame_S)

    @property
    def num_frames(self) -> int:
        return int(self.frame_S[-1])

    @property
    def density(self) -> float:
        """Arcs that consume a frame, per frame."""
        return float(np.count_nonzero(self.label_A)) / max(1, self.num_frames)

    @classmethod
    def from_arrays(cls, raw: FstArrays) -> Lattice:
        """Converts an FST with (graph, acoustic) weights. Raises ValueError if empty, cyclic or without an end."""
        if raw.num_states == 0:
            raise ValueError("empty lattice")
        finals = np.flatnonzero(np.isfinite(raw.final_S).all(axis=1)).astype(np.int32)
        zeros = np.zeros_like(finals)
        source_A = np.concatenate([raw.source_A, finals])
        target_A = np.concatenate([raw.target_A, np.full_like(finals, raw.num_states)])
        label_A = np.concatenate([raw.ilabel_A, zeros])
        level_S, frame_S = _levels(source_A, target_A, label_A, raw.start, raw.num_states + 1)
        kept = np.flatnonzero(level_S >= 0)  # states that the start reaches
        order = kept[np.argsort(level_S[kept], kind="stable")]
        if len(finals) == 0 or order[-1] != raw.num_states:
            raise ValueError("lattice without an end")
        position_S = np.full(raw.num_states + 1, -1, dtype=np.int32)
        position_S[order] = np.arange(len(order), dtype=np.int32)
        arcs = np.flatnonzero(position_S[source_A] >= 0)
        arcs = arcs[np.argsort(position_S[target_A[arcs]], kind="stable")]
        cost_A2 = np.concatenate([raw.weight_A, raw.final_S[finals]]).astype(np.float64)[arcs]
        return cls(
            source_A=position_S[source_A[arcs]], target_A=position_S[target_A[arcs]], label_A=label_A[arcs],
            word_A=np.concatenate([raw.olabel_A, zeros])[arcs], graph_A=cost_A2[:, 0], acoustic_A=cost_A2[:, 1],
            frame_S=frame_S[order], level_S=level_S[order],
        )  # fmt: skip


def sort_states(raw: FstArrays) -> FstArrays:
    """Returns a lattice with its states in topological order, without those that the start does not reach.

    Arcs may be in any order. Raises ValueError if the lattice is cyclic.
    """
    level_S, _ = _levels(raw.source_A, raw.target_A, raw.ilabel_A, raw.start, raw.num_states)
    kept = np.flatnonzero(level_S >= 0)
    order = kept[np.argsort(level_S[kept], kind="stable")]
    position_S = np.full(raw.num_states, -1, dtype=np.int32)
    position_S[order] = np.arange(len(order), dtype=np.int32)
    arcs = np.flatnonzero(position_S[raw.source_A] >= 0)
    arcs = arcs[np.argsort(position_S[raw.source_A[arcs]], kind="stable")]
    return FstArrays(
        0, position_S[raw.source_A[arcs]], position_S[raw.target_A[arcs]], raw.ilabel_A[arcs], raw.olabel_A[arcs],
        raw.weight_A[arcs], raw.final_S[order],
    )  # fmt: skip


def _levels(
    source_A: np.ndarray, target_A: np.ndarray, label_A: np.ndarray, start: int, num_states: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns level_S and frame_S, -1 for states that `start` does not reach."""
    order = np.argsort(source_A, kind="stable")
    first_S = np.searchsorted(source_A[order], np.arange(num_states + 1))
    level_S, frame_S = _sort_topologically(first_S, target_A[order], label_A[order], start)
    if len(level_S) == 0:
        raise ValueError("cyclic lattice")
    return level_S, frame_S


@compiled
def _sort_topologically(
    first_S: np.ndarray, target_A: np.ndarray, label_A: np.ndarray, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Computes level_S and frame_S by Kahn's algorithm, empty arrays if there is a cycle.

    `first_S` [S + 1] is the first arc of each state.
    """
    num_states = len(first_S) - 1
    waiting_S = np.zeros(num_states, np.int32)  # arcs into a state from states that the start reaches
    seen_S = np.zeros(num_states, np.bool_)
    queue = np.empty(num_states, np.int32)
    queue[0], seen_S[start], reached = start, True, 1
    done = 0
    while done < reached:
        state = queue[done]
        done += 1
        for arc in range(first_S[state], first_S[state + 1]):
            target = target_A[arc]
            waiting_S[target] += 1
            if not seen_S[target]:
                seen_S[target] = True
                queue[reached] = target
                reached += 1
    level_S, frame_S = np.full(num_states, -1, np.int32), np.full(num_states, -1, np.int32)
    level_S[start] = frame_S[start] = 0
    ready = 1 if waiting_S[start] == 0 else 0
    done = 0
    while done < ready:
        state = queue[done]
        done += 1
        for arc in range(first_S[state], first_S[state + 1]):
            target = target_A[arc]
            level_S[target] = max(level_S[target], level_S[state] + 1)
            frame_S[target] = frame_S[state] + (1 if label_A[arc] != 0 else 0)
            waiting_S[target] -= 1
            if waiting_S[target] == 0:
                queue[ready] = target
                ready += 1
    if ready < reached:
        return level_S[:0], frame_S[:0]
    return level_S, frame_S


def read_lattices(path: Path, only: str | None = None) -> Iterator[tuple[str, Lattice]]:
    """Yields (utterance, lattice) from a binary archive. Raises InputError if it is missing or damaged.

    With `only`, the lattices of all other utterances are passed over, which is much faster.
    """
    try:
        data = intact(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); run stage 7 (decode) again") from error
    position = 0
    while position < len(data):
        end = data.find(b" ", position)
        try:
            utterance = data[position : end if end >= 0 else len(data)].decode()
            raw, position = FstArrays.from_lattice(data, end + 1)
            if only is not None and utterance != only:
                continue
            lattice = Lattice.from_arrays(raw)
        except ValueError as error:
            raise InputError(f"{path}: damaged at byte {position} ({error}); run stage 7 (decode) again") from error
        yield utterance, lattice


class LmScale(NamedTuple):
    """One point of the grid: LM weight (above 0) and word insertion penalty (a cost per word, a bonus if negative)."""

    lm: float
    insertion: float = 0.0


def costs(lattice: Lattice, scales: Sequence[LmScale]) -> np.ndarray:
    """Returns float64 [A, K]: the cost of every arc under every scale."""
    lm_K, insertion_K = np.array(scales, dtype=np.float64).T
    cost_AK = lattice.graph_A[:, None] + lattice.acoustic_A[:, None] / lm_K
    cost_AK[lattice.word_A > 0] += insertion_K
    return cost_AK


def best_paths(lattice: Lattice, scales: Sequence[LmScale]) -> list[np.ndarray]:
    """Returns the arcs of the exact best path from start to end, for every scale."""
    step = max(1, MAX_CELLS // max(1, len(lattice.source_A)))
    parts = [scales[begin : begin + step] for begin in range(0, len(scales), step)]
    return [path for part in parts for path in _best_paths(lattice, part)]


def _best_paths(lattice: Lattice, scales: Sequence[LmScale]) -> list[np.ndarray]:
    _, back_SK = _best(*_forward(lattice), costs(lattice, scales))
    each_K = np.arange(len(scales))
    state_K = np.full(len(scales), lattice.num_states - 1)
    steps = []
    while state_K.any():
        arc_K = back_SK[state_K, each_K]  # -1 at the start, state 0
        state_K = np.where(arc_K >= 0, lattice.source_A[arc_K], 0)
        steps.append(arc_K)
    arcs_KN = np.stack(steps[::-1], axis=1)
    return [path[path >= 0] for path in arcs_KN]


def arc_posteriors(lattice: Lattice, scales: Sequence[LmScale]) -> np.ndarray:
    """Returns float64 [A, K]: the posterior of each arc, where a path of cost c has weight exp(-c)."""
    score_AK = -costs(lattice, scales)
    forward_SK, backward_SK = _sums(*_forward(lattice), score_AK), _sums(*_backward(lattice), score_AK)
    score_AK += forward_SK[lattice.source_A] + backward_SK[lattice.target_A]
    return np.exp(np.minimum(score_AK - forward_SK[-1], 0.0))


def beam_excess(lattice: Lattice, scale: LmScale) -> np.ndarray:
    """Returns float64 [A]: cost of the best path through each arc minus cost of the best path."""
    cost_AK = costs(lattice, [scale])
    (forward_SK, _), (backward_SK, _) = _best(*_forward(lattice), cost_AK), _best(*_backward(lattice), cost_AK)
    return (forward_SK[lattice.source_A] + cost_AK + backward_SK[lattice.target_A] - forward_SK[-1])[:, 0]


def backward_costs(lattice: Lattice, scale: LmScale) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cost of the best path from each state to the end [S], and its first arc [S], -1 at the end."""
    best_SK, arc_SK = _best(*_backward(lattice), costs(lattice, [scale]))
    return best_SK[:, 0], arc_SK[:, 0]


def _forward(lattice: Lattice) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Returns the first arguments of a pass from the start: arcs are sorted by target state already."""
    return np.arange(len(lattice.source_A)), lattice.source_A, lattice.target_A, 0, lattice.num_states


def _backward(lattice: Lattice) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Returns the first arguments of a pass from the end."""
    order_A = np.argsort(lattice.source_A, kind="stable")[::-1].copy()
    return order_A, lattice.target_A, lattice.source_A, lattice.num_states - 1, lattice.num_states


@compiled
def _best(
    order_A: np.ndarray, from_A: np.ndarray, to_A: np.ndarray, origin: int, num_states: int, cost_AK: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the best paths between a state and all others.

    Args:
        order_A: the arcs, each after all that lead to the state it comes from.
        from_A, to_A: states of each arc in the direction of the pass.

    Returns:
        Costs of the best paths [S, K], and the last arc of each, of equal paths the last one.
    """
    num_scales = cost_AK.shape[1]
    best_SK, last_SK = np.full((num_states, num_scales), np.inf), np.full((num_states, num_scales), -1)
    for k in range(num_scales):
        best_SK[origin, k] = 0
    for a in order_A:
        for k in range(num_scales):
            cost = best_SK[from_A[a], k] + cost_AK[a, k]
            if cost <= best_SK[to_A[a], k]:
                best_SK[to_A[a], k] = cost
                last_SK[to_A[a], k] = a
    return best_SK, last_SK


@compiled
def _sums(
    order_A: np.ndarray, from_A: np.ndarray, to_A: np.ndarray, origin: int, num_states: int, score_AK: np.ndarray
) -> np.ndarray:
    """Returns [S, K]: log sums over all paths between a state and all others. For the arguments see `_best`."""
    num_scales = score_AK.shape[1]
    sum_SK = np.full((num_states, num_scales), -np.inf)
    for k in range(num_scales):
        sum_SK[origin, k] = 0
    for a in order_A:
        for k in range(num_scales):
            x, y = sum_SK[to_A[a], k], sum_SK[from_A[a], k] + score_AK[a, k]
            if x < y:
                x, y = y, x
            sum_SK[to_A[a], k] = x if y == -np.inf else x + np.log1p(np.exp(y - x))
    return sum_SK
