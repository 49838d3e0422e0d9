"""The exception for errors that a user can fix: a file, an option, a missing program, a full disk."""

from __future__ import annotations

import errno


class InputError(Exception):
    """Invalid input. The message names the file (and line or utterance) or option, the problem and the remedy."""


DISK_FULL = "the disk is full; free some space, then the same command continues"


def is_disk_full(error: BaseException | None) -> bool:
    """Returns True if an exception, or one that it followed, says that the disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, RuntimeError) and "enforce fail at inline_container" in str(error):  # torch.save
            return True
        error = error.__cause__ or error.__context__
    return False
