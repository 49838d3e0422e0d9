"""The private directory of a run on one host: the sockets of messages and control, and torch's store.

Nobody but its owner can enter it. So the kernel authenticates whoever connects, before a byte is read, and nothing has
to be encrypted.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asr_am import disk
from asr_am.errors import InputError

MAX_SOCKET_PATH = 107  # bytes of the path of a Unix socket (Linux)
LONGEST_NAME = len("/learner-99999-999")
PREFIX = "asr_am-"
MARKER = ".asr_am"  # an empty file, so that no folder of the user is taken for one of these
STALE_AFTER = 3600.0  # seconds after which an unlocked directory is removed


def make_private_dir() -> Path:
    """Returns a new directory that only this user can enter. Raises InputError if its path is too long for sockets.

    This process locks it until it ends, in whatever way. Removes directories of processes that were killed.
    """
    return _make_locked()[0]


def _make_locked() -> tuple[Path, int]:
    """Makes a private directory. Returns it with the descriptor of its lock."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_parent()))
    (path / MARKER).touch()
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _remove_stale(path.parent)
    if len(os.fsencode(path)) + LONGEST_NAME > MAX_SOCKET_PATH:
        disk.remove(path)
        os.close(lock)
        raise InputError(f"{path.parent}: the path is too long for the sockets of a run; set TMPDIR to a shorter one")
    return path, lock


def _parent() -> str | None:
    """Returns where private directories are made. None: where Python makes temporary files.

    Programs that clean /tmp would take a long run's sockets, and none of its learners could be restarted then.
    """
    in_memory = "/dev/shm"
    return in_memory if not os.environ.get("TMPDIR") and os.access(in_memory, os.W_OK | os.X_OK) else None


def _remove_stale(parent: Path) -> None:
    """Removes this user's private directories that no process has locked."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = path.lstat()
            if not _is_private(found) or not (path / MARKER).is_file() or time.time() - found.st_mtime < STALE_AFTER:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                disk.remove(path)
            finally:
                os.close(descriptor)


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


@contextmanager
def private_dir() -> Iterator[Path]:
    """Makes a private directory, and removes it at the end."""
    path, lock = _make_locked()
    try:
        yield path
    finally:
        disk.remove(path)
        os.close(lock)


def check_private_dir(path: Path) -> None:
    """Raises InputError unless `path` is a directory that belongs to this user and that nobody else can enter.

    Whoever told its path need not be trusted then: nobody can make such a directory for another user.
    """
    try:
        found = path.lstat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): start the run again") from error
    if not _is_private(found):
        raise InputError(
            f"{path}: is not a directory of this user with mode 700, so other users may listen in: another user's "
            "process may have told this path; start the run again"
        )


def first_on_host(address: str, event: str) -> bool:
    """Returns whether this is the first process of the run on this host that reports an event.

    Args:
        address: address of a socket of this process. Outside of a private directory all processes are the first.
        event: name of the event, which becomes the name of an empty file.
    """
    if not address.startswith("ipc://"):
        return True
    with suppress(OSError):
        (Path(address.removeprefix("ipc://")).parent / event).touch(exist_ok=False)
        return True
    return False
