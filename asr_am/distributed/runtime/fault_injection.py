"""Faults injected into real learners (slowness, a crash, late and lost messages), and emulated computing time."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable

from asr_am.distributed.cluster_config import Faults, Workload, bucket_share
from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.team import CommStats

log = logging.getLogger(__name__)


class MessageFaults:
    """Decides which messages of one learner are late or lost."""

    def __init__(self, faults: Faults, rank: int, incarnation: int) -> None:
        self._faults = faults
        self._random = random.Random(f"{rank}.{incarnation}")

    def loses(self, comm_stats: CommStats) -> bool:
        """Returns True if the next message is lost, and counts it."""
        lost = self._random.random() < self._faults.lost_share
        if lost:
            comm_stats.lost += 1
            comm_stats.faults["lost"] += 1
        return lost

    def due(self, comm_stats: CommStats, tag: str) -> float:
        """Returns the time at which the next message of this tag may be sent, and counts it if it is late."""
        may_be_late = self._faults.late_tag in (None, tag)
        if not may_be_late or self._random.random() >= self._faults.late_share:
            return 0.0
        comm_stats.faults["late"] += 1
        return time.monotonic() + self._faults.late_seconds


def arm_crash(faults: Faults, rank: int, incarnation: int, comm_stats: CommStats) -> threading.Timer | None:
    """Starts the timer that kills this process if a crash is configured for it. Later incarnations do not crash."""
    crash = next((crash for crash in faults.crashes if crash.learner == rank), None)
    if crash is None:
        return None
    if incarnation > 0:
        comm_stats.faults["crash"] += 1  # of the previous incarnation, which could not count it
        return None
    timer = threading.Timer(crash.at, _crash, (rank,))
    timer.daemon = True
    timer.start()
    return timer


def _crash(rank: int) -> None:
    log.warning("learner %d crashes, as configured by cluster.faults.crashes", rank)
    os.kill(os.getpid(), signal.SIGKILL)


class ComputeEmulator:
    """Makes this learner's batches take longer: as slow as configured, or as long as a workload says.

    Args:
        faults: which learners are slow.
        workload: the model whose time is emulated, if it says so.
        device: device whose figures of the workload are used.
        synchronize: waits until the device has computed what it was given. Times would be those of the launch else.

    Attributes:
        faults: as given.
        max_frames: frames of the segment's largest batch.
    """

    def __init__(
        self, faults: Faults, workload: Workload | None, device: str, rank: int, comm_stats: CommStats,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.faults, self._slow = faults, faults.slow.get(rank, 1.0)
        self._workload = workload if workload and workload.emulate else None
        if self._workload:
            self._workload.check(device)
        self._device, self._comm_stats, self._synchronize = device, comm_stats, synchronize
        self.max_frames = 0.0

    def apply(self, gradient: GradientFn, sleep: Callable[[float], None]) -> GradientFn:
        """Returns the same closure with its time stretched. Buckets are announced later by the same factor. With a
        workload they are announced as on the virtual cluster.

        Time that the closure waits for others, for instance for a lease, is not stretched.
        """
        if self._slow == 1.0 and self._workload is None:
            return gradient

        def stretched(on_bucket: BucketHook | None) -> StepResult | None:
            buckets: list[tuple[float, int, int]] = []
            self._synchronize()
            waited_before, begin = self._comm_stats.waiting_seconds, time.monotonic()

            def record(first: int, last: int) -> None:
                self._synchronize()
                buckets.append((time.monotonic(), first, last))

            step_result = gradient(None if on_bucket is None else record)
            self._synchronize()
            end = time.monotonic()
            if step_result is None:
                return None
            begin += self._comm_stats.waiting_seconds - waited_before
            elapsed = max(end - begin, 1e-9)
            target = self._seconds(step_result.num_frames, elapsed)
            length = max((last for _, _, last in buckets), default=0)
            for ready, first, last in buckets:
                share = bucket_share(first, length) if self._workload else (ready - begin) / elapsed
                _sleep_until(begin + share * target, sleep)
                assert on_bucket is not None
                on_bucket(first, last)
            _sleep_until(begin + target, sleep)
            return step_result

        return stretched

    def _seconds(self, frames: float, elapsed: float) -> float:
        """Returns the seconds that a batch must take which was computed in `elapsed` seconds."""
        if self._workload is not None:
            elapsed = self._workload.seconds(self._device, frames, max(self.max_frames, frames))
        if self._slow > 1.0 and elapsed > 0:
            self._comm_stats.faults["slow"] += 1
        return self._slow * elapsed


def _sleep_until(moment: float, sleep: Callable[[float], None]) -> None:
    left = moment - time.monotonic()
    if left > 0:
        sleep(left)
