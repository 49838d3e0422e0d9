"""Sums of weighted outer products, the bulk of the work in MLLT and fMLLR, as matrix products.

Shapes: N frames, D rows (one weight per frame for each), E values of a frame, F = E (E + 1) / 2.

For every row d the sum over frames of a_nd x_n x_n' is wanted. Written as a_DN @ (x x')_NF over the distinct products
it is one matrix product for all rows together, at half the arithmetic of full matrices. Products are float32, sums over
more than `BLOCK` frames float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
