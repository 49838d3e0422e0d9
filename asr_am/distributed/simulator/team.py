"""One learner's end of a virtual team."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from asr_am.distributed.leases import Gradient, Leases, Rounds, Segment, Stats
from asr_am.distributed.simulator.collectives import SimGather, SimGroup, SimWork, mean_in_order
from asr_am.distributed.simulator.control import SharedLeases
from asr_am.distributed.simulator.messaging import FLOAT_BYTES
from asr_am.distributed.simulator.scheduler import SimEvent, SimLock, Task
from asr_am.distributed.simulator.sim_learner import Member, living, random_stream
from asr_am.distributed.team import Charge, Letter, Usage, group_of

if TYPE_CHECKING:
    from asr_am.distributed.flat_params import OnBucket
    from asr_am.distributed.simulator.cluster import SimCluster

FORWARD = 1 / 3  # of a batch's time; the backward pass is twice the work


class SimTeam:
    """The `Team` of one incarnation of a virtual learner."""

    clock: Literal["wall", "virtual"] = "virtual"

    def __init__(self, cluster: SimCluster, member: Member) -> None:
        self._cluster, self._member, self._scheduler = cluster, member, cluster.scheduler
        self.rank, self.size, self.incarnation = member.rank, len(cluster.members), member.incarnation
        self.hosts = tuple(member.host for member in cluster.members)
        self.usage: Usage = member.usage
        self._jitter = random_stream(cluster.seed, self.rank, self.incarnation, "jitter")
        self._full = 0.0  # frames of the segment's largest batch
        self._everybody = SimGroup(cluster.collectives.everybody, self.rank, cluster.modelled_bytes)
        self._splits = 0

    def alive(self) -> Sequence[int]:
        return living(self._cluster.members)

    def now(self) -> float:
        return self._scheduler.now

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def charge(self, kind: Charge, elements: int) -> None:
        network = self._cluster.network
        prices = {"update": network.update, "averaging": network.average}
        if kind not in prices:
            raise ValueError(f"no price for {kind!r}")
        count = self._cluster.modelled_bytes(elements * FLOAT_BYTES)
        self._scheduler.sleep(prices[kind](self.now(), self._member.host, count) - self.now())

    def computing(self, gradient: Gradient) -> Gradient:
        """Compute at once, then let the modelled time pass, telling of each bucket when it would have been ready."""

        def timed(on_bucket: OnBucket | None) -> Stats | None:
            buckets: list[tuple[int, int]] = []
            stats = gradient(None if on_bucket is None else lambda begin, end: buckets.append((begin, end)))
            if stats is None:
                return None
            seconds = self._batch_seconds(stats.weight)
            passed = 0.0
            length = max((end for _, end in buckets), default=0)
            for begin, end in sorted(buckets, reverse=True):
                ready = seconds * (FORWARD + (1 - FORWARD) * (1 - begin / length))
                self._cluster.collectives.compute(self.rank, ready - passed)
                passed = ready
                assert on_bucket is not None
                on_bucket(begin, end)
            self._cluster.collectives.compute(self.rank, seconds - passed)
            return stats

        return timed

    def _batch_seconds(self, frames: float) -> float:
        """The workload's seconds for a batch, times this learner's slowness and luck."""
        hardware = self._cluster.hardware
        seconds = self._cluster.workload.seconds(hardware.device, frames, max(self._full, frames))
        if self.rank in hardware.faults.slow and seconds > 0:
            self.usage.faults["slow"] += 1
            seconds *= hardware.faults.slow[self.rank]
        if hardware.jitter > 0:
            seconds *= float(self._jitter.lognormal(-(hardware.jitter**2) / 2, hardware.jitter))  # of mean 1
        return seconds

    def start_all_reduce_mean(self, x: Tensor) -> SimWork:
        return self._everybody.start_all_reduce_mean(x)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> SimGather:
        return self._everybody.start_all_gather(x, lengths)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        self._everybody.broadcast(x, source)

    def split(self, groups: Sequence[Sequence[int]]) -> SimGroup | None:
        ranks = group_of(self.rank, self.size, groups)
        self._splits += 1
        if ranks is None:
            return None
        circle = self._cluster.collectives.circle(self._splits, ranks)
        return SimGroup(circle, ranks.index(self.rank), self._cluster.modelled_bytes)

    def accept(self, tag: str, *lengths: int) -> None:
        self._cluster.mail.accept(self.rank, tag, lengths)

    def post(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        if to == self.rank or not 0 <= to < self.size:
            raise ValueError(f"learner {self.rank} of {self.size} writes to {to}")
        self._cluster.mail.post(self.rank, to, tag, clock, tensors)

    def collect(self, tag: str, source: int | None = None, timeout: float | None = None) -> Letter | None:
        return self._cluster.mail.collect(self.rank, tag, source, timeout)

    def spawn(self, task: Callable[[], None], name: str) -> Task:
        return self._cluster.spawn(self._member, task, name)

    def lock(self) -> SimLock:
        return SimLock(self._scheduler)

    def event(self) -> SimEvent:
        return SimEvent(self._scheduler)

    def leases(self, segment: Segment, in_step: bool) -> Leases:
        """InputError (`leases.Outdated`) where a restarted learner is behind the others: read the checkpoint again."""
        self._full = max(segment.frames, default=0)
        self._cluster.control.open(self.rank, segment)
        if in_step:
            return Rounds(segment, self.rank, self.size, self.gather)
        return SharedLeases(self._cluster.control, self._cluster.control.table(segment), self.rank, self.incarnation)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        own = values.detach().to("cpu", torch.float64, copy=True)
        return dict(self._cluster.control.meet(self.rank, "gather", own, dict))

    def average(self, x: Tensor) -> Tensor:
        mean = self._cluster.control.meet(self.rank, "average", x, lambda values: mean_in_order(values.values()))
        return mean.to(x.dtype, copy=True)

    def close(self) -> None:
        pass
