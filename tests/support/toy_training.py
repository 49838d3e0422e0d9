"""Training of the toy problem, with the same sequence of calls as `asr_am.train.trainer`.

A segment takes leases, steps, drain, record, audit, consensus and checkpoint. A run can continue from a checkpoint.

Shapes: N weights.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import GradientFn, Leases, LossSums, SegmentRecord, StaleSegment, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import LearnerLost, SingleProcess, Team
from tests.support.toy_problem import Problem, ToyGradients, make_model

MakeStrategy = Callable[[FlatParams, Optimizer, Team], Strategy]
WrapGradient = Callable[[Team, Strategy, GradientFn], GradientFn]


class Checkpoints:
    """Checkpoints of all learners, serialised to bytes as files would be.

    Attributes:
        committed: number of segments that all learners have saved.
    """

    def __init__(self) -> None:
        self.committed = 0
        self._saved: dict[tuple[int, int], bytes] = {}

    def save(self, segments: int, rank: int, state: dict[str, Any]) -> None:
        torch.save(state, file := io.BytesIO())
        self._saved[segments, rank] = file.getvalue()

    def load(self, rank: int) -> dict[str, Any] | None:
        """Returns the learner's state of the last committed segment, None if there is none.

        A learner missing from the checkpoint loads another learner's state without its counts.
        """
        by_rank = {owner: data for (segments, owner), data in self._saved.items() if segments == self.committed}
        if not by_rank:
            return None
        owner = rank if rank in by_rank else min(by_rank)
        state = torch.load(io.BytesIO(by_rank[owner]), weights_only=True)
        return state if owner == rank else {**state, "staleness": {}, "counts": {}}

    def states(self) -> list[dict[str, Any]]:
        """Returns the states of all learners in the last committed segment."""
        saved = [data for (segments, _), data in sorted(self._saved.items()) if segments == self.committed]
        return [torch.load(io.BytesIO(data), weights_only=True) for data in saved]


@dataclass
class LearnerResult:
    """Results of one learner.

    Attributes:
        strategy: its strategy.
        consensus: consensus weights [N] after each segment.
        totals: sums over all learners of each segment.
        records: audit trail of each segment.
        computed: (epoch, batch, rate) of each gradient, in order.
        replica: its own weights [N] at the end.
    """

    strategy: Strategy
    consensus: list[Tensor] = field(default_factory=list)
    totals: list[LossSums] = field(default_factory=list)
    records: list[SegmentRecord] = field(default_factory=list)
    computed: list[tuple[int, int, float]] = field(default_factory=list)
    replica: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass
class Training:
    """A training run, shared by its learners, each of which calls `run_learner`.

    Attributes:
        problem: the problem.
        make_strategy: builds a learner's strategy.
        checkpoints: where learners save.
        start: returns a learner's initial weights by rank, None for the same on all.
        wrap: wraps the gradient closure of a strategy, after simulated time was added.
        until: number of segments to stop after, None for all.
        counted: (rank, incarnation, examples) of each gradient, by epoch and batch.
    """

    problem: Problem
    make_strategy: MakeStrategy
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    start: Callable[[int], Tensor] | None = None
    wrap: WrapGradient = lambda team, strategy, gradient: gradient
    until: int | None = None
    counted: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))

    def run_learner(self, team: Team) -> LearnerResult:
        """Trains as one learner of the team."""
        model = make_model()
        params = FlatParams(model)
        if self.start is not None:
            params.w.copy_(self.start(team.rank))
        optimizer = Optimizer(params, self.problem.options)
        strategy = self.make_strategy(params, optimizer, team)
        self._resume(strategy)
        result, rejoined = LearnerResult(strategy), not team.rejoins
        if not team.rejoins and team.rank == min(team.ranks):  # the team was restarted: from the last checkpoint
            again = {segment.epoch: range(segment.begin, segment.total)
                     for segment in reversed(self.problem.segments[self.checkpoints.committed :])}  # fmt: skip
            for epoch, batch in [key for key in self.counted if key[1] in again.get(key[0], ())]:
                del self.counted[epoch, batch]
        while (number := self.checkpoints.committed) < len(self.problem.segments[: self.until]):
            try:
                leases = team.leases(self.problem.segments[number], strategy.synchronous)
            except StaleSegment:
                assert team.now() < 1e4, "a restarted learner never finds a newer checkpoint"
                team.sleep(0.5)
                self._resume(strategy)
                continue
            if not rejoined:
                strategy.rejoin()
                rejoined = True
            self._do_segment(result, model, number, leases)
            self._save(strategy, number + 1)
        return result

    def _resume(self, strategy: Strategy) -> None:
        if (state := self.checkpoints.load(strategy.team.rank)) is not None:
            strategy.load_state_dict(state)
            strategy.load_moved(self.checkpoints.states)

    def _do_segment(self, result: LearnerResult, model: nn.Module, number: int, leases: Leases) -> None:
        strategy, team, segment = result.strategy, result.strategy.team, self.problem.segments[number]

        def count(batch: int, examples: int) -> None:
            self.counted[segment.epoch, batch].append((team.rank, team.incarnation, examples))

        closure = ToyGradients(model, strategy.params, strategy.optimizer, self.problem, leases, segment, count)
        gradient = self.wrap(team, strategy, team.timed(closure))
        if team.rank >= self.problem.learners:
            gradient = no_gradient
        while (step_result := strategy.step(gradient)) is not None:
            leases.complete(step_result)
        strategy.drain()
        strategy.params.check()
        result.computed += [(segment.epoch, *done) for done in closure.computed]
        result.records.append(record := leases.record())
        self._audit(record)
        result.totals.append(leases.totals())
        result.consensus.append(strategy.consensus().clone())
        result.replica = strategy.replica().clone()

    def _save(self, strategy: Strategy, segments: int) -> None:
        team = strategy.team
        self.checkpoints.save(segments, team.rank, strategy.state_dict())
        members = team.gather(torch.zeros(0, dtype=torch.float64))
        lost = set(range(team.size)) - members.keys()
        if not strategy.fault_tolerant and lost:
            raise LearnerLost(min(lost), "died")
        self.checkpoints.committed = segments

    def _audit(self, record: SegmentRecord) -> None:
        """Checks that every batch was completed once, and computed again only if a learner died with it."""
        segment = record.segment
        record.audit([batch.examples for batch in self.problem.of(segment.epoch)[segment.begin : segment.end]])
        released = [batch for batch, _ in record.released]
        for done in record.completions:
            counted = self.counted[segment.epoch, done.batch]
            assert counted.count((done.owner, done.incarnation, done.examples)) == 1, (done, counted)
            assert len(counted) <= 1 + released.count(done.batch), (done, counted)


def no_gradient(on_bucket: BucketHook | None) -> StepResult | None:
    """Gradient closure of a dedicated server rank."""
    return None


def hardware(**changes: Any) -> Cluster:
    """Returns a cluster of two hosts, with changes.

    A full batch takes about a second, a message with all weights 0.07 s, an update or an averaging 0.05 s.
    """
    defaults = {
        "name": "toy", "hosts": 2, "devices_per_host": 4, "device": "toy", "nic_bandwidth": 4e3, "nic_latency": 0.02,
        "host_bandwidth": 8e3, "host_latency": 0.01, "all_reduce_efficiency": 0.5,
        "overlap_speed": 0.8, "update_bandwidth": 4e3, "averaging_bandwidth": 4e3, "jitter": 0.2,
    }  # fmt: skip
    return Cluster.build(defaults | changes)


def train(
    problem: Problem,
    make_strategy: MakeStrategy,
    *,
    seed: int = 1,
    cluster: Cluster | None = None,
    servers: int = 0,
    **training: Any,
) -> dict[int, LearnerResult]:
    """Trains on a virtual cluster.

    Args:
        problem: the problem, with its number of learners.
        make_strategy: builds a learner's strategy.
        seed: of the virtual cluster.
        cluster: hardware and faults, None for `hardware()`.
        servers: number of dedicated server ranks after the learners.
        training: further arguments of `Training`.

    Returns:
        The result of each rank that was alive at the end.
    """
    shared = Training(problem, make_strategy, **training)
    workload = Workload("toy", seconds_per_batch={"toy": 1.0})
    return SimCluster(cluster or hardware(), workload, problem.learners + servers, seed).run(shared.run_learner)


def train_single(problem: Problem, make_strategy: MakeStrategy) -> LearnerResult:
    """Trains one learner without a cluster."""
    return Training(problem, make_strategy).run_learner(SingleProcess())


def in_lockstep(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
    """A `WrapGradient` in which every gradient ends at an even second, so that all updates happen simultaneously."""

    def timed(on_bucket: BucketHook | None) -> StepResult | None:
        step_result = gradient(on_bucket)
        if step_result is not None:
            team.sleep(2 * (math.floor(team.now() / 2) + 1) - team.now())
        return step_result

    return timed
