"""Sums of weighted outer products, the bulk of the work in MLLT and fMLLR, as matrix products.

Shapes: N frames, D rows (one weight per frame for each), E values of a frame, F = E (E + 1) / 2.

For every row d the sum over frames of a_nd x_n x_n' is wanted. Written as a_DN @ (x x')_NF over the distinct products
it is one matrix product for all rows together, at half the arithmetic of full matrices. Products are float32, sums over
more than `BLOCK` frames float64.


What the Gaussians say of each frame: expected precisions and precision-weighted means, for MLLT and fMLLR.

Shapes: N frames, D feature dimension, M (frame, pdf) pairs, K Gaussians of one pdf, G Gaussians of all pdfs.

With g running over the Gaussians of a frame's pdfs and their posteriors p_g, a frame contributes to every statistic of
a linear transform only through sum_g p_g / var_g and sum_g p_g mean_g / var_g. These are what `DiagGmms` keeps as
factors of x*x and x, so one product with the posteriors gives both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr_am.hmm.gmm import DiagGmms

BLOCK = 2048  # frames: their products fit into a core's cache


def add_weighted_outer(total_DF: Tensor, a_ND: Tensor, x_NE: Tensor) -> None:
    """Add to `total_DF` (float64, packed upper triangles, see `unpack`) the sums over float32 frames."""
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
    """Values of a packed upper triangle, F."""
    return width * (width + 1) // 2


def unpack(packed_XF: Tensor, width: int) -> Tensor:
    """Symmetric matrices [..., E, E] from packed upper triangles [..., F], row by row from the diagonal on."""
    rows, columns = torch.triu_indices(width, width, device=packed_XF.device)
    full = packed_XF.new_empty(*packed_XF.shape[:-1], width, width)
    full[..., rows, columns] = packed_XF
    full[..., columns, rows] = packed_XF
    return full


@dataclass(frozen=True)
class Occupation:
    """Who was in which state: frame_M (rows of a block of frames), pdf_M, and weight_M, the posterior of the pdf."""

    frame_M: np.ndarray
    pdf_M: np.ndarray
    weight_M: np.ndarray

    @classmethod
    def of_alignment(cls, pdf_N: np.ndarray) -> Occupation:
        """One pdf for each frame; frames with a negative one are left out."""
        frame_M = np.flatnonzero(pdf_N >= 0)
        return cls(frame_M, pdf_N[frame_M], np.ones(len(frame_M), dtype=np.float32))

    @classmethod
    def joined(cls, parts: Sequence[Occupation], starts: Sequence[int]) -> Occupation:
        """Of several blocks one after the other, block i from row `starts[i]` on."""
        frame_M = np.concatenate([part.frame_M + start for part, start in zip(parts, starts, strict=False)])
        columns = zip(*((part.pdf_M, part.weight_M) for part in parts), strict=True)
        return cls(frame_M, *map(np.concatenate, columns))

    @property
    def frames(self) -> float:
        """Frames that count, posteriors summed."""
        return float(self.weight_M.sum(dtype=np.float64))


class Expectation:
    """The E step on a device. Posteriors come from `gmms`, parameters from `target` of equally many Gaussians."""

    def __init__(self, gmms: DiagGmms, target: DiagGmms | None = None, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._offsets_P1 = gmms.offsets_P1.tolist()
        self._linear_G2D = self.tensor(gmms.linear_G2D)
        self._constant_G = self.tensor(gmms.constant_G)
        self._target_G2D = self._linear_G2D if target is None else self.tensor(target.linear_G2D)

    def tensor(self, array: np.ndarray) -> Tensor:
        """A float32 array on the device."""
        return torch.from_numpy(np.array(array, dtype=np.float32)).to(self.device)  # a copy: memory maps are read-only

    def __call__(self, x_ND: Tensor, occupation: Occupation) -> tuple[Tensor, Tensor]:
        """(precision_ND, linear_ND), float32, zero in frames that no pdf occupies; x_ND as the Gaussians see it."""
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
