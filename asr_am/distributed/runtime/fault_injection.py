"""Faults put into real learners: slowness, a crash, letters late or lost; and computing time that is emulated."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable

from asr_am.distributed.cluster_config import Faults, Workload
from asr_am.distributed.flat_params import OnBucket
from asr_am.distributed.leases import Gradient, Stats
from asr_am.distributed.team import Usage

log = logging.getLogger(__name__)


class Fates:
    """What becomes of the letters of one learner."""

    def __init__(self, faults: Faults, rank: int, incarnation: int) -> None:
        self._faults = faults
        self._random = random.Random(f"{rank}.{incarnation}")

    def loses(self, usage: Usage) -> bool:
        lost = self._random.random() < self._faults.lost_share
        if lost:
            usage.lost += 1
            usage.faults["lost"] += 1
        return lost

    def due(self, usage: Usage, tag: str) -> float:
        """When the next letter, of this tag, may go out."""
        may_be_late = self._faults.late_tag in (None, tag)
        if not may_be_late or self._random.random() >= self._faults.late_share:
            return 0.0
        usage.faults["late"] += 1
        return time.monotonic() + self._faults.late_seconds


def arm_crash(faults: Faults, rank: int, incarnation: int, usage: Usage) -> threading.Timer | None:
    """Let this process kill itself when its time has come; only the first incarnation does."""
    crash = next((crash for crash in faults.crashes if crash.learner == rank), None)
    if crash is None:
        return None
    if incarnation > 0:
        usage.faults["crash"] += 1  # its last incarnation's
        return None
    timer = threading.Timer(crash.at, _crash, (rank,))
    timer.daemon = True
    timer.start()
    return timer


def _crash(rank: int) -> None:
    log.warning("learner %d crashes, as cluster.faults.crashes has it", rank)
    os.kill(os.getpid(), signal.SIGKILL)


class Pace:
    """How long this learner's batches take. full: frames of the largest batch."""

    def __init__(self, faults: Faults, workload: Workload | None, device: str, rank: int, usage: Usage) -> None:
        self._slow = faults.slow.get(rank, 1.0)
        self._workload = workload if workload and workload.emulate else None
        if self._workload:
            self._workload.check(device)
        self._device, self._usage = device, usage
        self.full = 0.0

    def apply(self, gradient: Gradient, sleep: Callable[[float], None]) -> Gradient:
        """The same closure, its time stretched: buckets are announced as much later as everything takes longer.

        The time that the closure waits for others (for a batch to do) is not stretched.
        """
        if self._slow == 1.0 and self._workload is None:
            return gradient

        def stretched(on_bucket: OnBucket | None) -> Stats | None:
            buckets: list[tuple[float, int, int]] = []
            waited, begin = self._usage.waiting_seconds, time.monotonic()
            record = None if on_bucket is None else lambda a, b: buckets.append((time.monotonic(), a, b))
            stats = gradient(record)
            end = time.monotonic()
            if stats is None:
                return None
            begin += self._usage.waiting_seconds - waited
            took = max(end - begin, 1e-9)
            target = self._seconds(stats.weight, took)
            for ready, first, last in buckets:
                _sleep_until(begin + (ready - begin) * target / took, sleep)
                assert on_bucket is not None
                on_bucket(first, last)
            _sleep_until(begin + target, sleep)
            return stats

        return stretched

    def _seconds(self, frames: float, took: float) -> float:
        """How long a batch that was computed in `took` seconds has to take."""
        if self._workload is not None:
            took = self._workload.seconds(self._device, frames, max(self.full, frames))
        if self._slow > 1.0 and took > 0:
            self._usage.faults["slow"] += 1
        return self._slow * took


def _sleep_until(moment: float, sleep: Callable[[float], None]) -> None:
    left = moment - time.monotonic()
    if left > 0:
        sleep(left)
