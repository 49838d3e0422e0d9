"""Stateless random numbers: each is a function of a key.

A draw for (seed, epoch, utterance) does not depend on the process that makes it or on the order of draws. This makes
training independent of the number of learners and loader workers, and exact to resume. The mixing function is a
vectorised SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

Shapes: N keys, K draws for each key.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = (1 << 64) - 1


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def combine(*parts: np.ndarray | int) -> np.ndarray:
    """Combines integers, or integer arrays that broadcast, into uint64 keys. Their order matters."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mix((key ^ np.asarray(part).astype(np.uint64)) + _GOLDEN)
    return key


def uniform_NK(key_N: np.ndarray, count: int) -> np.ndarray:
    """Draws K = `count` independent numbers in [0, 1) for each key, float64 [N, K]."""
    step_K = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    return (_mix(key_N[:, None] + step_K[None]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def string_keys(names: list[str]) -> np.ndarray:
    """Returns a key for each name, uint64 [N]. It does not depend on the position in the list."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def seed_of(*parts: int) -> int:
    """Combines integers into a 63-bit seed for a generator, as `combine` does. Each batch has one: arrays are slow."""
    z = 0
    for part in parts:
        z = ((z ^ (int(part) & _BITS)) + int(_GOLDEN)) & _BITS
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
        z ^= z >> 31
    return z >> 1
