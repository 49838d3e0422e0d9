"""`AwakeClock`: a clock that stands still while this process is stopped, by SIGSTOP or with its virtual machine.

A process that was stopped for a minute has not waited for others for a minute. Deadlines by this clock do not pass
meanwhile, so it declares nobody dead whose messages it has not read yet.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

MAX_STEP = 2.0  # seconds between two ticks of a process that runs


class AwakeClock:
    """Counts seconds like `time.monotonic`, but at most `max_step` between two calls of `tick`. Thread-safe.

    Args:
        max_step: seconds. Must be well above the time between two ticks.
        seconds: the clock that goes on meanwhile.
    """

    def __init__(self, max_step: float = MAX_STEP, seconds: Callable[[], float] = time.monotonic) -> None:
        self._max_step, self._seconds = max_step, seconds
        self._last_tick = math.inf  # never stands still before the first tick
        self._stopped = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Returns the time in seconds."""
        with self._lock:
            return min(self._seconds(), self._last_tick + self._max_step) - self._stopped

    def tick(self) -> float:
        """Notes that this process runs. Returns the seconds for which it was stopped since the last call."""
        with self._lock:
            now = self._seconds()
            stopped = max(now - self._last_tick - self._max_step, 0.0)
            self._stopped += stopped
            self._last_tick = now
        return stopped
