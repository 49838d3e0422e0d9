"""Matrices in Kaldi archives, with what is wrong as an InputError."""

from __future__ import annotations

import struct

import numpy as np

from asr_am.data.kaldi_archive import read_entry, reason
from asr_am.errors import InputError

DAMAGE = (OSError, EOFError, ValueError, AssertionError, RuntimeError, MemoryError, struct.error)  # from kaldiio
REMEDY_ALIGN = "run stage 3 (align) again"


def load_matrix(location: str, remedy: str) -> np.ndarray:
    """Loads the matrix at `path:offset`. Raises InputError if it is missing or damaged."""
    try:
        matrix = read_entry(location)
    except DAMAGE as error:
        raise InputError(f"{location}: damaged or missing archive ({reason(error)}); {remedy}") from error
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2:
        raise InputError(f"{location}: holds no matrix; {remedy}")
    return matrix
