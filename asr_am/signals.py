"""Signals: one for a process when its parent ends (Linux), and those that are handled later."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def signal_on_parent_death(number: int) -> None:
    """Asks the kernel to send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def signals_later() -> Iterator[None]:
    """Handles SIGTERM and SIGINT at the end: what runs meanwhile cannot be interrupted by an exception of theirs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler is not None}  # else C code handles it
    for number in before:
        signal.signal(number, lambda found, frame: received.append(found))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for found in received:
            signal.raise_signal(found)
