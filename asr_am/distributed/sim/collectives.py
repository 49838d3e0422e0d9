"""All-reduces of a virtual team: real means, modelled durations, and what they leave of the devices' speed.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asr_am.distributed.sim.scheduler import Scheduler, Signal
from asr_am.distributed.team import LearnerLost


@dataclass
class AllReduce:
    """The collective that everybody started as their `number`th. tensors: by rank, each [N], N = length."""

    number: int
    length: int
    tensors: dict[int, Tensor] = field(default_factory=dict)
    complete: bool = False


class Collectives:
    """One after the other, each from when its last learner starts it; lost for ever when a learner is.

    seconds: duration, of so many elements. overlap_speed: of computing while a transfer is under way.
    """

    def __init__(self, scheduler: Scheduler, size: int, seconds: Callable[[int], float], overlap_speed: float) -> None:
        self._scheduler, self._size, self._seconds, self._overlap_speed = scheduler, size, seconds, overlap_speed
        self._started = [0] * size
        self._pending: dict[int, AllReduce] = {}
        self._free_at = 0.0
        self._transfers = 0
        self._lost: tuple[int, str] | None = None
        self._changed = Signal(scheduler)  # complete, or lost
        self._speed_changed = Signal(scheduler)

    def start(self, rank: int, x: Tensor) -> SimWork:
        """Add rank's x [N] to its next collective."""
        self._check()
        number = self._started[rank]
        self._started[rank] += 1
        reduce = self._pending.setdefault(number, AllReduce(number, len(x)))
        if len(x) != reduce.length:
            raise RuntimeError(f"all-reduce {number}: learner {rank} has {len(x)} elements, others {reduce.length}")
        reduce.tensors[rank] = x
        if len(reduce.tensors) == self._size:
            begin = max(self._scheduler.now, self._free_at)
            self._free_at = begin + self._seconds(reduce.length)
            self._scheduler.call_at(begin, lambda: self._add_transfers(1))
            self._scheduler.call_at(self._free_at, lambda: self._finish(reduce))
        return SimWork(self, reduce)

    def compute(self, seconds: float) -> None:
        """Let the time pass that so many seconds of undisturbed computing take."""
        scheduler, left = self._scheduler, seconds
        while left > 0:
            begin, speed = scheduler.now, self._overlap_speed if self._transfers else 1.0
            if not self._speed_changed.park("computing", left / speed):
                return
            left -= (scheduler.now - begin) * speed

    def lose(self, rank: int, reason: str) -> None:
        """All that is under way, and all that will be started, cannot be completed any more."""
        if self._lost is None:
            self._lost = (rank, reason)
        self._pending.clear()
        self._add_transfers(-self._transfers)
        self._changed.wake()

    def wait(self, reduce: AllReduce) -> None:
        self._changed.wait_for(
            lambda: reduce.complete or self._lost is not None,
            f"all-reduce {reduce.number}, started by {len(reduce.tensors)} of {self._size}",
        )
        if not reduce.complete:
            self._check()

    def _check(self) -> None:
        if self._lost is not None:
            raise LearnerLost(*self._lost)

    def _add_transfers(self, change: int) -> None:
        if self._lost is not None and change > 0:
            return
        self._transfers += change
        self._speed_changed.wake()

    def _finish(self, reduce: AllReduce) -> None:
        if self._lost is not None:
            return
        del self._pending[reduce.number]
        self._add_transfers(-1)
        mean = mean_in_order(reduce.tensors[rank] for rank in sorted(reduce.tensors))
        with torch.no_grad():
            for x in reduce.tensors.values():
                x.copy_(mean)
        reduce.tensors.clear()
        reduce.complete = True
        self._changed.wake()


@dataclass
class SimWork:
    """A learner's end of a collective."""

    _collectives: Collectives
    _reduce: AllReduce

    def wait(self) -> None:
        self._collectives.wait(self._reduce)


@torch.no_grad()
def mean_in_order(tensors: Iterable[Tensor]) -> Tensor:
    """The mean [N] of tensors [N], added in this order in float32: the same bits every time."""
    rest = iter(tensors)
    total, count = next(rest).to(torch.float32, copy=True), 1
    for tensor in rest:
        total += tensor
        count += 1
    return total.div_(count)
