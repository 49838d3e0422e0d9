"""The type in which weights and gradients travel (`launcher.wire`).

Float32 tensors of messages and collectives are rounded to it by the sender (to nearest, ties to even) and are float32
again at the receiver, so sums are float32. Int32 tensors are counters, indices and bits, and travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

WIRE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


def travels_as(x: Tensor, wire: torch.dtype) -> torch.dtype:
    """Returns the type in which a tensor is sent."""
    return torch.int32 if x.dtype == torch.int32 else wire


def rounded(x: Tensor, wire: torch.dtype) -> Tensor:
    """Returns a tensor as its receiver has it: float32 or int32. It may share memory with `x`."""
    return x if x.dtype == torch.int32 else x.to(wire).to(torch.float32)


def num_words(lengths: Iterable[int], dtypes: Iterable[torch.dtype]) -> int:
    """Returns the 4-byte words of tensors of these lengths and types, each of which begins at a word."""
    return sum(-(-length * dtype.itemsize // 4) for length, dtype in zip(lengths, dtypes, strict=True))


@torch.no_grad()
def mean_in_order(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the mean [N] of tensors [N], added in this order in float32 so that it has the same bits every time."""
    rest = iter(tensors)
    total, count = next(rest).to(torch.float32, copy=True), 1
    for tensor in rest:
        total += tensor
        count += 1
    return total.div_(count)
