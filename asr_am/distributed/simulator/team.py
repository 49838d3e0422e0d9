"""One learner's end of a virtual team."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from asr_am.distributed.control_plane import QueueLeases
from asr_am.distributed.leases import GradientFn, Leases, RoundRobinLeases, Segment, StepResult
from asr_am.distributed.simulator.collectives import SimGather, SimGroup, SimWork, mean_in_order
from asr_am.distributed.simulator.messaging import FLOAT_BYTES
from asr_am.distributed.simulator.scheduler import SimEvent, SimLock, SimTask
from asr_am.distributed.simulator.sim_learner import SimLearner, living, random_stream
from asr_am.distributed.team import CommStats, CostKind, Message, find_group

if TYPE_CHECKING:
    from asr_am.distributed.flat_params import BucketHook
    from asr_am.distributed.simulator.cluster import SimCluster

FORWARD = 1 / 3  # of a batch's time; the backward pass is twice the work


class SimTeam:
    """The `Team` of one incarnation of a virtual learner."""

    clock: Literal["wall", "virtual"] = "virtual"

    def __init__(self, cluster: SimCluster, learner: SimLearner) -> None:
        self._cluster, self._learner, self._scheduler = cluster, learner, cluster.scheduler
        self.rank, self.size, self.incarnation = learner.rank, len(cluster.learners), learner.incarnation
        self.hosts = tuple(learner.host for learner in cluster.learners)
        self.comm_stats: CommStats = learner.comm_stats
        self._jitter = random_stream(cluster.seed, self.rank, self.incarnation, "jitter")
        self._full = 0.0  # frames of the segment's largest batch
        self._world = SimGroup(cluster.collectives.world, self.rank, cluster.modelled_bytes)
        self._splits = 0

    def live_ranks(self) -> Sequence[int]:
        return living(self._cluster.learners)

    def now(self) -> float:
        return self._scheduler.now

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def simulate_cost(self, kind: CostKind, elements: int) -> None:
        network = self._cluster.network
        prices = {"update": network.update, "averaging": network.average}
        if kind not in prices:
            raise ValueError(f"no price for {kind!r}")
        count = self._cluster.modelled_bytes(elements * FLOAT_BYTES)
        self._scheduler.sleep(prices[kind](self.now(), self._learner.host, count) - self.now())

    def timed(self, gradient: GradientFn) -> GradientFn:
        """Compute at once, then let the modelled time pass, telling of each bucket when it would have been ready."""

        def timed(on_bucket: BucketHook | None) -> StepResult | None:
            buckets: list[tuple[int, int]] = []
            step_result = gradient(None if on_bucket is None else lambda begin, end: buckets.append((begin, end)))
            if step_result is None:
                return None
            seconds = self._batch_seconds(step_result.num_frames)
            passed = 0.0
            length = max((end for _, end in buckets), default=0)
            for begin, end in sorted(buckets, reverse=True):
                ready = seconds * (FORWARD + (1 - FORWARD) * (1 - begin / length))
                self._cluster.collectives.compute(self.rank, ready - passed)
                passed = ready
                assert on_bucket is not None
                on_bucket(begin, end)
            self._cluster.collectives.compute(self.rank, seconds - passed)
            return step_result

        return timed

    def _batch_seconds(self, frames: float) -> float:
        """The workload's seconds for a batch, times this learner's slowness and luck."""
        hardware = self._cluster.hardware
        seconds = self._cluster.workload.seconds(hardware.device, frames, max(self._full, frames))
        if self.rank in hardware.faults.slow and seconds > 0:
            self.comm_stats.faults["slow"] += 1
            seconds *= hardware.faults.slow[self.rank]
        if hardware.jitter > 0:
            seconds *= float(self._jitter.lognormal(-(hardware.jitter**2) / 2, hardware.jitter))  # of mean 1
        return seconds

    def start_all_reduce_mean(self, x: Tensor) -> SimWork:
        return self._world.start_all_reduce_mean(x)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> SimGather:
        return self._world.start_all_gather(x, lengths)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        self._world.broadcast(x, source)

    def split(self, groups: Sequence[Sequence[int]]) -> SimGroup | None:
        ranks = find_group(self.rank, self.size, groups)
        self._splits += 1
        if ranks is None:
            return None
        group = self._cluster.collectives.group(self._splits, ranks)
        return SimGroup(group, ranks.index(self.rank), self._cluster.modelled_bytes)

    def register_tag(self, tag: str, *lengths: int) -> None:
        self._cluster.messaging.register_tag(self.rank, tag, lengths)

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        if to == self.rank or not 0 <= to < self.size:
            raise ValueError(f"learner {self.rank} of {self.size} writes to {to}")
        self._cluster.messaging.send(self.rank, to, tag, clock, tensors)

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        return self._cluster.messaging.recv(self.rank, tag, source, timeout)

    def spawn(self, task: Callable[[], None], name: str) -> SimTask:
        return self._cluster.spawn(self._learner, task, name)

    def lock(self) -> SimLock:
        return SimLock(self._scheduler)

    def event(self) -> SimEvent:
        return SimEvent(self._scheduler)

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        """InputError (`leases.Outdated`) where a restarted learner is behind the others: read the checkpoint again."""
        self._full = max(segment.frames, default=0)
        self._cluster.control.open_segment(self.rank, segment)
        if synchronous:
            return RoundRobinLeases(segment, self.rank, self.size, self.gather)
        return QueueLeases(self._cluster.control, self.rank, self.incarnation)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        own = values.detach().to("cpu", torch.float64, copy=True)
        return dict(self._cluster.control.barrier(self.rank, "gather", own, dict))

    def average(self, x: Tensor) -> Tensor:
        mean = self._cluster.control.barrier(self.rank, "average", x, lambda values: mean_in_order(values.values()))
        return mean.to(x.dtype, copy=True)

    def close(self) -> None:
        pass
