"""Plain arrays in .npz files: written atomically, read without pickles."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from asr_am.data.checksums import intact
from asr_am.data.temporary import replacing
from asr_am.errors import InputError

DAMAGE = (
    OSError, KeyError, ValueError, TypeError, EOFError, RuntimeError, MemoryError, struct.error, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip # what numpy and zipfile raise on damaged files (NotImplementedError is a RuntimeError)


def write_npz(path: Path, arrays: Mapping[str, ArrayLike]) -> None:
    """Writes arrays under a temporary name that is then renamed."""
    with replacing(path) as temporary:
        np.savez(temporary, allow_pickle=False, **{name: np.asarray(array) for name, array in arrays.items()})


def read_npz(path: Path, *names: str, remedy: str, optional: Sequence[str] = ()) -> list[np.ndarray]:
    """Reads the arrays `names`. Raises InputError, with the `remedy`, if the file is missing, damaged or lacks one.

    Those of `optional` that the file has come after them.
    """
    try:
        with np.load(intact(path), allow_pickle=False) as file:
            return [file[name] for name in [*names, *(name for name in optional if name in file)]]
    except DAMAGE as error:
        raise InputError(f"{path}: not readable ({type(error).__name__}: {error}); {remedy}") from error
