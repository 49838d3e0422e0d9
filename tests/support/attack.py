"""Attacks a run from a thread of the test, while its launcher runs in the main thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self


class Attack:
    """Calls `attack` in a thread. The learners (tests/support/intruder_worker.py) end when it has returned."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._thread = threading.Thread(target=self._run)

    def attack(self) -> None:
        """Attacks the run. Subclasses define it."""
        raise NotImplementedError

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready` returns True or the run has ended."""
        while not ready() and not (self.out / "over").exists():
            time.sleep(0.05)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        (self.out / "over").touch()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.attack()
        finally:
            (self.out / "over").touch()
