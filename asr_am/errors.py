"""The exception for errors that a user can fix: a file, an option, a missing program, a full disk."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path

MAX_MESSAGE = 800  # characters


class InputError(Exception):
    """Invalid input. The message names the file (and line or utterance) or option, the problem and the remedy.

    The message is made one line of at most `MAX_MESSAGE` characters, because what it quotes may be damaged.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


EXIT_PREEMPTED = os.EX_TEMPFAIL  # 75: start the same command again


class Preempted(Exception):
    """The run was asked to end, as its machine is needed for something else. The same command continues it."""


class ConnectionLost(InputError):
    """A connection broke, since its other end has ended. If the supervisor is alive, it restarts this learner."""


def one_line(message: str) -> str:
    """Returns the message as one printable line. Cuts a long one in the middle: its ends say where, and what to do."""
    printable = (c if c.isprintable() else " " if c in "\n\t" else ascii(c)[1:-1] for c in _cut(message))
    return _cut("".join(printable))


def _cut(text: str) -> str:
    half = MAX_MESSAGE // 2 - 3
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} ... {text[-half:]}"


LEAST_FREE = 1 << 16  # bytes
DISK_FULL = "the disk is full; free some space, then the same command continues"


def is_disk_full(error: BaseException | None, folder: Path | None = None) -> bool:
    """Returns True if an exception, or one that it followed, says that the disk or a quota is full.

    Libraries that write in C or C++ do not say so, or write a part of a file without an error. So an exception counts
    as well if nothing is left on the disk of `folder`.
    """
    if folder is not None and _free_bytes(folder) < LEAST_FREE:
        return True
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, RuntimeError) and "enforce fail at inline_container" in str(error):  # torch.save
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_bytes(folder: Path) -> float:
    """Returns the free space of the disk of a folder, infinite if it is not known."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.inf
