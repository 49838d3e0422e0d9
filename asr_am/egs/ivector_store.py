"""Stores the i-vectors of a set of examples, one per speaker or segment. Loading adds them to the frames of a chunk.

    vectors.f32    float32 [R, S], one row after the other
    vectors.npz    first [U], count [U]: the rows of each utterance, which utterances of a speaker may share

Shapes: R rows, S dimensions of the i-vector, U utterances, B chunks, T frames of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

import numpy as np

from asr_am.data.checksums import intact
from asr_am.errors import InputError
from asr_am.features.ivector.ivector_archive import IvectorReader, segment

REMEDY = "run stage 5 (egs) again"
ROWS, INDEX = "vectors.f32", "vectors.npz"


def write_ivectors(directory: Path, reader: IvectorReader, utterances: Sequence[str]) -> None:
    """Writes the i-vectors of `utterances`. Raises InputError for a speaker without one."""
    rows_of_key: dict[str, tuple[int, int]] = {}  # first row and number of rows
    num_rows = 0
    with (directory / ROWS).open("wb") as file:
        for utterance in utterances:
            key = reader.key(utterance)
            if key not in rows_of_key:
                rows_KS = np.ascontiguousarray(reader[utterance], dtype=np.float32)
                file.write(rows_KS.data)
                rows_of_key[key] = num_rows, len(rows_KS)
                num_rows += len(rows_KS)
    first_U, count_U = np.array([rows_of_key[reader.key(u)] for u in utterances], dtype=np.int64).T
    np.savez(directory / INDEX, first=first_U, count=count_U)


class IvectorStore:
    """Reader of the stored i-vectors of one set.

    Attributes:
        rows_RS: All i-vectors, a memory map.
        first_U: First row of each utterance.
        count_U: Number of rows of each utterance.
        period: Number of frames that a row is used for.
    """

    def __init__(self, directory: Path, width: int, period: int, utterances: int) -> None:
        """Opens the files in `directory`. Raises InputError if one is missing, damaged or of another size."""
        self.period = period
        index, rows = intact(directory / INDEX), intact(directory / ROWS)
        try:
            with np.load(index, allow_pickle=False) as file:
                self.first_U, self.count_U = file["first"], file["count"]
            self.rows_RS = np.asarray(np.memmap(rows, dtype=np.float32, mode="r")).reshape(-1, width)
        except Exception as error:  # zipfile, zlib and numpy raise many types
            raise InputError(f"{directory / INDEX}, {ROWS}: not readable ({error}); {REMEDY}") from error
        if self.first_U.shape != (utterances,) or self.count_U.shape != (utterances,):
            raise InputError(f"{directory / INDEX}: does not hold {utterances} utterances; {REMEDY}")
        if self.first_U.min() < 0 or self.count_U.min() < 1 or (self.first_U + self.count_U).max() > len(self.rows_RS):
            raise InputError(f"{directory / INDEX}: refers to rows past the end of {ROWS}; {REMEDY}")

    @classmethod
    def joined(cls, stores: Sequence[IvectorStore]) -> IvectorStore:
        """Returns the i-vectors of several sets, one set after the other."""
        joined = copy(stores[0])
        before = np.cumsum([0, *(len(store.rows_RS) for store in stores[:-1])])
        joined.rows_RS = stores[0].rows_RS if len(stores) == 1 else np.concatenate([s.rows_RS for s in stores])
        joined.first_U = np.concatenate([store.first_U + rows for store, rows in zip(stores, before, strict=True)])
        joined.count_U = np.concatenate([store.count_U for store in stores])
        return joined

    @cached_property
    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the rows, float32 [S] each."""
        deviation_S = self.rows_RS.std(axis=0, dtype=np.float64).clip(1e-5)
        return self.rows_RS.mean(axis=0, dtype=np.float64).astype(np.float32), deviation_S.astype(np.float32)

    def of_chunks(self, utterance_B: np.ndarray, begin_B: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct i-vectors of chunks, and which of them each frame has.

        Returns:
            I-vectors, float32 [B, M, S], with M of the chunk that has most. Which of a chunk's, int64 [B, T].
        """
        row_BT = segment(begin_B[:, None] + np.arange(chunk), self.period, self.count_U[utterance_B, None])
        which_BT = row_BT - row_BT[:, :1]
        row_BM = np.minimum(row_BT[:, :1] + np.arange(which_BT.max() + 1), self.count_U[utterance_B, None] - 1)
        return self.rows_RS[self.first_U[utterance_B, None] + row_BM], which_BT
