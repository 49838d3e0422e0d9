"""Some rows of a sparse parameter: what is pulled, pushed, merged and updated.

Shapes: V rows of the whole parameter, K of them here, D elements of a row, S servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WireDtype = Literal["float32", "bfloat16"]

# Adding rows by number takes so many times as long as adding them one after the other. Chosen: averaging_bandwidth of
# conf/cluster/parallax_tb.yaml is calibrated with it. Measured on one core of a CPU: 7 to 13, `merge` with all it does.
SCATTER_COST = 4


@dataclass(frozen=True)
class IndexedRows:
    """numbers: of the rows, int64 [K], distinct and ascending. values [K, D]."""

    numbers: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def square(self) -> Tensor:
        """Sum of the squares, float64."""
        return torch.linalg.vector_norm(self.values, dtype=torch.float64).square()

    def part(self, server: int, servers: int, count: int) -> IndexedRows:
        """Those that live on a server, by their numbers there. count: V."""
        here = row_positions(self.numbers, server, servers, count)
        return IndexedRows(self.numbers[here] // servers, gather(self.values, here))


def row_positions(numbers: Tensor, server: int, servers: int, count: int) -> Tensor | slice:
    """Where in `numbers` [K] those are that live on a server: row r of V = `count` is row r // S of server r mod S.

    That splits every parameter evenly by bytes, and frequent words, which vocabularies put first, by traffic.
    """
    if len(numbers) == count:
        return slice(server, None, servers)
    return (numbers % servers == server).nonzero()[:, 0]


def gather(values: Tensor, where: Tensor | slice) -> Tensor:
    """Those rows of `values` [V, D]; by number faster than values[where]."""
    return values[where] if isinstance(where, slice) else values.index_select(0, where)


def scatter(rows: Tensor, values: Tensor, where: Tensor | slice) -> None:
    """Make `rows` [K, D] those rows of `values` [V, D], each of them once."""
    if isinstance(where, slice):
        values[where] = rows
    else:
        values.index_copy_(0, where, rows)


def rows_of(server: int, servers: int, count: int) -> int:
    """How many of V = `count` rows live on a server."""
    return len(range(server, count, servers))


def merge(parts: Sequence[IndexedRows], count: int) -> IndexedRows:
    """The sum of rows of a parameter with V = `count`; those of equal number are added in the order of the parts."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    if all(len(part) == count for part in parts):
        values = parts[0].values.clone()
        for part in parts[1:]:
            values += part.values
        return IndexedRows(parts[0].numbers, values)
    numbers, place = torch.unique(torch.cat([part.numbers for part in parts]), return_inverse=True)
    values = parts[0].values.new_zeros(len(numbers), parts[0].values.shape[1])
    for part, where in zip(parts, place.split([len(part) for part in parts]), strict=True):
        values.index_add_(0, where, part.values)
    return IndexedRows(numbers, values)


def accumulate(parts: Sequence[IndexedRows], count: int, each: bool) -> tuple[IndexedRows, int]:
    """The sum of rows, and its price: how many elements could be added one after the other in the same time.

    each: add one part after the other to what there is, as an accumulator does that is given them one at a time; else
    all at once, which reads each of them once and gives the same rows.
    """
    if not each:
        return merge(parts, count), sum(_price(part, count) for part in parts)
    total, price = parts[0], _price(parts[0], count)
    for part in parts[1:]:
        total = merge([total, part], count)
        price += _price(total, count) + _price(part, count)
    return total, price


def _price(rows: IndexedRows, count: int) -> int:
    return rows.values.numel() * (1 if len(rows) == count else SCATTER_COST)


# on the wire: float32 numbers, whose bits may be those of something else


def pack(values: Tensor, wire: WireDtype) -> Tensor:
    """Values [K, D] as a letter's tensor."""
    flat = values.detach().reshape(-1)
    if wire == "float32":
        return flat
    half = flat.to(torch.bfloat16)
    if len(half) % 2:
        half = torch.cat([half, half.new_zeros(1)])
    return half.view(torch.float32)


def unpack(sent: Tensor, shape: Sequence[int], wire: WireDtype) -> Tensor:
    if wire == "float32":
        return sent.view(*shape)
    return sent.view(torch.bfloat16)[: math.prod(shape)].float().view(*shape)


def pack_numbers(numbers: Tensor) -> Tensor:
    return numbers.to("cpu", torch.int32).view(torch.float32)


def unpack_numbers(sent: Tensor) -> Tensor:
    return sent.view(torch.int32).long()


def pack_head(*numbers: float) -> Tensor:
    """A few numbers as doubles, so that no bit is lost."""
    return torch.tensor(numbers, dtype=torch.float64).view(torch.float32)


def unpack_head(sent: Tensor) -> list[float]:
    return list(sent.clone().view(torch.float64).tolist())
