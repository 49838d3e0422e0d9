"""How processes end: a learner's own, and a launcher's that is told to."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


def end_process(status: int = 0) -> NoReturn:
    """End this process at once; call it when the team is closed.

    Threads that torch.distributed leaves behind may meet an interpreter that is shutting down, and then abort the
    process ("terminate called without an active exception"): a learner that has finished would count as dead.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what this process has started is ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
