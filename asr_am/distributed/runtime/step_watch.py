"""`StepWatch`: ends a learner whose training task hangs in a batch, which its other threads do not notice."""

from __future__ import annotations

import faulthandler
import logging
from collections import deque
from statistics import median

from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.launch_spec import EXIT_FAILURE
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.worker_process import end_process

log = logging.getLogger(__name__)

HANG_TIMEOUT = 60.0  # least seconds without progress
HANG_FACTOR = 20  # in units of the usual seconds of a batch
FIRST_TIMEOUT = 600.0  # for the first batches: libraries and devices may take long to start
FIRST_BATCHES = 5


class StepWatch:
    """Watches the batches of one learner. Waiting for other learners does not count."""

    def __init__(self, rank: int, wait_monitor: WaitMonitor, event_loop: EventLoop) -> None:
        self._rank, self._wait_monitor, self._event_loop = rank, wait_monitor, event_loop
        self._begin: float | None = None  # of the batch that is computed now
        self._seconds: deque[float] = deque(maxlen=100)  # of the last batches
        event_loop.call(self._check)

    def apply(self, gradient: GradientFn) -> GradientFn:
        """Returns the same closure, watched."""

        def watched(on_bucket: BucketHook | None) -> StepResult | None:
            clock, waited = self._wait_monitor.clock, self._wait_monitor.waiting_seconds
            self._begin = begin = clock.now()
            try:
                result = gradient(on_bucket)
            finally:
                self._begin = None
            if result is not None and result.lease.batch is not None:  # else it tells nothing of the next batch
                self._seconds.append(clock.now() - begin - (self._wait_monitor.waiting_seconds - waited))
            return result

        return watched

    def _check(self) -> None:
        begin, busy_since = self._begin, self._wait_monitor.busy_since()
        if begin is not None and busy_since is not None:
            busy = self._wait_monitor.clock.now() - max(begin, busy_since)
            usual = median(self._seconds) if len(self._seconds) >= FIRST_BATCHES else None
            limit = FIRST_TIMEOUT if usual is None else max(HANG_TIMEOUT, HANG_FACTOR * usual)
            if busy > limit:
                log.error(
                    "learner %d hangs: it has computed one batch for %.0f s%s; its threads are at the places below",
                    self._rank, busy, "" if usual is None else f", and {usual:.2g} s are usual",
                )  # fmt: skip
                faulthandler.dump_traceback()
                end_process(EXIT_FAILURE)
        self._event_loop.after(min(1.0, HANG_TIMEOUT / 4), self._check)
