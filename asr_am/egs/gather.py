"""Copies chunks out of shards, compiled by numba. It releases the GIL, so loader threads copy at the same time.

Values are unsigned integers of the size of the stored floats, which numba need not know.

Shapes: R rows of a shard, C stored values of a frame, B chunks of a batch, T frames of a chunk, F inputs of a frame,
M distinct i-vectors of a chunk, S values of an i-vector.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(nogil=True, cache=True)
def gather_frames(
    x_RC: np.ndarray, y_R: np.ndarray, row_B: np.ndarray, at_B: np.ndarray, gap: tuple[int, int], x_BTF: np.ndarray,
    y_BT: np.ndarray,
) -> None:  # fmt: skip
    """Copies chunks of one shard.

    Args:
        x_RC: features of the shard. What lies beyond its last row is a copy of that row.
        y_R: its targets.
        row_B: first row of each chunk.
        at_B: where each goes in the batch.
        gap: columns of the i-vector, from and to, which are left as they are.
        x_BTF: features of the batch, changed in place.
        y_BT: targets of the batch, changed in place.
    """
    begin, end = gap
    num_frames, width, last = y_BT.shape[1], x_RC.shape[1], len(y_R) - 1
    for k in range(len(row_B)):
        b = at_B[k]
        for t in range(num_frames):
            row = min(row_B[k] + t, last)
            row_C, out_F = x_RC[row], x_BTF[b, t]
            for c in range(begin):
                out_F[c] = row_C[c]
            for c in range(begin, width):
                out_F[end - begin + c] = row_C[c]
            y_BT[b, t] = y_R[row]


@numba.njit(nogil=True, cache=True)
def set_vectors(vector_BMS: np.ndarray, which_BT: np.ndarray, begin: int, x_BTF: np.ndarray) -> None:
    """Sets the columns from `begin` on of each frame to vector `which_BT` of its chunk."""
    size = vector_BMS.shape[2]
    for b in range(len(x_BTF)):
        for t in range(x_BTF.shape[1]):
            vector_S, out_F = vector_BMS[b, which_BT[b, t]], x_BTF[b, t]
            for s in range(size):
                out_F[begin + s] = vector_S[s]
