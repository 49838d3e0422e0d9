"""The i-vectors of a set of examples: stored once a speaker or a segment, joined to the frames of a chunk on loading.

    vectors.f32    float32 [R, S], one row after the other
    vectors.npz    first [U], count [U]: the rows of each utterance; those of one speaker may share a row

Shapes: R rows, S dimensions of the i-vector, U utterances, B chunks, T frames of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.features.ivector.ivector_archive import IvectorReader, segment

REMEDY = "run stage 5 (egs) again"
ROWS, INDEX = "vectors.f32", "vectors.npz"


def write_vectors(directory: Path, reader: IvectorReader, utterances: Sequence[str]) -> None:
    """Write the i-vectors of `utterances`; InputError, naming the speaker, where one has none."""
    places: dict[str, tuple[int, int]] = {}
    rows = 0
    with (directory / ROWS).open("wb") as file:
        for utterance in utterances:
            key = reader.key(utterance)
            if key not in places:
                rows_KS = np.ascontiguousarray(reader[utterance], dtype=np.float32)
                file.write(rows_KS.data)
                places[key] = rows, len(rows_KS)
                rows += len(rows_KS)
    first_U, count_U = np.array([places[reader.key(utterance)] for utterance in utterances], dtype=np.int64).T
    np.savez(directory / INDEX, first=first_U, count=count_U)


class Vectors:
    """rows_RS: a memory map. period: frames that a row is for."""

    def __init__(self, directory: Path, width: int, period: int, utterances: int) -> None:
        """InputError where a file is missing, damaged, or does not fit."""
        self.period = period
        try:
            with np.load(directory / INDEX, allow_pickle=False) as file:
                self.first_U, self.count_U = file["first"], file["count"]
            self.rows_RS = np.asarray(np.memmap(directory / ROWS, dtype=np.float32, mode="r")).reshape(-1, width)
        except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds
            raise InputError(f"{directory / INDEX}, {ROWS}: not readable ({error}); {REMEDY}") from error
        if self.first_U.shape != (utterances,) or self.count_U.shape != (utterances,):
            raise InputError(f"{directory / INDEX}: is not for {utterances} utterances; {REMEDY}")
        if self.first_U.min() < 0 or self.count_U.min() < 1 or (self.first_U + self.count_U).max() > len(self.rows_RS):
            raise InputError(f"{directory / INDEX}: points to i-vectors that {ROWS} does not have; {REMEDY}")

    @cached_property
    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation [S] of the rows."""
        deviation_S = self.rows_RS.std(axis=0, dtype=np.float64).clip(1e-5)
        return self.rows_RS.mean(axis=0, dtype=np.float64).astype(np.float32), deviation_S.astype(np.float32)

    def of_chunks(self, utterance_B: np.ndarray, begin_B: np.ndarray, chunk: int) -> np.ndarray:
        """float32 [B, T, S]: the i-vector of each frame of chunks of `chunk` frames."""
        frame_BT = begin_B[:, None] + np.arange(chunk)
        row_BT = self.first_U[utterance_B, None] + segment(frame_BT, self.period, self.count_U[utterance_B, None])
        return self.rows_RS[row_BT]
