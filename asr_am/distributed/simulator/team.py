"""`SimTeam`: the `Team` of a virtual learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, Protocol

import torch
from greenlet import GreenletExit
from torch import Tensor

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.control_plane import QueueLeases
from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.leases import GradientFn, Leases, RoundRobinLeases, Segment, StepResult
from asr_am.distributed.simulator.collectives import Collectives, SimGather, SimGroup, SimWork, mean_in_order
from asr_am.distributed.simulator.control import SimControl
from asr_am.distributed.simulator.messaging import FLOAT_BYTES, SimMessaging
from asr_am.distributed.simulator.network import SimNetwork
from asr_am.distributed.simulator.scheduler import Scheduler, SimEvent, SimLock, SimTask
from asr_am.distributed.simulator.sim_learner import SimLearner, live_ranks, random_stream
from asr_am.distributed.team import CommStats, CostKind, Message, find_group

FORWARD = 1 / 3  # share of the forward pass in a batch's time: the backward pass is twice the work


class SimContext(Protocol):
    """Parts of a virtual cluster that a learner uses (`SimCluster`)."""

    hardware: Cluster
    workload: Workload
    seed: int
    learners: list[SimLearner]
    scheduler: Scheduler
    network: SimNetwork
    collectives: Collectives
    messaging: SimMessaging
    control: SimControl
    ranks: tuple[int, ...]
    gone: set[int]

    def restart_team(self, reason: str) -> None: ...
    def modelled_bytes(self, count: float) -> float: ...
    def spawn(self, learner: SimLearner, function: Callable[[], object], name: str) -> SimTask: ...


class SimTeam:
    """The `Team` of one incarnation of a virtual learner."""

    clock: Literal["wall", "virtual"] = "virtual"
    launch = ""

    def __init__(self, cluster: SimContext, learner: SimLearner, rejoins: bool = False) -> None:
        self._cluster, self._learner, self._scheduler = cluster, learner, cluster.scheduler
        self.rank, self.size, self.incarnation = learner.rank, len(cluster.learners), learner.incarnation
        self.ranks, self.rejoins = cluster.ranks, rejoins
        self.hosts = tuple(learner.host for learner in cluster.learners)
        self.comm_stats: CommStats = learner.comm_stats
        self._jitter = random_stream(cluster.seed, self.rank, self.incarnation, "jitter")
        self._max_frames = 0.0  # frames of the segment's largest batch
        self._world = SimGroup(cluster.collectives.world, self.rank, cluster.modelled_bytes)
        self._splits = 0

    def live_ranks(self) -> Sequence[int]:
        return live_ranks(self._cluster.learners)

    def is_gone(self, rank: int) -> bool:
        return rank in self._cluster.gone

    def restart_team(self, reason: str) -> NoReturn:
        self._cluster.restart_team(reason)
        self._scheduler.suspend("the team to be restarted")
        raise GreenletExit

    def now(self) -> float:
        return self._scheduler.now

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def simulate_cost(self, kind: CostKind, elements: int) -> None:
        network = self._cluster.network
        costs = {"update": network.update, "averaging": network.average}
        if kind not in costs:
            raise ValueError(f"no cost for {kind!r}")
        count = self._cluster.modelled_bytes(elements * FLOAT_BYTES)
        self._scheduler.sleep(costs[kind](self.now(), self._learner.host, count) - self.now())

    def timed(self, gradient: GradientFn) -> GradientFn:
        """Computes the gradient at once, then waits for the modelled time, and announces each bucket when it is due."""

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
        """Returns the workload's seconds for a batch, with this learner's slowness and jitter."""
        hardware = self._cluster.hardware
        seconds = self._cluster.workload.seconds(hardware.device, frames, max(self._max_frames, frames))
        if self.rank in hardware.faults.slow and seconds > 0:
            self.comm_stats.faults["slow"] += 1
            seconds *= hardware.faults.slow[self.rank]
        if hardware.jitter > 0:
            seconds *= float(self._jitter.lognormal(-(hardware.jitter**2) / 2, hardware.jitter))  # mean 1
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
            raise ValueError(f"learner {self.rank} of {self.size} cannot send to rank {to}")
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
        """Opens a segment. Raises StaleSegment if this learner was restarted and is behind the others."""
        self._max_frames = max(segment.frames, default=0)
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
