"""Kaldi archives and their indexes (.scp), which stay valid when their folder is copied or moved.

An index that we write names an archive without its folder, `train.1.ark:17`. `read_scp` finds it beside the index.
Kaldi's own programs look in the working directory, so run them in the folder of the index.

Nothing is executed: kaldiio unpickles an entry that says it is a pickle, and runs a file name that ends in `|`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import kaldiio
import numpy as np
from kaldiio.matio import read_kaldi, read_token

from asr_am.data.textfile import read_lines, write_lines
from asr_am.errors import InputError

PICKLE = b"PKL"
LOCATION = re.compile(r"^(?P<key>\S+) (?P<path>.+):(?P<offset>\d+)$")


def write_archive(folder: Path, name: str, entries: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes the entries to <folder>/<name>.ark, and the index <folder>/<name>.scp."""
    lines = []
    with (folder / f"{name}.ark").open("wb") as file:
        for key, array in entries:
            lines.append(f"{key} {name}.ark:{file.tell() + len(key.encode()) + 1}")
            kaldiio.save_ark(file, {key: array})
    write_lines(folder / f"{name}.scp", lines)


def read_scp(path: Path, remedy: str) -> dict[str, str]:
    """Reads an index, of ours or Kaldi's.

    Args:
        path: the .scp file.
        remedy: advice for error messages.

    Returns:
        The location `path:offset` of each key. An archive beside the index counts before one that the index names with
        its folder, which may be that of a copy.

    Raises:
        InputError: the file is missing, empty or has a malformed line.
    """
    locations: dict[str, str] = {}
    archives: dict[str, Path] = {}
    for number, line in enumerate(read_lines(path, remedy), start=1):
        match = LOCATION.match(line)
        if match is None:
            raise InputError(f"{path}:{number}: '{line}' is not `<key> <archive>:<offset>`; {remedy}")
        named = match["path"]
        if named not in archives:
            beside, elsewhere = path.parent / Path(named).name, Path(named)
            archives[named] = elsewhere if elsewhere.is_file() and not beside.exists() else beside
        locations[match["key"]] = f"{archives[named]}:{match['offset']}"
    if not locations:
        raise InputError(f"{path}: empty; {remedy}")
    return locations


def read_entry(location: str) -> Any:
    """Reads the entry at `path:offset`: an array, or (rate, samples).

    Raises:
        ValueError: the entry is a pickle.
        Exception: anything that kaldiio raises on damaged data.
    """
    path, _, offset = location.rpartition(":")
    with Path(path).open("rb") as file:
        file.seek(int(offset))
        return _read(file)


def read_archive(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the keys and entries of a whole archive, in order. Raises what `read_entry` raises."""
    with path.open("rb") as file:
        while (key := read_token(file)) is not None:
            yield key, _read(file)


def reason(error: Exception) -> str:
    """Describes an error of reading an archive in one line. kaldiio quotes the bytes it found."""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text if text.isprintable() else ascii(text):.100}"


def _read(file: BinaryIO) -> Any:
    begin = file.tell()
    if file.read(len(PICKLE)) == PICKLE:
        raise ValueError("holds a pickle, which is not read")
    file.seek(begin)
    return read_kaldi(file)
