"""Selected rows of a sparse parameter, with the operations to shard, merge and serialise them.

Shapes: V rows of the whole parameter, K selected rows, D elements of a row, S servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asr_am.distributed.team import CostKind, Team

WireDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class IndexedRows:
    """Rows [K, D] of a parameter with their row numbers, int64 [K], distinct and ascending."""

    numbers: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def squared_norm(self) -> Tensor:
        """Sum of squares of the values, a float64 scalar."""
        return torch.linalg.vector_norm(self.values, dtype=torch.float64).square()

    def part(self, server: int, servers: int, count: int) -> IndexedRows:
        """Returns the rows, of a parameter with `count`, that live on one of `servers`, numbered as they are there."""
        positions = row_positions(self.numbers, server, servers, count)
        return IndexedRows(self.numbers[positions] // servers, gather(self.values, positions))


def row_positions(numbers: Tensor, server: int, servers: int, count: int) -> Tensor | slice:
    """Returns the positions in `numbers` [K] of the rows, of a parameter with `count`, that live on one of `servers`.

    Row r lives on server r mod S, as row r // S. This balances bytes for every parameter. It also balances traffic,
    because vocabularies list frequent words first.
    """
    if len(numbers) == count:
        return slice(server, None, servers)
    return (numbers % servers == server).nonzero()[:, 0]


def gather(values: Tensor, where: Tensor | slice) -> Tensor:
    """Returns the rows `where` of `values` [V, D]. Faster than values[where] for a tensor of row numbers."""
    return values[where] if isinstance(where, slice) else values.index_select(0, where)


def scatter(rows: Tensor, values: Tensor, where: Tensor | slice) -> None:
    """Writes `rows` [K, D] to the rows `where` of `values` [V, D], in place. Row numbers must be distinct."""
    if isinstance(where, slice):
        values[where] = rows
    else:
        values.index_copy_(0, where, rows)


def num_rows_on(server: int, servers: int, count: int) -> int:
    """Returns how many of V = `count` rows live on a server."""
    return len(range(server, count, servers))


def merge(parts: Sequence[IndexedRows], count: int) -> IndexedRows:
    """Returns the sum of rows of a parameter with V = `count` rows.

    Rows with the same number are added in the order of `parts`.
    """
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    if all(len(part) == count for part in parts):
        values = parts[0].values.clone()
        for part in parts[1:]:
            values += part.values
        return IndexedRows(parts[0].numbers, values)
    numbers, positions = torch.unique(torch.cat([part.numbers for part in parts]), return_inverse=True)
    values = parts[0].values.new_zeros(len(numbers), parts[0].values.shape[1])
    for part, where in zip(parts, positions.split([len(part) for part in parts]), strict=True):
        values.index_add_(0, where, part.values)
    return IndexedRows(numbers, values)


def accumulate(parts: Sequence[IndexedRows], count: int, each: bool, team: Team, kind: CostKind) -> IndexedRows:
    """Returns the sum of gradients of a parameter with V = `count` rows. Its time passes on a virtual cluster.

    With `each`, adds one part after the other to a running sum, like an accumulator that is given them one at a time.
    Else adds all at once, which reads each element once. Both give the same rows.
    """
    read = list(parts)
    if each:
        total = parts[0]
        for part in parts[1:]:
            total = merge([total, part], count)
            read.append(total)
    else:
        total = merge(parts, count)
    for scattered in (False, True):  # elements added in sequence, and by row number
        elements = sum(rows.values.numel() for rows in read if (len(rows) != count) == scattered)
        if elements:
            team.simulate_cost(kind, elements, scattered)
    return total


# Serialisation. Messages hold float32 and int32 tensors only, so other types travel as int32 tensors of equal bits.


def pack(values: Tensor, wire: WireDtype) -> Tensor:
    """Serialises values [K, D] for a message."""
    flat = values.detach().reshape(-1)
    if wire == "float32":
        return flat
    half = flat.to(torch.bfloat16)
    if len(half) % 2:
        half = torch.cat([half, half.new_zeros(1)])
    return half.view(torch.int32)


def unpack(sent: Tensor, shape: Sequence[int], wire: WireDtype) -> Tensor:
    """Inverts `pack`, given the shape [K, D] of the values."""
    if wire == "float32":
        return sent.view(*shape)
    return sent.view(torch.bfloat16)[: math.prod(shape)].float().view(*shape)


def pack_numbers(numbers: Tensor) -> Tensor:
    """Serialises row numbers as int32."""
    return numbers.to("cpu", torch.int32)


def unpack_numbers(sent: Tensor) -> Tensor:
    """Inverts `pack_numbers`."""
    return sent.long()


def pack_header(*numbers: float) -> Tensor:
    """Serialises a few numbers as doubles, without loss."""
    return torch.tensor(numbers, dtype=torch.float64).view(torch.int32)


def unpack_header(sent: Tensor) -> list[float]:
    """Inverts `pack_header`."""
    return list(sent.clone().view(torch.float64).tolist())
