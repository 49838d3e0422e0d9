"""Alignments: graph labels of every frame in memory and in Kaldi archives, and the runs they consist of.

The alignments of a whole set are one vector of graph labels, labels_N, parallel to the rows of its `FrameStore`. Label
0 marks the frames of utterances without an alignment. Its pdfs are looked up when they are read. On disk, each aligned
utterance has an int32 vector. A run is a maximal stretch of frames in one state of one phone.

Shapes: N frames of a set, T frames of one utterance, U utterances, R runs, M distinct contexts of runs, L graph labels.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asr_am import disk
from asr_am.data.checksums import intact
from asr_am.data.kaldi_archive import read_archive, reason, write_archive
from asr_am.data.npz import DAMAGE
from asr_am.data.temporary import PREFIX
from asr_am.disk import write_at
from asr_am.errors import InputError
from asr_am.hmm import REMEDY
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.states import StateTable

BLOCK = 2**20  # labels counted at a time
LABEL = np.dtype(np.int32)


@dataclass(frozen=True)
class Runs:
    """The runs of an alignment, in time order.

    Attributes:
        label_R: graph label.
        start_R: first frame.
        length_R: number of frames.
        windows_R3: previous, current and next phone. 0: beyond the utterance's edge.
        state_R: HMM state of the phone, from 0.
    """

    label_R: np.ndarray
    start_R: np.ndarray
    length_R: np.ndarray
    windows_R3: np.ndarray
    state_R: np.ndarray

    def contexts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct (window, state) rows, sorted, int64 [M, 4], and the row index of each run, int [R]."""
        keys_R4 = np.column_stack([self.windows_R3, self.state_R]).astype(np.int64)
        key_R = np.ravel_multi_index(tuple(keys_R4.T), keys_R4.max(axis=0, initial=0) + 1)  # faster to sort than rows
        _, first_M, context_R = np.unique(key_R, return_index=True, return_inverse=True)
        return keys_R4[first_M], context_R


@dataclass(frozen=True)
class LabelFile:
    """The labels of a set while workers write them, on this host or on others."""

    path: Path
    num_frames: int

    @classmethod
    def create(cls, folder: Path, num_frames: int) -> LabelFile:
        """Makes a file in `folder` with label 0 for each frame."""
        file, name = tempfile.mkstemp(dir=folder, prefix=f"{PREFIX}labels.")  # see `remove_leftovers`
        os.truncate(file, num_frames * LABEL.itemsize)
        os.close(file)
        return cls(Path(name), num_frames)

    def write(self, first: int, labels_T: np.ndarray) -> None:
        """Writes the labels of consecutive frames, from frame `first` on."""
        write_at(self.path, first * LABEL.itemsize, labels_T.astype(LABEL).tobytes())

    def read(self) -> np.ndarray:
        """Returns all labels, int32 [N], a read-only memory map. The file lasts as long as the map."""
        labels_N = np.memmap(self.path, LABEL, "r", shape=(self.num_frames,))
        disk.remove(self.path)
        return labels_N


@dataclass(frozen=True)
class FramePdfs:
    """The pdfs of an alignment, looked up when they are read: a corpus has more frames than memory.

    Attributes:
        labels_N: graph labels, 0 for frames without an alignment.
        pdf_L1: pdf of label 0 and of each label, -1 to ignore it. int32.
    """

    labels_N: np.ndarray
    pdf_L1: np.ndarray

    @classmethod
    def of(cls, labels_N: np.ndarray, states: StateTable) -> FramePdfs:
        """Returns the pdfs of graph labels. Frames without an alignment are ignored."""
        return cls(labels_N, np.concatenate([[-1], states.pdf_L]).astype(np.int32))

    def only(self, wanted_P: np.ndarray) -> FramePdfs:
        """Returns the same with frames of other pdfs ignored. `wanted_P` is bool."""
        return FramePdfs(self.labels_N, np.where((self.pdf_L1 >= 0) & wanted_P[self.pdf_L1], self.pdf_L1, -1))

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.pdf_L1[self.labels_N[rows]]

    def counts(self, num_pdfs: int) -> np.ndarray:
        """Returns the frames of each pdf, int64 [P]."""
        count_L1 = np.zeros(len(self.pdf_L1), np.int64)
        for begin in range(0, len(self.labels_N), BLOCK):
            count_L1 += np.bincount(self.labels_N[begin : begin + BLOCK], minlength=len(count_L1))
        used = self.pdf_L1 >= 0
        return np.bincount(self.pdf_L1[used], count_L1[used], minlength=num_pdfs).astype(np.int64)


def runs_of(labels_N: np.ndarray, offsets_U1: np.ndarray, table: StateTable) -> Runs:
    """Returns the runs of all aligned utterances.

    A phone begins with its first state, because topologies have no skips. A phone of one state that follows itself
    cannot be told apart from a single longer one, so both make one run, unless first steps have a label of their own.

    Args:
        labels_N: graph labels, 0 for frames without an alignment.
        offsets_U1: first frame of each utterance, and N.
    """
    new_N = np.ones(len(labels_N), dtype=bool)
    new_N[1:] = labels_N[1:] != labels_N[:-1]
    if table.first_steps:
        new_N[labels_N > 0] |= table.labels_L3[labels_N[labels_N > 0] - 1, 1] == 0
    new_N[offsets_U1[:-1][offsets_U1[:-1] < len(labels_N)]] = True
    start_R = np.flatnonzero(new_N)
    length_R = np.diff(np.append(start_R, len(labels_N)))
    aligned_R = labels_N[start_R] > 0
    start_R, length_R = start_R[aligned_R], length_R[aligned_R]

    label_R = labels_N[start_R]
    phone_R, state_R = table.labels_L3[label_R - 1, 0], table.labels_L3[label_R - 1, 1]
    utterance_R = np.searchsorted(offsets_U1, start_R, side="right")
    return Runs(label_R, start_R, length_R, _windows(phone_R, state_R, utterance_R), state_R)


def range_runs(labels_N: np.ndarray, frames: FrameStore, table: StateTable) -> Iterator[Runs]:
    """Yields the runs of each of the store's ranges, with `start_R` counted from the first frame of the range."""
    for first, end in frames.ranges():
        rows = frames.rows(first, end)
        yield runs_of(labels_N[rows], frames.offsets_U1[first : end + 1] - rows.start, table)


def _windows(phone_R: np.ndarray, state_R: np.ndarray, utterance_R: np.ndarray) -> np.ndarray:
    """Returns the previous, current and next phone of each run, [R, 3], with 0 beyond the utterance."""
    first_R = state_R == 0
    phone_S, utterance_S = phone_R[first_R], utterance_R[first_R]  # S: phone instances
    joined = utterance_S[1:] == utterance_S[:-1]
    left_S, right_S = np.zeros_like(phone_S), np.zeros_like(phone_S)
    left_S[1:] = np.where(joined, phone_S[:-1], 0)
    right_S[:-1] = np.where(joined, phone_S[1:], 0)
    windows_S3 = np.stack([left_S, phone_S, right_S], axis=1)
    return windows_S3[np.cumsum(first_R) - 1]


def write_alignments(folder: Path, subset: str, frames: FrameStore, labels_N: np.ndarray) -> None:
    """Writes <folder>/<subset>.ark and .scp for the aligned utterances.

    Args:
        labels_N: graph labels, 0 for frames without an alignment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    labels = ((utterance, labels_N[frames.span(index)]) for index, utterance in enumerate(frames.utterances))
    aligned = ((utterance, labels_T.astype(np.int32)) for utterance, labels_T in labels if labels_T.any())
    write_archive(folder, subset, aligned)


def read_alignments(folder: Path, subset: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (utterance, int32 labels [T]) from <folder>/<subset>.ark. Raises InputError if missing or damaged."""
    ark = folder / f"{subset}.ark"
    if not ark.is_file():
        raise InputError(f"{ark}: no such alignments; run stage 3 (align)")
    try:
        for utterance, labels_T in read_archive(intact(ark)):
            if not isinstance(labels_T, np.ndarray) or labels_T.dtype != np.int32 or labels_T.ndim != 1:
                raise InputError(f"{ark}: {utterance} is not a vector of integers; {REMEDY}")
            yield utterance, labels_T
    except (*DAMAGE, AssertionError, IndexError) as error:
        raise InputError(f"{ark}: damaged ({reason(error)}); {REMEDY}") from error


def load_labels(
    folder: Path, subset: str, frames: FrameStore, table: StateTable, others: Collection[str] = ()
) -> np.ndarray:
    """Loads and checks the alignments of a set.

    Args:
        others: further utterances that may be aligned.

    Returns:
        Graph labels, int32 [N], parallel to `frames`. 0 for utterances without an alignment.
    """
    index_of = {utterance: index for index, utterance in enumerate(frames.utterances)}
    other_names = set(others) - index_of.keys()
    labels_N = np.zeros(frames.num_frames, dtype=np.int32)
    count = 0
    for utterance, labels_T in read_alignments(folder, subset):
        if utterance in other_names:
            continue
        index = index_of.get(utterance)
        length = None if index is None else int(frames.offsets_U1[index + 1] - frames.offsets_U1[index])
        _check(f"{folder / subset}.ark: {utterance}", labels_T, length, table)
        labels_N[frames.span(index_of[utterance])] = labels_T
        count += 1
    _require_some(folder, subset, count)
    return labels_N


def check_alignments(folder: Path, subset: str, lengths: Mapping[str, int], table: StateTable) -> int:
    """Checks the alignments of a set against frame counts and states.

    Args:
        lengths: frames of every utterance that may be aligned.

    Returns:
        The number of aligned utterances.

    Raises:
        InputError: names the utterance that does not fit.
    """
    count = 0
    for utterance, labels_T in read_alignments(folder, subset):
        _check(f"{folder / subset}.ark: {utterance}", labels_T, lengths.get(utterance), table)
        count += 1
    _require_some(folder, subset, count)
    return count


def _check(name: str, labels_T: np.ndarray, length: int | None, table: StateTable) -> None:
    """Raises InputError if the utterance is not known (no `length`), or its labels do not fit frames or states."""
    if length is None:
        raise InputError(f"{name} is not an utterance of the features; {REMEDY}")
    if len(labels_T) != length:
        raise InputError(f"{name} has {len(labels_T)} frames, its features {length}; {REMEDY}")
    if labels_T.min() < 1 or labels_T.max() > len(table.labels_L3):
        raise InputError(f"{name} has graph labels outside 1..{len(table.labels_L3)}; {REMEDY}")
    if table.pdf_L[labels_T - 1].max() >= table.num_pdfs:
        raise InputError(f"{name} has a pdf beyond the {table.num_pdfs} of the model; {REMEDY}")


def _require_some(folder: Path, subset: str, count: int) -> None:
    if count == 0:
        raise InputError(f"{folder / subset}.ark: no utterance is aligned; {REMEDY}")
