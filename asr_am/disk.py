"""Changes of files that survive the end of a process, and of the machine.

The content of a file is durable once the file is synced, its name only once its directory is. A promise that depends on
a file needs both. The first functions are single steps: the tests of recovery let each of them fail, or lose it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

Fill = Callable[[BinaryIO], object]


def write(path: Path, fill: Fill) -> None:
    """Creates or replaces a file in place, with durable content. `fill` writes it."""
    with path.open("wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def write_private(path: Path, text: str) -> None:
    """Creates a file that only its owner can read. Raises FileExistsError if there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def write_at(path: Path, offset: int, data: bytes | memoryview) -> None:
    """Writes into a file, other parts of which are written at the same time by other processes and hosts.

    A memory map, or a file that is open for reading as well, would write whole pages of a network file system, and so
    undo what others have written there.
    """
    file = os.open(path, os.O_WRONLY)
    try:
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(file)


def open_to_append(path: Path) -> BinaryIO:
    return path.open("ab")


def append(file: BinaryIO, data: bytes) -> None:
    """Appends to a file. Not durable before `sync`."""
    file.write(data)
    file.flush()


def sync(file: BinaryIO) -> None:
    """Makes what was appended durable."""
    os.fsync(file.fileno())


def rename(old: Path, new: Path) -> None:
    """Renames a file or a directory, atomically, over a file or an empty directory."""
    os.replace(old, new)


def link(old: Path, new: Path) -> None:
    """Gives a file a second name. Raises FileExistsError if there is a file of that name, at whichever host."""
    os.link(old, new)


def make_dir(path: Path) -> None:
    """Makes a directory unless it exists."""
    path.mkdir(exist_ok=True)


def remove(path: Path) -> None:
    """Removes a file or a directory with all that is in it, if it exists. Of a symbolic link only the link.

    Everything that this program removes is removed here. asr_am/data/ownership.py says what that is.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_dir(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# made of these steps


def replace(path: Path, fill: Fill, writer: str = "", check: Callable[[], None] = lambda: None) -> None:
    """Replaces a file atomically and durably.

    Args:
        writer: who writes, part of the temporary name. Whoever removes the temporary file of another writer stops it.
        check: raises an error if the writer must not write any more. Called just before the file is replaced.
    """
    temporary = path.with_name(f".{path.name}.{writer}tmp")
    try:
        write(temporary, fill)
        check()
        rename(temporary, path)
    except Exception:
        remove(temporary)
        raise
    sync_dir(path.parent)


def remove_at_once(path: Path) -> None:
    """Removes a directory under another name, so that nobody finds a part of it, or adds to it."""
    trash = path.with_name(f".{path.name}.removed")
    remove(trash)
    try:
        rename(path, trash)
    except FileNotFoundError:
        return  # somebody else was faster
    remove(trash)
