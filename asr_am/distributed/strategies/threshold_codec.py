"""The codec of Gradient Threshold Compression: an element beyond ±τ is sent as ±τ, packed with its index into a word.

    sent_k = τ sign(r_k) where |r_k| > τ, else 0        r <- r - sent        word = index (31 bits) | sign bit of r_k

Strom (Interspeech 2015) and Ladkat et al. (2019), section 2.1. r residual, τ threshold. Words have 32 bits.

Shapes: N elements of a bucket, at most MAX_ELEMENTS, and n words of a message, by ascending index.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from asr_am.compiled import compiled

MAX_ELEMENTS = 1 << 31  # number of elements that an index of 31 bits can address
INDEX, SIGN = 0x7FFFFFFF, -0x80000000  # bit masks of a word
BLOCK = 32  # elements that stay in a core's first-level cache while they are added, compared and searched


def encode(
    residual: Tensor, threshold: float, gradient: Tensor | None = None, remains: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Packs the elements beyond the threshold and subtracts ±threshold from them.

    Args:
        residual: float32 [N].
        threshold: τ.
        gradient: float32 [N]. If given, it is first added to the residual and then zeroed, in one pass through memory.
        remains: float32 [N], where the new residual is written. None: over `residual`.

    Returns:
        The words [n], int32.
    """
    remains = residual if remains is None else remains
    if residual.is_cuda:
        return _encode_tensors(residual, threshold, gradient, remains)
    packed = np.empty(len(residual), np.int32)
    added = None if gradient is None else gradient.numpy()
    count = _encode(residual.numpy(), np.float32(threshold), added, remains.numpy(), packed)
    return torch.from_numpy(packed[:count].copy())


def decode(packed: Tensor, into: Tensor, value: float) -> None:
    """Adds ±value to `into` at the index of each word.

    Args:
        packed: words [n] of one message, or of several one after the other.
        into: float32 [N], changed in place.
        value: the step.

    Raises:
        IndexError: an index is beyond N (on a CPU).
    """
    if into.is_cuda:
        sign = (packed >> 31).mul_(2).add_(1)  # -1 or 1
        into.scatter_add_(0, (packed & INDEX).long(), sign.to(into.dtype).mul_(value))
    else:
        _decode(packed.numpy(), into.numpy(), np.float32(value))


def round_to_exact(value: float, most: int) -> float:
    """Rounds `value` to so few bits that sums of up to `most` of it are exact in float32, in any order."""
    mantissa, exponent = math.frexp(value)
    bits = 24 - most.bit_length()
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def _encode_tensors(residual: Tensor, threshold: float, gradient: Tensor | None, remains: Tensor) -> Tensor:
    """Does the same by operations on whole tensors, for a GPU."""
    if gradient is None:
        remains.copy_(residual)
    else:
        torch.add(residual, gradient, out=remains)
        gradient.zero_()
    index = (remains.abs() > threshold).nonzero().squeeze(1)
    beyond = remains[index]
    remains[index] = beyond - torch.copysign(torch.full_like(beyond, threshold), beyond)
    return index.to(torch.int32) | (beyond.view(torch.int32) & SIGN)


# Compiled, because NumPy operations, even on pieces that stay in the cache, take longer than copying the gradient.


@compiled
def _encode(
    r: np.ndarray, threshold: np.float32, gradient: np.ndarray | None, remains: np.ndarray, packed: np.ndarray
) -> int:  # fmt: skip
    """Encodes into `packed` [N] and returns n."""
    n = 0
    for begin in range(0, len(r), BLOCK):
        before, part = r[begin : begin + BLOCK], remains[begin : begin + BLOCK]
        if gradient is None:
            part[:] = before
        else:
            added = gradient[begin : begin + BLOCK]
            for i in range(len(part)):
                part[i] = before[i] + added[i]
            added[:] = 0
        beyond = np.int32(0)
        for i in range(len(part)):  # without a branch, so that it compiles to vector instructions
            beyond += np.int32(abs(part[i]) > threshold)
        if beyond:
            for i in range(len(part)):
                value = part[i]
                if abs(value) > threshold:
                    part[i] = value - np.copysign(threshold, value)
                    packed[n] = (begin + i) | (SIGN if value < 0 else 0)
                    n += 1
    return n


@compiled(boundscheck=True)
def _decode(packed: np.ndarray, into: np.ndarray, value: np.float32) -> None:
    for word in packed:
        into[word & INDEX] += -value if word < 0 else value
