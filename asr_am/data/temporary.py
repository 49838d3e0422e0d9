"""Files and folders that appear only when they are complete.

They are written under another name beside the final one, and then renamed. A killed process leaves what it was writing
behind. Whoever goes on in that folder removes it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asr_am import disk
from asr_am.errors import is_disk_full

PREFIX = "tmp.asr_am."  # of names that nobody else chooses


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name to write to. It is renamed to `path` at the end, unless an error is raised.

    The suffix is that of `path`, since many libraries choose the format by it. An error on a full disk becomes an
    OSError that says so, whatever the library has said: afterwards nobody can find out.
    """
    temporary = path.with_name(f"{PREFIX}{os.getpid()}.{socket.gethostname()}.{path.name}")
    disk.remove(temporary)  # of a killed process with the same id
    try:
        yield temporary
        if temporary.is_dir():
            disk.remove(path)
        os.replace(temporary, path)
    except BaseException as error:
        full = isinstance(error, Exception) and is_disk_full(error, path.parent)
        disk.remove(temporary)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes were writing in a folder. Nobody may write there now."""
    for path in sorted(folder.rglob(f"{PREFIX}*")):
        disk.remove(path)
