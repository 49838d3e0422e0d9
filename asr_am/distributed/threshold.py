"""Gradients by threshold, as Gradient Threshold Compression sends them: ±τ where an element is beyond τ, each packed
with its index into one 32-bit word.

    sent_k = τ sign(r_k) where |r_k| > τ, else 0        r <- r - sent        word = index (31 bits) | sign bit of r_k

Strom (Interspeech 2015); Ladkat et al. (2019), section 2.1. r residual, τ threshold.

Shapes: N elements of a bucket, at most MOST; n words of a message, by ascending index.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

MOST = 1 << 31  # elements that 31 bits can count
INDEX, SIGN = 0x7FFFFFFF, -0x80000000  # of a word
CHUNK = 1 << 16  # elements whose temporaries stay in a core's cache


def encode(residual: Tensor, threshold: float, gradient: Tensor | None = None) -> Tensor:
    """The words [n], int32, of what is beyond the threshold in float32 `residual` [N], from which it is taken.

    gradient: [N], first residual <- residual + gradient, gradient <- 0, in the same pass through memory.
    """
    if residual.is_cuda:
        return _encode_whole(residual, threshold, gradient)
    words, beyond, scratch = [np.empty(0, np.int32)], np.empty(CHUNK, np.bool_), np.empty(CHUNK, np.float32)
    for begin in range(0, len(residual), CHUNK):
        part = residual.numpy()[begin : begin + CHUNK]
        room = scratch[: len(part)]
        if gradient is not None:
            room = gradient.numpy()[begin : begin + CHUNK]  # once it is added, it is scratch memory in the cache
            np.add(part, room, out=part)
        words.append(_encode_in_cache(part, np.float32(threshold), begin, room, beyond[: len(part)]))
    return torch.from_numpy(np.concatenate(words))


def decode(words: Tensor, into: Tensor, value: float) -> None:
    """Add ±value to `into` [N] at the index of each word [n], of one message or of several one after the other."""
    sign = (words >> 31).mul_(2).add_(1)  # -1 or 1
    into.scatter_add_(0, (words & INDEX).long(), sign.to(into.dtype).mul_(value))


def exact_unit(value: float, most: int) -> float:
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


def _encode_in_cache(
    r: np.ndarray, threshold: np.float32, offset: int, room: np.ndarray, beyond: np.ndarray
) -> np.ndarray:
    """A chunk, whose words count from `offset` before it. NumPy compares and searches several times as fast as torch.

    room, beyond: memory of its length to work in (to allocate it for each chunk would take longer than all of this);
    room is zero afterwards.
    """
    np.abs(r, out=room)
    np.greater(room, threshold, out=beyond)
    room.fill(0.0)
    index = beyond.nonzero()[0]
    before = r.take(index)
    r[index] = before - np.copysign(threshold, before)
    return (index + offset).astype(np.int32) | (before.view(np.int32) & np.int32(SIGN))
