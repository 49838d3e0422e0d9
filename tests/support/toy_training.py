"""Training of the toy problem by `asr_am.train.trainer`, with checkpoints in memory.

Shapes: N weights.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.leases import GradientFn, Leases, LossSums, SegmentRecord, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import SingleProcess, Team
from asr_am.train.any_model import NEVER, AnyState
from asr_am.train.no_files import NoCheckpoints, NoRunLog, NoTerms
from asr_am.train.schedule import Schedule
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainable import Plan, first_batch
from asr_am.train.trainer import Trainer
from asr_am.train.user_batches import EpochOrder
from tests.support.toy_problem import Batch, Problem, ToyData, make_model, squared_error

BUCKET_BYTES = 60  # small enough for several buckets
MakeStrategy = Callable[[FlatParams, Optimizer, Team], Strategy]
WrapGradient = Callable[[Team, Strategy, GradientFn], GradientFn]


class Hangs(RuntimeError):
    """A run takes too long in virtual time. Says what its tasks wait for."""


class KeptTerms(NoTerms):
    """The terms of leaders that write to memory. A learner that was restarted finds the checkpoints there."""

    def open(self, launch: str, rejoins: bool = False) -> None:
        pass


class KeptCheckpoints(NoCheckpoints):
    """Checkpoints of all learners, of which the newest is kept. What is loaded comes from bytes, as from files.

    Attributes:
        updates: updates of the team in the newest checkpoint, 0 without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terms = KeptTerms()
        self.updates = 0
        self._run: dict[str, Any] = {}
        self._learners: dict[tuple[int, int], dict[str, Any]] = {}  # by updates and rank

    def save_learner(self, updates: int, rank: int, state: dict[str, Any]) -> None:
        self._learners[updates, rank] = deepcopy(state)

    def completed(self, updates: int) -> bool:
        return updates == self.updates

    def commit(self, updates: int, state: dict[str, Any]) -> None:
        self.updates, self._run = updates, state
        self._learners = {key: part for key, part in self._learners.items() if key[0] == updates}

    def load(self) -> dict[str, Any] | None:
        return through_bytes(self._run) if self.updates else None

    def load_learner(self, rank: int) -> dict[str, Any]:
        return through_bytes(self._learners[self.updates, rank])

    def newest(self) -> str:
        return f"update {self.updates}"


def through_bytes(state: dict[str, Any]) -> Any:
    torch.save(state, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@dataclass
class LearnerResult:
    """Results of one learner.

    Attributes:
        computed: (epoch, batch, rate) of each gradient, in order.
        consensus: consensus weights [N] after each segment.
        totals: sums over all learners of each segment.
        records: audit trail of each segment.
        replica: its own weights [N] at the end.
    """

    strategy: Strategy
    computed: list[tuple[int, int, float]]
    consensus: list[Tensor] = field(default_factory=list)
    totals: list[LossSums] = field(default_factory=list)
    records: list[SegmentRecord] = field(default_factory=list)
    replica: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass
class ToyState(AnyState):
    """One learner's model, which notes the gradients that it computes.

    Attributes:
        count: called with each batch.
        computed: see `LearnerResult`.
    """

    count: Callable[[Batch], None]
    computed: list[tuple[int, int, float]] = field(default_factory=list)

    def backward(self, batch: Any, loss_denominator: float, on_bucket: BucketHook | None) -> tuple[Tensor, Tensor]:
        self.count(batch)
        self.computed.append((batch.epoch, batch.id, self.optimizer.lr))
        return super().backward(batch, loss_denominator, on_bucket)


class ToyRun:
    """What `Trainer` asks of a run (`trainable.Trainable`). Its learners share it, and each calls `run_learner`.

    Args:
        checkpoints: where learners save. Default: none yet.
        start: returns a learner's initial weights [N] by rank, None for the same on all. Only for `Adpsgd`.
        wrap: wraps the gradient closure of a strategy, after simulated time was added.
        until: updates of the team after which to stop, at the next checkpoint. None: the end of the run.
    """

    unit, remedy, validation = "frames", "lower the learning rate", None
    out = Path("toy")

    def __init__(
        self, problem: Problem, make_strategy: MakeStrategy, *, checkpoints: KeptCheckpoints | None = None,
        start: Callable[[int], Tensor] | None = None, wrap: WrapGradient | None = None, until: int | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.learners, self.loader = problem, problem.learners, ToyData()
        self.start, self.until = start, until
        self._make_strategy, self._wrap, self._checkpoints = make_strategy, wrap, checkpoints or KeptCheckpoints()
        self.options = TrainOptions(
            epochs=problem.epochs, batch_size=1, optimizer=problem.options, schedule=problem.schedule(problem.lr),
            report_every=NEVER, checkpoint_every=problem.rounds_per_segment,
        )  # fmt: skip
        self.run_log, self.provenance = NoRunLog(problem.epochs), dict[str, object]()
        # (rank, incarnation) of each gradient, by launch, epoch and batch
        self._counted: defaultdict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)

    def learner(self, team: Team) -> tuple[ToyState, Strategy]:
        params = FlatParams(model := make_model())
        params.bucket_bytes = BUCKET_BYTES
        strategy = self._make_strategy(params, Optimizer(params, self.problem.options), team)
        strategy.attach(model, summed_loss, partial(first_batch, self, team.rank))
        if self._wrap is not None:
            step, wrap = strategy.step, self._wrap
            strategy.step = lambda gradient: step(wrap(team, strategy, gradient))  # type: ignore[method-assign]

        def count(batch: Batch) -> None:
            incarnation = 0 if strategy.synchronous else team.incarnation  # synchronous leases name none
            self._counted[team.launch, batch.epoch, batch.id].append((team.rank, incarnation))

        return ToyState(
            model, strategy.params, strategy.optimizer, self.loader, self.options, params.w.device, summed_loss, count
        ), strategy

    def plan(self, epoch: int) -> EpochOrder:
        batches = self.problem.of(epoch)
        return EpochOrder(epoch, batches, [batch.frames for batch in batches])

    def save_best(self, path: Path, record: object, weights_N: object, statistics: object) -> None:
        pass

    def checkpoints(self, strategy: str) -> KeptCheckpoints:
        return self._checkpoints

    def audit(self, record: SegmentRecord, launch: str) -> None:
        """Checks that the owner of each batch has computed it, once, and others only if a learner died with it."""
        released = [batch for batch, _ in record.released]
        for done in record.completions:
            counted = self._counted[launch, record.segment.epoch, done.batch]
            assert counted.count((done.owner, done.incarnation)) == 1, (done, counted)
            assert len(counted) <= 1 + released.count(done.batch), (done, counted)

    def run_learner(self, team: Team) -> LearnerResult:
        """Trains as one learner of the team."""
        trainer = ToyTrainer(self, team)
        trainer.train()
        return trainer.result


def summed_loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    return squared_error(model, batch), float(batch.frames)


class ToyTrainer(Trainer):
    """The training loop, which keeps what each segment ends with."""

    def __init__(self, run: ToyRun, team: Team) -> None:
        super().__init__(run, team)
        self.run = run
        assert isinstance(self.model_state, ToyState)
        self.result = LearnerResult(self.strategy, self.model_state.computed)

    def _begin(self) -> None:
        super()._begin()
        if self.run.start is not None:  # as after a checkpoint of learners that were apart
            w = self.run.start(self.team.rank)
            self.strategy.load_state_dict({**self.strategy.state_dict(), "weights": w, "x": w})

    def _schedule(self) -> Schedule | None:
        stops = self.run.until is not None and self.progress.updates >= self.run.until
        return None if stops else super()._schedule()

    def _finish_segment(self, plan: Plan, leases: Leases, seconds: float) -> SegmentRecord:
        before, result = LossSums(*self.progress.totals), self.result  # type: ignore[arg-type]
        record = super()._finish_segment(plan, leases, seconds)
        if self.leadership.leads:
            self.run.audit(record, self.team.launch)
        result.records.append(record)
        result.totals.append(LossSums(*self.progress.totals) - before)  # type: ignore[arg-type]
        result.consensus.append(self.strategy.consensus().clone())
        result.replica = self.strategy.replica().clone()
        return record


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
    limit: float = 20_000.0,
    wire: WireDtype = "float32",
    **options: Any,
) -> dict[int, LearnerResult]:
    """Trains on a virtual cluster.

    Args:
        cluster: hardware and faults, None for `hardware()`.
        servers: number of dedicated server ranks after the learners.
        limit: longest time of the run, in virtual seconds.
        options: further arguments of `ToyRun`.

    Returns:
        The result of each rank that was alive at the end.

    Raises:
        Hangs: the run takes longer than `limit`.
    """
    run, workload = ToyRun(problem, make_strategy, **options), Workload("toy", seconds_per_batch={"toy": 1.0})
    simulated = SimCluster(cluster or hardware(), workload, problem.learners + servers, seed, wire=wire)

    def stop() -> None:
        raise Hangs(simulated.scheduler._describe_waits())

    simulated.scheduler.call_at(limit, stop)
    return simulated.run(run.run_learner)


def train_single(problem: Problem, make_strategy: MakeStrategy) -> LearnerResult:
    """Trains one learner without a cluster."""
    return ToyRun(problem, make_strategy).run_learner(SingleProcess())


def in_lockstep(team: Team, strategy: Strategy, gradient: GradientFn) -> GradientFn:
    """A `WrapGradient` in which every gradient ends at an even second, so that all updates happen simultaneously."""

    def timed(on_bucket: BucketHook | None) -> StepResult | None:
        step_result = gradient(on_bucket)
        if step_result is not None:
            team.sleep(2 * (math.floor(team.now() / 2) + 1) - team.now())
        return step_result

    return timed
