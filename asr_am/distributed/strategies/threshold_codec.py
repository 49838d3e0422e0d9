"""Gradients by threshold, as Gradient Threshold Compression sends them: ±τ where an element is beyond τ, each packed
with its index into one 32-bit word.

    sent_k = τ sign(r_k) where |r_k| > τ, else 0        r <- r - sent        word = index (31 bits) | sign bit of r_k

Strom (Interspeech 2015); Ladkat et al. (2019), section 2.1. r residual, τ threshold.

Shapes: N elements of a bucket, at most MOST; n words of a message, by ascending index.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 31  # elements that 31 bits can count
INDEX, SIGN = 0x7FFFFFFF, -0x80000000  # of a word
BLOCK = 32  # elements that are in a core's first cache while they are added, compared and searched


def encode(residual: Tensor, threshold: float, gradient: Tensor | None = None) -> Tensor:
    """The words [n], int32, of what is beyond the threshold in float32 `residual` [N], from which it is taken.

    gradient: [N], first residual <- residual + gradient, gradient <- 0, in the same pass through memory.
    """
    if residual.is_cuda:
        return _encode_whole(residual, threshold, gradient)
    room = np.empty(len(residual), np.int32)
    count = _encode(residual.numpy(), np.float32(threshold), None if gradient is None else gradient.numpy(), room)
    return torch.from_numpy(room[:count].copy())


def decode(packed: Tensor, into: Tensor, value: float) -> None:
    """Add ±value to `into` [N] at the index of each word [n], of one message or of several one after the other.

    IndexError (on a CPU): an index beyond N.
    """
    if into.is_cuda:
        sign = (packed >> 31).mul_(2).add_(1)  # -1 or 1
        into.scatter_add_(0, (packed & INDEX).long(), sign.to(into.dtype).mul_(value))
    else:
        _decode(packed.numpy(), into.numpy(), np.float32(value))


def round_to_exact(value: float, most: int) -> float:
    """`value` to so few bits that sums of up to `most` of it are exact in float32, whatever their order."""
    mantissa, exponent = math.frexp(value)
    bits = 24 - most.bit_length()
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def _encode_whole(residual: Tensor, threshold: float, gradient: Tensor | None) -> Tensor:
    """As operations on whole tensors, for a GPU."""
    if gradient is not None:
        residual.add_(gradient)
        gradient.zero_()
    index = (residual.abs() > threshold).nonzero().squeeze(1)
    beyond = residual[index]
    residual[index] = beyond - torch.copysign(torch.full_like(beyond, threshold), beyond)
    return index.to(torch.int32) | (beyond.view(torch.int32) & SIGN)


# Compiled: as operations of NumPy, even on pieces that stay in the cache, this takes longer than copying the gradient.


@numba.njit(nogil=True)
def _encode(r: np.ndarray, threshold: np.float32, gradient: np.ndarray | None, packed: np.ndarray) -> int:
    """As `encode`, into `words` [N]; returns n."""
    n = 0
    for begin in range(0, len(r), BLOCK):
        part = r[begin : begin + BLOCK]
        if gradient is not None:
            part += gradient[begin : begin + BLOCK]
            gradient[begin : begin + BLOCK] = 0
        beyond = np.int32(0)
        for i in range(len(part)):  # without a branch, so that it becomes vector instructions
            beyond += np.int32(abs(part[i]) > threshold)
        if beyond:
            for i in range(len(part)):
                value = part[i]
                if abs(value) > threshold:
                    part[i] = value - np.copysign(threshold, value)
                    packed[n] = (begin + i) | (SIGN if value < 0 else 0)
                    n += 1
    return n


@numba.njit(nogil=True, boundscheck=True)
def _decode(packed: np.ndarray, into: np.ndarray, value: np.float32) -> None:
    for word in packed:
        into[word & INDEX] += -value if word < 0 else value
