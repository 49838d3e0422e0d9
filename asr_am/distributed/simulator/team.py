"""`SimTeam`: the `Team` of a virtual learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Cluster, Workload, bucket_share
from asr_am.distributed.coordinated_backend import ControlClient, CoordinatedBackend
from asr_am.distributed.flat_params import BucketHook
from asr_am.distributed.launch_spec import HEARTBEAT_TIMEOUT
from asr_am.distributed.leases import GradientFn, LearnerLost, Leases, RoundRobinLeases, Segment, StepResult
from asr_am.distributed.simulator.collectives import Collectives, SimGather, SimGroup, SimWork
from asr_am.distributed.simulator.messaging import FLOAT_BYTES, SimMessaging
from asr_am.distributed.simulator.network import SimNetwork
from asr_am.distributed.simulator.scheduler import Scheduler, SimEvent, SimLock, SimTask
from asr_am.distributed.simulator.sim_learner import SimLearner, random_stream
from asr_am.distributed.team import CommStats, CostKind, Message, ModelSize, find_group
from asr_am.distributed.wire_dtype import rounded
from asr_am.errors import InputError


class SimContext(Protocol):
    """Parts of a virtual cluster that a learner uses (`SimCluster`)."""

    hardware: Cluster
    workload: Workload
    seed: int
    learners: list[SimLearner]
    learner_hosts: tuple[int, ...]
    scheduler: Scheduler
    network: SimNetwork
    collectives: Collectives
    messaging: SimMessaging
    control_latency: float | None
    wire: torch.dtype

    @property
    def in_step(self) -> bool: ...
    def mean_of(self, rows: dict[int, Tensor]) -> Tensor: ...
    def modelled_bytes(self, count: float) -> float: ...
    def spawn(self, learner: SimLearner, function: Callable[[], object], name: str) -> SimTask: ...


class SimTeam:
    """The `Team` of one incarnation of a virtual learner."""

    clock: Literal["wall", "virtual"] = "virtual"
    waits_on_host = True

    def __init__(self, cluster: SimContext, learner: SimLearner, control: ControlClient, launch: str) -> None:
        self._cluster, self._learner, self._scheduler = cluster, learner, cluster.scheduler
        self.rank, self.size = learner.rank, len(cluster.learners)
        self.incarnation = self.restarts = learner.incarnation
        self.launch, self._control, self._membership = launch, control, learner.membership
        self._backend = CoordinatedBackend(control, cluster.messaging.end(self.rank), self.rank, self.incarnation)
        self.hosts = cluster.learner_hosts
        self.comm_stats: CommStats = learner.comm_stats
        self.faults = cluster.hardware.faults
        self._jitter = random_stream(cluster.seed, self.rank, self.incarnation, "jitter")
        self._max_frames = 0.0  # frames of the segment's largest batch
        self._world = SimGroup(cluster.collectives.world, self.rank, cluster.modelled_bytes, cluster.wire)
        self._splits = 0

    def connect(self, hello: Mapping[str, Any], timeout: float) -> None:
        """Registers with the supervisor. Raises InputError if not all others have connected in time."""
        self._control.notify("hello", **hello)
        self.spawn(self._send_heartbeats, "heartbeats")
        deadline = self.now() + timeout
        while not self._membership.complete:
            if self.now() > deadline:
                raise InputError(f"within {timeout:g} s the supervisor has not answered, or not all have connected")
            self.sleep(self._cluster.control_latency or 0.0)

    def _send_heartbeats(self) -> None:
        while True:
            self._control.notify("live")
            self.sleep(HEARTBEAT_TIMEOUT / 5)

    @property
    def ranks(self) -> Sequence[int]:
        return self._membership.ranks

    @property
    def rejoins(self) -> bool:
        return self._membership.rejoins

    def live_ranks(self) -> Sequence[int]:
        return self._membership.live_ranks()

    def is_gone(self, rank: int) -> bool:
        return rank in self._membership.gone

    def restart_team(self, reason: str, lost: int | None = None) -> NoReturn:
        if self._cluster.in_step:
            raise LearnerLost(self.rank, f"cannot go on: {reason}")  # the supervisor sees this process end
        self._backend.restart_team(reason, lost)

    def is_loss(self, error: Exception) -> bool:
        return isinstance(error, LearnerLost)

    def sigterm_as_loss(self) -> AbstractContextManager[None]:
        return nullcontext()  # who waits for a lost learner is told

    def confirm(self) -> None:
        self._backend.confirm()

    def now(self) -> float:
        return self._scheduler.now

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)

    def simulate_cost(self, kind: CostKind, elements: int, scattered: bool = False) -> None:
        network = self._cluster.network
        costs = {"update": network.update, "averaging": network.average, "factoring": network.factor}
        if kind not in costs:
            raise ValueError(f"no cost for {kind!r}")
        count = self._cluster.modelled_bytes(elements * FLOAT_BYTES)
        count *= self._cluster.hardware.scatter_cost if scattered else 1.0
        self._scheduler.sleep(costs[kind](self._learner.host, count) - self.now())

    def modelled_size(self) -> ModelSize | None:
        workload = self._cluster.workload
        if workload.bytes is None or not workload.matrices:
            return None
        return ModelSize(workload.bytes / FLOAT_BYTES, workload.matrices)

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
                ready = seconds * bucket_share(begin, length)
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

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> SimWork:
        return self._world.start_all_reduce_mean(x, modelled)

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
        return SimGroup(group, ranks.index(self.rank), self._cluster.modelled_bytes, self._cluster.wire)

    def register_tag(self, tag: str, *lengths: int) -> None:
        self._cluster.messaging.register_tag(self.rank, tag, lengths)

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        if to == self.rank or not 0 <= to < self.size:
            raise ValueError(f"learner {self.rank} of {self.size} cannot send to rank {to}")
        self._cluster.messaging.send(self.rank, to, tag, clock, tensors)

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        return self._cluster.messaging.recv(self.rank, tag, source, timeout)

    def as_sent(self, x: Tensor) -> Tensor:
        return rounded(x, self._cluster.wire)

    def spawn(self, task: Callable[[], None], name: str) -> SimTask:
        return self._cluster.spawn(self._learner, task, name)

    def lock(self) -> SimLock:
        return SimLock(self._scheduler)

    def event(self) -> SimEvent:
        return SimEvent(self._scheduler)

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        """Opens a segment. Raises StaleSegment if this learner was restarted and is behind the others."""
        self._max_frames = max(segment.frames, default=0)
        leases = self._backend.leases(segment, synchronous=False)
        return RoundRobinLeases(segment, self.rank, self.size, self.gather) if synchronous else leases

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        if self._cluster.control_latency is not None:
            return self._backend.gather(values)
        own = values.detach().to("cpu", torch.float64, copy=True)
        return dict(self._control.request("gather", kind="gather", values=own))

    def average(self, x: Tensor) -> Tensor:
        if self._cluster.control_latency is not None:
            return self._backend.average(x)
        rows = self._control.request("gather", kind="average", values=x)  # at once, and without messages
        return self._cluster.mean_of(rows).to(x.dtype, copy=True)

    def close(self) -> None:
        pass
