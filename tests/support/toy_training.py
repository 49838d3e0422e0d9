"""A learner's life on the toy problem, with the same steps as `asr_am.train.trainer`.

Leases, computing, steps, rest, record, audit, consensus, checkpoint; and again from the last checkpoint.
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
Around = Callable[[Team, Strategy, GradientFn], GradientFn]


class Checkpoints:
    """What learners save, through bytes, as files would hold it. committed: segments that all have done."""

    def __init__(self) -> None:
        self.committed = 0
        self._saved: dict[tuple[int, int], bytes] = {}

    def save(self, segments: int, rank: int, state: dict[str, Any]) -> None:
        torch.save(state, file := io.BytesIO())
        self._saved[segments, rank] = file.getvalue()

    def load(self, rank: int) -> dict[str, Any] | None:
        """The learner's own; where it was dead at the time another's, without what that one had counted."""
        by_rank = {owner: data for (segments, owner), data in self._saved.items() if segments == self.committed}
        if not by_rank:
            return None
        owner = rank if rank in by_rank else min(by_rank)
        state = torch.load(io.BytesIO(by_rank[owner]), weights_only=True)
        return state if owner == rank else {**state, "staleness": {}, "counts": {}}


@dataclass
class Life:
    """What one learner saw: after each segment the consensus [N] and all learners' totals; at its end its own weights.

    did: (epoch, batch, rate), in order.
    """

    strategy: Strategy
    consensus: list[Tensor] = field(default_factory=list)
    totals: list[LossSums] = field(default_factory=list)
    records: list[SegmentRecord] = field(default_factory=list)
    did: list[tuple[int, int, float]] = field(default_factory=list)
    replica: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass
class Training:
    """A training run: what its learners share. `live` is a learner's life.

    start: a learner's weights at the beginning, where not all have the same. around: something for a strategy's
    gradient to be wrapped in, time included. counted: (rank, incarnation, examples) of each gradient, by epoch and
    batch. until: segments to stop after.
    """

    problem: Problem
    make_strategy: MakeStrategy
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    start: Callable[[int], Tensor] | None = None
    around: Around = lambda team, strategy, gradient: gradient
    until: int | None = None
    counted: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))

    def live(self, team: Team) -> Life:
        model = make_model()
        params = FlatParams(model)
        if self.start is not None:
            params.w.copy_(self.start(team.rank))
        optimizer = Optimizer(params, self.problem.options)
        strategy = self.make_strategy(params, optimizer, team)
        self._resume(strategy)
        life, joined = Life(strategy), team.incarnation == 0
        while (number := self.checkpoints.committed) < len(self.problem.segments[: self.until]):
            try:
                leases = team.leases(self.problem.segments[number], strategy.synchronous)
            except StaleSegment:
                assert team.now() < 1e4, "a replacement waits for ever"
                team.sleep(0.5)
                self._resume(strategy)
                continue
            if not joined:
                strategy.rejoin()
                joined = True
            self._do_segment(life, model, number, leases)
            self._save(strategy, number + 1)
        return life

    def _resume(self, strategy: Strategy) -> None:
        if (state := self.checkpoints.load(strategy.team.rank)) is not None:
            strategy.load_state_dict(state)

    def _do_segment(self, life: Life, model: nn.Module, number: int, leases: Leases) -> None:
        strategy, team, segment = life.strategy, life.strategy.team, self.problem.segments[number]

        def count(batch: int, examples: int) -> None:
            self.counted[segment.epoch, batch].append((team.rank, team.incarnation, examples))

        closure = ToyGradients(model, strategy.params, strategy.optimizer, self.problem, leases, segment, count)
        gradient = self.around(team, strategy, team.timed(closure))
        if team.rank >= self.problem.learners:
            gradient = no_gradient
        while (step_result := strategy.step(gradient)) is not None:
            leases.complete(step_result)
        strategy.drain()
        strategy.params.check()
        life.did += [(segment.epoch, *done) for done in closure.did]
        life.records.append(record := leases.record())
        self._audit(record)
        life.totals.append(leases.totals())
        life.consensus.append(strategy.consensus().clone())
        life.replica = strategy.replica().clone()

    def _save(self, strategy: Strategy, segments: int) -> None:
        team = strategy.team
        self.checkpoints.save(segments, team.rank, strategy.state_dict())
        members = team.gather(torch.zeros(0, dtype=torch.float64))
        lost = set(range(team.size)) - members.keys()
        if not strategy.fault_tolerant and lost:
            raise LearnerLost(min(lost), "died")
        self.checkpoints.committed = segments

    def _audit(self, record: SegmentRecord) -> None:
        """Every batch was completed once, and its gradient computed once more only for a learner that died with it."""
        segment = record.segment
        record.audit([batch.examples for batch in self.problem.of(segment.epoch)[segment.begin : segment.end]])
        released = [batch for batch, _ in record.released]
        for done in record.completions:
            counted = self.counted[segment.epoch, done.batch]
            assert counted.count((done.owner, done.incarnation, done.examples)) == 1, (done, counted)
            assert len(counted) <= 1 + released.count(done.batch), (done, counted)


def no_gradient(on_bucket: BucketHook | None) -> StepResult | None:
    """Of a rank that only serves."""
    return None


def hardware(**changes: Any) -> Cluster:
    """Two hosts. A full batch takes about a second, a letter of weights 0.07 s, an update or an averaging 0.05 s."""
    plain = {
        "name": "toy", "hosts": 2, "devices_per_host": 4, "device": "toy", "nic_bandwidth": 4e3, "nic_latency": 0.02,
        "host_bandwidth": 8e3, "host_latency": 0.01, "all_reduce_bandwidth": 2e3, "all_reduce_latency": 0.01,
        "overlap_speed": 0.8, "update_bandwidth": 4e3, "averaging_bandwidth": 4e3, "jitter": 0.2,
    }  # fmt: skip
    return Cluster.build(plain | changes)


def train(
    problem: Problem,
    make_strategy: MakeStrategy,
    *,
    seed: int = 1,
    cluster: Cluster | None = None,
    servers: int = 0,
    **training: Any,
) -> dict[int, Life]:
    """The lives of all ranks of a virtual cluster: the learners, then those that only serve."""
    shared = Training(problem, make_strategy, **training)
    workload = Workload("toy", seconds_per_batch={"toy": 1.0})
    return SimCluster(cluster or hardware(), workload, problem.learners + servers, seed).run(shared.live)


def train_alone(problem: Problem, make_strategy: MakeStrategy) -> Life:
    return Training(problem, make_strategy).live(SingleProcess())


def in_time(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
    """An `Around`: every gradient takes until the next even second, so that all updates fall on the same moments."""

    def timed(on_bucket: BucketHook | None) -> StepResult | None:
        step_result = gradient(on_bucket)
        if step_result is not None:
            team.sleep(2 * (math.floor(team.now() / 2) + 1) - team.now())
        return step_result

    return timed
