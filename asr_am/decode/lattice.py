"""Raw lattices as arrays, and as archives that Kaldi's tools read.

Shapes: A arcs, S states, T frames.

An archive is Kaldi's: for each utterance its id, a blank and the bytes of an OpenFst `lattice4` FST, whose input
labels are graph labels (`asr_am.hmm.states`), whose output labels are words and whose weights are pairs of graph cost
and unscaled acoustic cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays


@dataclass(frozen=True)
class Lattice:
    """An acyclic word lattice with states in topological order and arcs sorted by target state.

    State 0 is the start and the last state the only final one: where the decoder ended, arcs without labels lead to it.
    source_A, target_A: int32. label_A: graph label of the frame the arc consumes, 0 for none. word_A: 0 for none.
    graph_A, acoustic_A: float64 costs (negative log), acoustic unscaled.
    frame_S: frames consumed on the way to a state. level_S: longest number of arcs from the start, non-decreasing.
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
        """From an FST with (graph, acoustic) weights; ValueError for one that is empty, cyclic or without an end."""
        if raw.num_states == 0:
            raise ValueError("empty lattice")
        ends = np.flatnonzero(np.isfinite(raw.final_S).all(axis=1)).astype(np.int32)
        zeros = np.zeros_like(ends)
        source_A = np.concatenate([raw.source_A, ends])
        target_A = np.concatenate([raw.target_A, np.full_like(ends, raw.num_states)])
        label_A = np.concatenate([raw.ilabel_A, zeros])
        level_S, frame_S = _levels(source_A, target_A, label_A, raw.start, raw.num_states + 1)
        kept = np.flatnonzero(level_S >= 0)  # reached from the start
        order = kept[np.argsort(level_S[kept], kind="stable")]
        if len(ends) == 0 or order[-1] != raw.num_states:
            raise ValueError("lattice without an end")
        position_S = np.full(raw.num_states + 1, -1, dtype=np.int32)
        position_S[order] = np.arange(len(order), dtype=np.int32)
        arcs = np.flatnonzero(position_S[source_A] >= 0)
        arcs = arcs[np.argsort(position_S[target_A[arcs]], kind="stable")]
        cost_A2 = np.concatenate([raw.weight_A, raw.final_S[ends]]).astype(np.float64)[arcs]
        return cls(
            source_A=position_S[source_A[arcs]], target_A=position_S[target_A[arcs]], label_A=label_A[arcs],
            word_A=np.concatenate([raw.olabel_A, zeros])[arcs], graph_A=cost_A2[:, 0], acoustic_A=cost_A2[:, 1],
            frame_S=frame_S[order], level_S=level_S[order],
        )  # fmt: skip


def _levels(
    source_A: np.ndarray, target_A: np.ndarray, label_A: np.ndarray, start: int, num_states: int
) -> tuple[np.ndarray, np.ndarray]:
    """(level_S, frame_S), -1 where a state is not reached from `start`: Kahn's algorithm."""
    arcs_S: list[list[tuple[int, int]]] = [[] for _ in range(num_states)]
    for source, target, label in zip(source_A.tolist(), target_A.tolist(), label_A.tolist(), strict=True):
        arcs_S[source].append((target, 1 if label else 0))
    waiting_S = _reached_arcs(arcs_S, start)
    level_S, frame_S = [-1] * num_states, [-1] * num_states
    level_S[start] = frame_S[start] = 0
    ready = [start] if waiting_S[start] == 0 else []
    for state in ready:
        level, frame = level_S[state] + 1, frame_S[state]
        for target, consumed in arcs_S[state]:
            level_S[target] = max(level_S[target], level)
            frame_S[target] = frame + consumed
            waiting_S[target] -= 1
            if waiting_S[target] == 0:
                ready.append(target)
    if any(waiting_S):
        raise ValueError("cyclic lattice")
    return np.array(level_S, dtype=np.int32), np.array(frame_S, dtype=np.int32)


def _reached_arcs(arcs_S: list[list[tuple[int, int]]], start: int) -> list[int]:
    """For each state the number of arcs into it from states that `start` reaches."""
    count_S = [0] * len(arcs_S)
    seen = {start}
    todo = [start]
    while todo:
        for target, _ in arcs_S[todo.pop()]:
            count_S[target] += 1
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return count_S


def read_lattices(path: Path) -> Iterator[tuple[str, Lattice]]:
    """(utterance, lattice) pairs of a binary archive; InputError where it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); run stage 7 (decode) again") from error
    position = 0
    while position < len(data):
        end = data.find(b" ", position)
        try:
            utterance = data[position : end if end >= 0 else len(data)].decode()
            raw, position = FstArrays.from_lattice(data, end + 1)
            lattice = Lattice.from_arrays(raw)
        except ValueError as error:
            raise InputError(f"{path}: damaged at byte {position} ({error}); run stage 7 (decode) again") from error
        yield utterance, lattice
