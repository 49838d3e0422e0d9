"""Kaldi archives read without running anything: kaldiio unpickles an entry that says it is a pickle, and takes a file
name that ends in `|` for a command.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kaldiio.matio import read_kaldi, read_token

PICKLE = b"PKL"


def read_entry(location: str) -> Any:
    """What is at `path:offset`: an array, or (rate, samples). ValueError for a pickle; else what kaldiio raises."""
    path, _, offset = location.rpartition(":")
    with Path(path).open("rb") as file:
        file.seek(int(offset))
        return _read(file)


def read_archive(path: Path) -> Iterator[tuple[str, Any]]:
    """Keys and entries of a whole archive, in order; errors as of `read_entry`."""
    with path.open("rb") as file:
        while (key := read_token(file)) is not None:
            yield key, _read(file)


def reason(error: Exception) -> str:
    """What is wrong with an archive, in one line: kaldiio quotes the bytes that it met."""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text if text.isprintable() else ascii(text):.100}"


def _read(file: BinaryIO) -> Any:
    begin = file.tell()
    if file.read(len(PICKLE)) == PICKLE:
        raise ValueError("holds a pickle, which is not read")
    file.seek(begin)
    return read_kaldi(file)
