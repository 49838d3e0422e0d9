"""A learner that hangs in a batch is ended. The first batches may take long, whatever came before them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.runtime import step_watch
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.step_watch import StepWatch
from asr_am.distributed.team import CommStats


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StepWatch, list[int]]]:
    """A watch that waits for a tenth of a second, and the exit statuses that it ends its learner with."""
    ended: list[int] = []
    monkeypatch.setattr(step_watch, "HANG_TIMEOUT", 0.1)
    monkeypatch.setattr(step_watch, "HANG_FACTOR", 1)
    monkeypatch.setattr(step_watch, "end_process", ended.append)
    monkeypatch.setattr(step_watch.faulthandler, "dump_traceback", lambda: None)
    wait_monitor = WaitMonitor(CommStats())
    event_loop = EventLoop(wait_monitor)
    watch = StepWatch(0, wait_monitor, event_loop)
    event_loop.start()
    yield watch, ended
    event_loop.stop()


def compute(watch: StepWatch, batch: int | None, seconds: float = 0.0) -> None:
    def gradient(_: object) -> StepResult:
        time.sleep(seconds)
        return StepResult(Lease(batch, 1.0, 0.0, 0), 1, 1, 0.1, torch.zeros(()), torch.zeros(()))

    watch.apply(gradient)(None)


@pytest.mark.parametrize("idle", ["turns without a batch", "ends of segments"])
def test_calls_without_a_batch_do_not_say_how_long_one_takes(watched: tuple[StepWatch, list[int]], idle: str) -> None:
    watch, ended = watched
    for _ in range(2 * step_watch.FIRST_BATCHES):
        if idle == "ends of segments":
            watch.apply(lambda _: None)(None)
        else:
            compute(watch, None)
    compute(watch, 0, seconds=0.5)
    assert not ended


def test_a_batch_that_takes_far_longer_than_others_ends_the_learner(watched: tuple[StepWatch, list[int]]) -> None:
    watch, ended = watched
    for number in range(step_watch.FIRST_BATCHES):
        compute(watch, number)
    assert not ended
    compute(watch, step_watch.FIRST_BATCHES, seconds=0.5)
    assert ended
