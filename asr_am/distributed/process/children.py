"""The learners' processes on this machine: started, watched, and ended without leaving one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from asr_am.errors import InputError

GRACE = 3.0  # seconds between asking a process to end and making it


@dataclass(frozen=True)
class Ended:
    """status: as `Popen.returncode`, below 0 the signal that killed it."""

    rank: int
    incarnation: int
    status: int


def describe(status: int) -> str:
    """How a process ended, as the rest of a sentence about it."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-status} ({name})"


class Children:
    """environment: of a learner's process, by rank and incarnation."""

    def __init__(self, command: Sequence[str], environment: Callable[[int, int], Mapping[str, str]]) -> None:
        self._command, self._environment = list(command), environment
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}

    def start(self, rank: int, incarnation: int) -> None:
        """In a session of its own: what the terminal sends (Ctrl-C) comes to the launcher only."""
        try:
            process = subprocess.Popen(
                self._command, env=dict(self._environment(rank, incarnation)), start_new_session=True
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"{self._command[0]}: cannot be started ({error})") from error
        self._running[rank] = incarnation, process

    def ended(self) -> list[Ended]:
        """Those that ended since the last call, the killed ones first: others end because of them."""
        found = [
            Ended(rank, incarnation, process.returncode)
            for rank, (incarnation, process) in self._running.items()
            if process.poll() is not None
        ]
        for child in found:
            _signal(self._running.pop(child.rank)[1], signal.SIGKILL)  # what a killed one leaves of its group
        return sorted(found, key=lambda child: (child.status >= 0, child.rank))

    def end(self) -> None:
        """All that still run, and what they started."""
        processes = [process for _, process in self._running.values()]
        self._running.clear()
        for process in processes:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the whole process group, which may outlive its leader."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
