"""Kaldi archives and their indexes (.scp), which stay valid when their folder is copied or moved.

An index that we write names an archive without its folder, `train.1.ark:17`. `read_scp` finds it beside the index.
Kaldi's own programs look in the working directory, so run them in the folder of the index.

Beside the index <name>.scp is <name>.crc32 with the length and the CRC-32 of each entry, `<key> <bytes> <hexadecimal>`.
An entry is verified whenever it is read, before it is parsed. Without such a file it is read unverified.

Nothing is executed: kaldiio unpickles an entry that says it is a pickle, and runs a file name that ends in `|`.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import kaldiio
import numpy as np
from kaldiio.matio import read_kaldi, read_token

from asr_am.data.temporary import replacing
from asr_am.data.textfile import read_lines, write_lines
from asr_am.errors import InputError

PICKLE = b"PKL"
LOCATION = re.compile(r"^(?P<key>\S+) (?P<path>.+):(?P<offset>\d{1,18})$")
CHECKSUM = re.compile(r"^(?P<key>\S+) (?P<length>\d{1,18}) (?P<crc32>[0-9a-f]{8})$")


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of an entry. Its text form is `path:offset`.

    Attributes:
        offset: first byte after the key.
        length: bytes from there on, None if unknown.
        crc32: their CRC-32, None if unknown.
    """

    path: str
    offset: int
    length: int | None = None
    crc32: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.offset}"


def save_entry(file: BinaryIO, key: str, array: np.ndarray) -> Entry:
    """Appends an array to an open archive. Returns its place, with the file name of the archive as path."""
    buffer = io.BytesIO()
    kaldiio.save_ark(buffer, {key: array})
    start = len(key.encode()) + 1
    value = buffer.getbuffer()[start:]
    entry = Entry(Path(file.name).name, file.tell() + start, len(value), zlib.crc32(value))
    file.write(buffer.getbuffer())
    return entry


def write_index(folder: Path, name: str, entries: Iterable[tuple[str, Entry]]) -> None:
    """Writes <folder>/<name>.scp and .crc32 for entries in this order."""
    rows = list(entries)
    write_lines(folder / f"{name}.crc32", [f"{key} {entry.length} {entry.crc32:08x}" for key, entry in rows])
    write_lines(folder / f"{name}.scp", [f"{key} {entry}" for key, entry in rows])


def write_archive(folder: Path, name: str, entries: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes the entries to <folder>/<name>.ark, and the index <folder>/<name>.scp."""
    ark = folder / f"{name}.ark"
    with replacing(ark) as temporary, temporary.open("wb") as file:
        written = [(key, replace(save_entry(file, key, array), path=ark.name)) for key, array in entries]
    write_index(folder, name, written)


def read_scp(path: Path, remedy: str) -> dict[str, Entry]:
    """Returns the place of each key in an index, of ours or Kaldi's.

    An archive beside the index counts before one that the index names with its folder, which may be that of a copy.

    Raises:
        InputError: the file is missing, empty or has a malformed line.
    """
    entries: dict[str, Entry] = {}
    archives: dict[str, str] = {}
    checksums = _read_checksums(path.with_suffix(".crc32"), remedy)
    for number, line in enumerate(read_lines(path, remedy), start=1):
        match = LOCATION.match(line)
        if match is None:
            raise InputError(f"{path}:{number}: '{line}' is not `<key> <archive>:<offset>`; {remedy}")
        key, named = match["key"], match["path"]
        if checksums and key not in checksums:
            raise InputError(f"{path}:{number}: {key} has no checksum in {path.stem}.crc32; {remedy}")
        if named not in archives:
            archives[named] = _find_archive(path.parent, named)
        entries[key] = Entry(archives[named], int(match["offset"]), *checksums.get(key, (None, None)))
    if not entries:
        raise InputError(f"{path}: empty; {remedy}")
    return entries


def _find_archive(folder: Path, named: str) -> str:
    beside, elsewhere = folder / Path(named).name, Path(named)
    try:
        return str(elsewhere if elsewhere.is_file() and not beside.exists() else beside)
    except OSError:  # a name that is too long
        return str(beside)


def _read_checksums(path: Path, remedy: str) -> dict[str, tuple[int, int]]:
    """Returns length and CRC-32 of each key, {} if there is no file."""
    if not path.exists():
        return {}
    checksums = {}
    for number, line in enumerate(read_lines(path, remedy), start=1):
        match = CHECKSUM.match(line)
        if match is None:
            raise InputError(f"{path}:{number}: '{line}' is not `<key> <bytes> <CRC-32>`; {remedy}")
        checksums[match["key"]] = int(match["length"]), int(match["crc32"], 16)
    return checksums


def read_entry(entry: Entry) -> Any:
    """Reads an entry: an array, or (rate, samples).

    Raises:
        ValueError: the entry is a pickle, or its checksum is wrong.
        Exception: anything that kaldiio raises on damaged data.
    """
    with open(entry.path, "rb") as file:
        file.seek(entry.offset)
        if entry.length is None:
            return _read_value(file)
        value = file.read(entry.length)
    if zlib.crc32(value) != entry.crc32:
        raise ValueError("its checksum is wrong")
    return _read_value(io.BytesIO(value))


def read_archive(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the keys and entries of a whole archive, in order. Raises what `read_entry` raises."""
    with path.open("rb") as file:
        yield from read_entries(file)


def read_entries(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yields the keys and entries of an open archive, in order. Raises what `read_entry` raises."""
    while (key := read_token(file)) is not None:
        yield key, _read_value(file)


def reason(error: Exception) -> str:
    """Describes an error of reading an archive in one line. kaldiio quotes the bytes it found."""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text if text.isprintable() else ascii(text):.100}"


def _read_value(file: BinaryIO) -> Any:
    begin = file.tell()
    if file.read(len(PICKLE)) == PICKLE:
        raise ValueError("holds a pickle, which is not read")
    file.seek(begin)
    return read_kaldi(file)
