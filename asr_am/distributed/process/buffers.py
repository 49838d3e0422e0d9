"""Memory for letters that is used again once nobody holds it any more.

Fresh memory of the size of a model costs more than to copy the model there: the system has to clear each page first.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import numpy as np

LEAST = 1 << 16  # numbers; below, the allocator does the same
KEPT = 4  # buffers of a size that nobody holds
SIZES = 4  # from one power of two to the next; if every length had its own, letters of ever new ones would fill memory


class Buffers:
    """May be used by several threads."""

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=KEPT))

    def take(self, count: int) -> np.ndarray:
        """A float32 array [count], not cleared. It is free again when it and all views of it are gone."""
        if count < LEAST:
            return np.empty(count, np.float32)
        step = (1 << count.bit_length() - 1) // SIZES
        size = -(-count // step) * step
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.float32)
        # through a memoryview: views of it then refer to it, not to memory
        lent = np.frombuffer(memory.data, np.float32, count)
        weakref.finalize(lent, free.append, memory).atexit = False
        return lent
