"""The private directory of a run on one host: the sockets of messages and control, and torch's store.

Nobody but its owner can enter it. So the kernel authenticates whoever connects, before a byte is read, and nothing has
to be encrypted.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asr_am.errors import InputError

MAX_SOCKET_PATH = 107  # bytes of the path of a Unix socket (Linux)
LONGEST_NAME = len("/learner-99999-999")


def make_private_dir() -> Path:
    """Returns a new directory that only this user can enter. Raises InputError if its path is too long for sockets."""
    path = Path(tempfile.mkdtemp(prefix="asr_am-"))
    if len(os.fsencode(path)) + LONGEST_NAME > MAX_SOCKET_PATH:
        path.rmdir()
        raise InputError(f"{path.parent}: the path is too long for the sockets of a run; set TMPDIR to a shorter one")
    return path


@contextmanager
def private_dir() -> Iterator[Path]:
    """Makes a private directory, and removes it at the end."""
    path = make_private_dir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def check_private_dir(path: Path) -> None:
    """Raises InputError unless `path` is a directory that belongs to this user and that nobody else can enter.

    Whoever told its path need not be trusted then: nobody can make such a directory for another user.
    """
    try:
        found = path.lstat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): start the run again") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise InputError(
            f"{path}: is not a directory of this user with mode 700, so other users may listen in: another user's "
            "process may have told this path; start the run again"
        )
