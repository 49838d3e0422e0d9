"""Alignments on disk: an int32 vector of graph labels for every utterance, in Kaldi's archives.

Shapes: N frames of a set, T frames of one utterance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import kaldiio
import numpy as np

from asr_am.data.archive import read_archive, reason
from asr_am.data.npz import DAMAGE
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.hmm import REDO
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.states import StateTable


def write_alignments(folder: Path, subset: str, frames: FrameStore, labels_N: np.ndarray, *, final: Path) -> None:
    """Write <folder>/<subset>.ark and .scp for the aligned utterances; the .scp names the archive below `final`."""
    folder.mkdir(parents=True, exist_ok=True)
    ark = folder / f"{subset}.ark"
    temporary = folder / f"tmp.{os.getpid()}.{subset}"
    lines = []
    with open(temporary, "wb") as file:
        for index, utterance in enumerate(frames.utterances):
            labels_T = labels_N[frames.span(index)]
            if len(labels_T) and labels_T[0] > 0:
                offset = file.tell() + len(f"{utterance} ".encode())
                kaldiio.save_ark(file, {utterance: labels_T.astype(np.int32)})
                lines.append(f"{utterance} {final / ark.name}:{offset}")
    os.replace(temporary, ark)
    write_lines(folder / f"{subset}.scp", lines)


def read_alignments(folder: Path, subset: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (utterance, labels int32 [T]) from <folder>/<subset>.ark; InputError where it is missing or damaged."""
    ark = folder / f"{subset}.ark"
    if not ark.is_file():
        raise InputError(f"{ark}: no such alignments; run stage 3 (align)")
    try:
        for utterance, labels_T in read_archive(ark):
            if not isinstance(labels_T, np.ndarray) or labels_T.dtype != np.int32 or labels_T.ndim != 1:
                raise InputError(f"{ark}: {utterance} is not a vector of integers; {REDO}")
            yield utterance, labels_T
    except (*DAMAGE, AssertionError, IndexError) as error:
        raise InputError(f"{ark}: damaged ({reason(error)}); {REDO}") from error


def load_labels(folder: Path, subset: str, frames: FrameStore, table: StateTable) -> np.ndarray:
    """The alignments of a set as labels_N, int32, parallel to `frames`; 0 where an utterance has none. Checked."""
    index_of = {utterance: index for index, utterance in enumerate(frames.utterances)}
    lengths = dict(zip(frames.utterances, np.diff(frames.offsets_U1).tolist(), strict=True))
    check_alignments(folder, subset, lengths, table)
    labels_N = np.zeros(frames.num_frames, dtype=np.int32)
    for utterance, labels_T in read_alignments(folder, subset):
        labels_N[frames.span(index_of[utterance])] = labels_T
    return labels_N


def check_alignments(folder: Path, subset: str, lengths: Mapping[str, int], table: StateTable) -> int:
    """How many utterances are aligned. InputError, naming the utterance, unless each one fits `lengths` and `table`.

    lengths: frames of every utterance that may be aligned.
    """
    count = 0
    for utterance, labels_T in read_alignments(folder, subset):
        name = f"{folder / subset}.ark: {utterance}"
        if utterance not in lengths:
            raise InputError(f"{name} is not an utterance of the features; {REDO}")
        if len(labels_T) != lengths[utterance]:
            raise InputError(f"{name} has {len(labels_T)} frames, its features {lengths[utterance]}; {REDO}")
        if labels_T.min() < 1 or labels_T.max() > len(table.labels_L3):
            raise InputError(f"{name} has graph labels outside 1..{len(table.labels_L3)}; {REDO}")
        if table.pdf_L[labels_T - 1].max() >= table.num_pdfs:
            raise InputError(f"{name} has a pdf beyond the {table.num_pdfs} of the model; {REDO}")
        count += 1
    if count == 0:
        raise InputError(f"{folder / subset}.ark: no utterance is aligned; {REDO}")
    return count
