"""Kaldi archives of matrices by key, with an index (.scp) that stays valid when the folder is moved."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path

import kaldiio
import numpy as np

from asr_am.data.kaldi_archive import read_entry, reason
from asr_am.data.textfile import read_lines, write_lines
from asr_am.errors import InputError

LOCATION = re.compile(r"^(?P<key>\S+) (?P<path>.+):(?P<offset>\d+)$")
DAMAGE = (OSError, EOFError, ValueError, AssertionError, RuntimeError, MemoryError, struct.error)  # from kaldiio
REMEDY_ALIGN = "run stage 3 (align) again"


def write_archive(folder: Path, name: str, matrices: Mapping[str, np.ndarray], *, final: Path) -> None:
    """Writes <folder>/<name>.ark and .scp, sorted by key. The .scp names the archive below `final`."""
    lines = []
    with (folder / f"{name}.ark").open("wb") as file:
        for key, matrix in sorted(matrices.items()):
            lines.append(f"{key} {final / name}.ark:{file.tell() + len(key.encode()) + 1}")
            kaldiio.save_ark(file, {key: matrix})
    write_lines(folder / f"{name}.scp", lines)


def read_scp(path: Path, remedy: str) -> dict[str, str]:
    """Returns the location `path:offset` of each key. Archives are looked up in the folder of the .scp file."""
    locations = {}
    for number, line in enumerate(read_lines(path, remedy), start=1):
        match = LOCATION.match(line)
        if match is None:
            raise InputError(f"{path}:{number}: '{line}' is not `<key> <archive>:<offset>`; {remedy}")
        locations[match["key"]] = f"{path.parent / Path(match['path']).name}:{match['offset']}"
    if not locations:
        raise InputError(f"{path}: empty; {remedy}")
    return locations


def load_matrix(location: str, remedy: str) -> np.ndarray:
    """Loads the matrix at `path:offset`. Raises InputError if it is missing or damaged."""
    try:
        matrix = read_entry(location)
    except DAMAGE as error:
        raise InputError(f"{location}: damaged or missing archive ({reason(error)}); {remedy}") from error
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2:
        raise InputError(f"{location}: holds no matrix; {remedy}")
    return matrix
