"""Kaldi archives, read without executing anything.

kaldiio unpickles an entry that says it is a pickle, and runs a file name that ends in `|` as a command.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kaldiio.matio import read_kaldi, read_token

PICKLE = b"PKL"


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
