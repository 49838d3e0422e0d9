"""Preemption: a signal that asks a run to save its state and to end, because its machine is needed for something else.

Slurm sends one before the end of a job's time (`sbatch --signal=USR1@120`), a cloud before it takes a machine back. The
learner or the launcher that gets it notes it here. The learners agree on the step after which all of them save a
checkpoint and end with status 75 (`errors.EXIT_PREEMPTED`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from asr_am.errors import InputError

SIGNALS = ("TERM", "USR1", "USR2")
_received: list[int] = []


def preempted() -> bool:
    """Returns True once this process has been asked to end."""
    return bool(_received)


def signal_numbers(names: Sequence[str]) -> list[int]:
    """Returns the numbers of signals. Raises InputError if a name is not one of `SIGNALS`."""
    if unknown := [name for name in names if name not in SIGNALS]:
        raise InputError(f"launcher.signals: {unknown[0]!r} is not one of {', '.join(SIGNALS)}")
    return [signal.Signals[f"SIG{name}"].value for name in names]


@contextmanager
def noting(names: Sequence[str]) -> Iterator[None]:
    """Notes these signals, some of `SIGNALS`, which would end this process otherwise. Only in the main thread."""
    numbers = signal_numbers(names)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        _received.append(number)

    _received.clear()
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
