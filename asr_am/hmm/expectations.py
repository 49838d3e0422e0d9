"""Statistics of linear transforms: expected precisions and weighted means of frames, and sums of outer products.

With g running over the Gaussians of a frame's pdfs and their posteriors p_g, a frame contributes to every statistic of
MLLT and fMLLR only through sum_g p_g / var_g and sum_g p_g mean_g / var_g. `DiagGmms` keeps these as factors of x*x and
x, so one product with the posteriors gives both.

The statistic of row d is the sum over frames of a_nd x_n x_n'. Written as a_DN @ (x x')_NF over the distinct products,
it is one matrix product for all rows, with half the arithmetic of full matrices. Products are float32, and sums over
more than `BLOCK` frames float64.

Shapes: N frames, D feature dimension and rows of a transform, E values of a frame, F = E (E + 1) / 2,
M (frame, pdf) pairs, K Gaussians of one pdf, G Gaussians of all pdfs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr_am.hmm.gmm import DiagGmms

BLOCK = 2048  # frames whose products fit into a core's cache


def add_weighted_outer(total_DF: Tensor, a_ND: Tensor, x_NE: Tensor) -> None:
    """Adds the sum over frames of a_nd x_n x_n' to `total_DF`.

    Args:
        total_DF: packed upper triangles (see `statistics.unpack`), float64, changed in place.
        a_ND: weights of each frame, float32.
        x_NE: frames, float32.
    """
    width = x_NE.shape[1]
    products_FN = x_NE.new_empty(total_DF.shape[1], min(BLOCK, len(x_NE)))
    for begin in range(0, len(x_NE), BLOCK):
        x_EN = x_NE[begin : begin + BLOCK].T.contiguous()
        block_FN, row = products_FN[:, : x_EN.shape[1]], 0
        for e in range(width):
            torch.mul(x_EN[e:], x_EN[e], out=block_FN[row : row + width - e])
            row += width - e
        total_DF += (block_FN @ a_ND[begin : begin + BLOCK]).T


def packed_size(width: int) -> int:
    """Returns the number of values of a packed upper triangle, F."""
    return width * (width + 1) // 2


@dataclass(frozen=True)
class Occupation:
    """Pdf occupancies of a block of frames, as (frame, pdf) pairs.

    Attributes:
        frame_M: row of the frame in the block.
        pdf_M: pdf.
        weight_M: posterior of the pdf, float32.
    """

    frame_M: np.ndarray
    pdf_M: np.ndarray
    weight_M: np.ndarray

    @classmethod
    def of_alignment(cls, pdf_N: np.ndarray) -> Occupation:
        """Returns the occupancies of an alignment: one pdf per frame. Frames with a negative pdf are left out."""
        frame_M = np.flatnonzero(pdf_N >= 0)
        return cls(frame_M, pdf_N[frame_M], np.ones(len(frame_M), dtype=np.float32))

    @classmethod
    def joined(cls, parts: Sequence[Occupation], starts: Sequence[int]) -> Occupation:
        """Concatenates the occupancies of several blocks, with block i starting at row `starts[i]`."""
        frame_M = np.concatenate([part.frame_M + start for part, start in zip(parts, starts, strict=False)])
        columns = zip(*((part.pdf_M, part.weight_M) for part in parts), strict=True)
        return cls(frame_M, *map(np.concatenate, columns))

    @property
    def frames(self) -> float:
        """The number of frames: posteriors summed."""
        return float(self.weight_M.sum(dtype=np.float64))


class Expectation:
    """E-step of transform estimation on one device.

    Posteriors come from `gmms`, means and variances from `target`, which has equally many Gaussians (default: `gmms`).
    """

    def __init__(self, gmms: DiagGmms, target: DiagGmms | None = None, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._offsets_P1 = gmms.offsets_P1.tolist()
        self._linear_G2D = self.tensor(gmms.linear_G2D)
        self._constant_G = self.tensor(gmms.constant_G)
        self._target_G2D = self._linear_G2D if target is None else self.tensor(target.linear_G2D)

    def tensor(self, array: np.ndarray) -> Tensor:
        """Copies an array to the device as float32."""
        return torch.from_numpy(np.array(array, dtype=np.float32)).to(self.device)  # copied: memory maps are read-only

    def __call__(self, x_ND: Tensor, occupation: Occupation) -> tuple[Tensor, Tensor]:
        """Computes the expected precision and precision-weighted mean of each frame.

        Args:
            x_ND: frames with their current transform.

        Returns:
            (precision_ND, linear_ND), float32, zero for frames without a pdf.
        """
        order_M = np.argsort(occupation.pdf_M, kind="stable")
        frame_M = torch.from_numpy(occupation.frame_M[order_M]).to(self.device)
        x_MD = x_ND[frame_M]
        x_M2D = torch.cat([x_MD, x_MD * x_MD], dim=1)
        pdfs, first = np.unique(occupation.pdf_M[order_M], return_index=True)
        for pdf, (begin, end) in zip(pdfs.tolist(), itertools.pairwise([*first.tolist(), len(order_M)]), strict=True):
            rows = slice(self._offsets_P1[pdf], self._offsets_P1[pdf + 1])
            block = x_M2D[begin:end]
            posterior = torch.addmm(self._constant_G[rows], block, self._linear_G2D[rows].T).softmax(dim=1)
            x_M2D[begin:end] = posterior @ self._target_G2D[rows]
        x_M2D *= self.tensor(occupation.weight_M[order_M])[:, None]
        expected_N2D = x_ND.new_zeros(len(x_ND), x_M2D.shape[1]).index_add_(0, frame_M, x_M2D)
        linear_ND, halves_ND = expected_N2D.chunk(2, dim=1)
        return halves_ND * -2.0, linear_ND
