"""A signal for a process when its parent ends (Linux)."""

from __future__ import annotations

import ctypes

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def signal_on_parent_death(number: int) -> None:
    """Asks the kernel to send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
