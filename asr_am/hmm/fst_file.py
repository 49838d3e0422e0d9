"""OpenFst files, read and written by kaldifst."""

from __future__ import annotations

from pathlib import Path

import kaldifst

from asr_am.data.checksums import intact
from asr_am.errors import InputError


def read_fst(path: Path, remedy: str = "run the stage that makes it again") -> kaldifst.StdVectorFst:
    """Reads an OpenFst file.

    OpenFst reads damaged arcs without an error and follows them out of bounds, so the checksum is verified first.

    Raises:
        InputError: with `remedy`, if the file is missing or damaged.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; {remedy}")
    fst = kaldifst.StdVectorFst.read(str(intact(path)))
    if fst is None:
        raise InputError(f"{path}: not a readable FST; remove it and {remedy}")
    return fst


def write_fst(fst: kaldifst.StdVectorFst, path: Path) -> None:
    """Writes an OpenFst file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    if not fst.write(str(temporary)):
        raise InputError(f"{path}: cannot be written (disk full?)")
    temporary.rename(path)
