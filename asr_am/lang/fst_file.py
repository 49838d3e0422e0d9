"""OpenFst files, read and written by kaldifst."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kaldifst

from asr_am.data.checksums import intact
from asr_am.data.temporary import replacing
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
    with replacing(path) as temporary:
        with silence_stderr():
            written = fst.write(str(temporary))
        if not written:
            raise InputError(f"{path}: cannot be written (disk full?)")


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Redirects stderr to /dev/null. OpenFst and kaldilm report there what is also a return value or an exception."""
    sys.stderr.flush()
    saved, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(devnull)
