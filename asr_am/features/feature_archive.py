"""Matrices in Kaldi archives, with what is wrong as an InputError."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from asr_am.data.kaldi_archive import Entry, read_entry, reason
from asr_am.errors import InputError

DAMAGE = (OSError, EOFError, ValueError, AssertionError, RuntimeError, MemoryError, struct.error)  # from kaldiio
REMEDY_ALIGN = "run stage 3 (align) again"


def load_matrix(entry: Entry, remedy: str) -> np.ndarray:
    """Loads a matrix. Raises InputError if it is missing or damaged."""
    try:
        matrix = read_entry(entry)
    except DAMAGE as error:
        raise InputError(f"{entry}: damaged or missing archive ({reason(error)}); {_redo(entry, remedy)}") from error
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2:
        raise InputError(f"{entry}: holds no matrix; {_redo(entry, remedy)}")
    return matrix


def _redo(entry: Entry, remedy: str) -> str:
    """Returns the remedy. A stage makes its output again if a file is missing, not if one has other content."""
    return f"remove {Path(entry.path).name} and {remedy}" if os.path.exists(entry.path) else remedy
