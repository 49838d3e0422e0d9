"""Named pipes as input files: work on one lasts until the test gives it its content."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path


def wait_for(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end, "waited for a minute"
        time.sleep(0.01)


class NamedPipes:
    """Named pipes, the content of each being its name."""

    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [folder / f"pipe{number}" for number in range(count)]
        for path in self.paths:
            os.mkfifo(path)
        self._held: dict[Path, int] = {}

    def expected(self) -> list[int]:
        """Returns the CRC-32 of each."""
        return [zlib.crc32(path.name.encode()) for path in self.paths]

    def wait_for_readers(self, count: int) -> None:
        """Waits until `count` pipes are being read. The readers go on waiting."""

        def found() -> bool:
            for path in set(self.paths) - self._held.keys():
                if (file := _open(path)) is not None:
                    self._held[path] = file
            return len(self._held) >= count

        wait_for(found)

    def fill(self, *paths: Path) -> None:
        """Gives content to pipes, by default to all, as soon as they are read."""
        left = list(paths or self.paths)

        def filled() -> bool:
            for path in list(left):
                file = self._held.pop(path, None) or _open(path)
                if file is not None and _write(file, path.name.encode()):
                    left.remove(path)
            return not left

        wait_for(filled)


def _open(path: Path) -> int | None:
    """Opens a pipe to write. Returns None while nobody reads it."""
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def _write(file: int, content: bytes) -> bool:
    """Writes and closes a pipe. Returns False if its reader has ended."""
    try:
        return os.write(file, content) == len(content)
    except BrokenPipeError:
        return False
    finally:
        os.close(file)
