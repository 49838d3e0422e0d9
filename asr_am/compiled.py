"""Numba's compiler, for loops that NumPy has no function for. They release the GIL."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numba

log = logging.getLogger(__name__)


def compiled(function: Callable | None = None, **options: Any) -> Any:
    """Compiles a function, with the options of `numba.njit`.

    What is compiled is kept beside the source, in the user's home, or in NUMBA_CACHE_DIR. If none of these can be
    written, as in a container with a user of its own, each process compiles again.
    """
    if function is None:
        return functools.partial(compiled, **options)
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # there is no folder to keep it in
        _tell()
        return numba.njit(nogil=True, **options)(function)


@functools.cache
def _tell() -> None:
    log.warning(
        "compiled code cannot be kept, as neither the checkout nor HOME can be written: every stage compiles again, "
        "for up to 20 s; set NUMBA_CACHE_DIR to a folder of yours"
    )
