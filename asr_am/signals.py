"""Signals: one for a process when its parent ends (Linux), those handled later, those that got lost. Closed pipes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def signal_on_parent_death(number: int) -> None:
    """Asks the kernel to send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def discard_output() -> None:
    """Discards what is still to be printed after the reader of a pipe has closed it. The flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def signal_again_if_lost(signal_of: Callable[[BaseException | None], int | None]) -> None:
    """Sends this process a signal again if the exception that its handler raised was discarded.

    Python discards what is raised in a call from C code, as llvmlite's while numba compiles, and in `__del__`.

    Args:
        signal_of: returns the signal whose handler raises such an exception, None for any other exception.
    """
    otherwise = sys.unraisablehook

    def report(lost: sys.UnraisableHookArgs) -> None:
        number = signal_of(lost.exc_value)
        if number is None:
            otherwise(lost)
            return
        again = threading.Timer(0.1, os.kill, (os.getpid(), number))  # raised here it would be lost as well
        again.daemon = True
        again.start()

    sys.unraisablehook = report


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
