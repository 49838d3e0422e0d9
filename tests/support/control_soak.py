"""Faults of everything together, by seed. `python -m scripts.soak.control` runs a thousand seeds.

A scenario trains a small network with `asr_am.train.trainer` on four virtual learners of two hosts. Supervisor, agents,
control plane, strategies, checkpoints and logs are those of real processes. Only processes, connections, clocks and
the disk are virtual. At random times a learner, a host, the launcher or the power fails, a process or a host is
stopped, the hosts are cut off from each other, or the disk fills up or fails. Messages are lost and late all the time.
Whoever runs the command starts it again when it has ended with an error.

The following must hold. The run ends. Learners end with messages that name the fault. A checkpoint that was completed
is there after every fault, and checkpoints never go back. `asr_am.train.audit` finds no problem: every batch counts
once, and is applied, or counted as dropped or as lost with its learner or server. No server applies a batch twice. The
held-out loss is at most 5 % above the worst of 20 runs without faults, since asynchronous runs differ even without any.
Synchronous strategies reach the same loss, unless they have residuals and a learner's is lost.

With `resizes` the command is started again with 2, 4 or 6 learners. The loss must be finite then: what algorithms
derive from the number of learners has changed.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

from torch import Tensor

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.launch_spec import EXIT_FAILURE, EXIT_LOST
from asr_am.distributed.param_server.server import ParameterServer
from asr_am.distributed.param_server.weight_shards import Push
from asr_am.distributed.simulator.cluster import KILLED, SimCluster
from asr_am.distributed.simulator.scheduler import Scheduler, SimTask
from asr_am.distributed.simulator.team import SimTeam
from asr_am.distributed.team import LearnerLost
from asr_am.egs.loader import Batch, EpochPlan, Loader
from asr_am.errors import ConnectionLost, InputError
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.stages.train_worker import report_failure
from asr_am.train import survivors
from asr_am.train.audit import History, audit
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.run_log import RunLog, TrainingBar
from asr_am.train.run_setup import RunSetup
from asr_am.train.schedule import Anneal
from asr_am.train.trainer import Trainer
from tests.support.sim_disk import SimDisk
from tests.support.soak import FAULT_TOLERANT, STRATEGIES
from tests.support.toy_runs import OPTIONS as TOY_OPTIONS
from tests.support.toy_runs import WORKLOAD, cluster

OPTIONS = replace(
    TOY_OPTIONS, epochs=3, batch_size=12, model=BlstmOptions(1, 3, 4),
    schedule=Anneal(base=0.2, anneal_from=2),
    random_offset=False, checkpoint_every=2, report_every=2,
)  # fmt: skip
UTTERANCES = (60,) * 6  # frames
BASE_RATES = {"ps_async": 0.06, "bmuf": 0.05, "htm": 0.05}  # with 0.2 they overshoot
LEARNERS, HOSTS = 4, 2
SIZES = (2, 4, 6)  # learners of a start, with `resizes`
FAULT_SECONDS = 20.0  # virtual seconds in which faults happen
LIMIT = 2000.0  # virtual seconds after which a run hangs
MAX_EVENTS = 2_000_000
TOLERANCE = 0.05
KINDS = (
    "learner killed", "learner stopped", "host stopped", "cut off", "launcher killed", "launcher stopped",
    "host killed", "power lost", "disk full", "disk error", "killed at a step",
)  # fmt: skip
NOTED_WHEN_THEY_ACT = ("disk full", "disk error", "killed at a step")  # which need somebody who writes
EXPECTED = ("cannot be written", "the disk is full", "another start of this run", "has not answered")


class Hang(Exception):
    """The run does not come to an end."""


@dataclass
class Scenario:
    """One run, through all its launches.

    Args:
        out: directory of the run, empty.
        faulty: there are faults.
        resizes: the command may be started again with another number of learners.

    Attributes:
        faults: number of faults that took place, by kind.
        launches: number of times that the command was started.
        resized: it was started with another number of learners.
        history: verdict on what the run has left.
        kept: number of times that a team continued from what survivors had saved since a checkpoint.
        change: of the held-out loss, relative to the mean of runs without faults.
        problems: what must not be.
    """

    name: str
    seed: int
    egs_dir: Path
    out: Path
    faulty: bool = True
    resizes: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    resized: bool = False
    kept: int = 0
    history: History = field(default_factory=History)
    change: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.name} {self.seed}")
        self._scheduler = Scheduler()
        self._disk = SimDisk(self.out, self._scheduler, self._rng)
        self._disk.faults = self.faults
        self._clusters: list[SimCluster] = []
        self._supervisor: SimTask | None = None
        self._starts_again = False
        self._done = False
        self._events = 0
        self._committed = 0  # updates of the newest checkpoint whose commit has returned
        messages = {"late_share": 0.2, "late_seconds": self._rng.choice([0.3, 2.0]), "lost_share": 0.05}
        tolerant = self.name in FAULT_TOLERANT or self.name == "ps_sync"
        self._messages = Faults(**messages) if self.faulty and tolerant else Faults()

    def run(self) -> None:
        """Runs to the end. Raises Hang, or what the audit or the scheduler raises."""
        commit, commit_survivors = Checkpoints.commit, Trainer._commit_survivors

        def commit_and_note(checkpoints: Checkpoints, updates: int, state: dict[str, object]) -> None:
            commit(checkpoints, updates, state)
            self._committed = max(self._committed, updates)

        def commit_and_count(learner: Trainer, *arguments: Any) -> None:
            commit_survivors(learner, *arguments)
            self.kept += 1

        with (
            self._disk.installed(), mock.patch.object(Checkpoints, "commit", commit_and_note),
            mock.patch.object(Trainer, "_commit_survivors", commit_and_count),
            mock.patch.object(Blstm, "hidden", linear_hidden), note_applied() as applied,
            mock.patch.object(survivors, "STEPS_BETWEEN_COPIES", 1),  # a segment has two steps
        ):  # fmt: skip
            try:
                if self.faulty:
                    self._plan_faults()
                self._launch()
                self._scheduler.run(self._is_over)
            finally:
                self._scheduler.kill_all()
        self.history = audit(self.out)
        self.problems += self.history.problems
        twice = [key for batches in applied.values() for key, count in batches.items() if count > 1]
        self.problems += [f"drain {drains}: a server applied batch {batch} twice" for drains, batch in twice]

    def _is_over(self) -> bool:
        self._events += 1
        if self._scheduler.now > LIMIT or self._events > MAX_EVENTS:
            raise Hang(f"at {self._scheduler.now:.0f} s: {self._scheduler._describe_waits()}")
        if self._supervisor is not None and self._supervisor.finished:
            self._on_end(self._supervisor)
        return self._done

    # launches

    def _launch(self) -> None:
        self._starts_again = False
        self.launches += 1
        self._check_checkpoints()
        rng = random.Random(f"{self.name} {self.seed} {self.launches}")
        learners = rng.choice(SIZES) if self.resizes and self.launches > 1 else LEARNERS
        self.resized = self.resized or learners != LEARNERS
        faults = self._messages if self._scheduler.now < 200 else Faults()
        hardware = replace(cluster(), devices_per_host=learners // HOSTS, jitter=0.3, faults=faults)
        launched = SimCluster(
            hardware, WORKLOAD, learners, self.seed + 1000 * self.launches, scheduler=self._scheduler,
            control_latency=0.01, exit_status=self._exit_status,
        )  # fmt: skip
        launched.messaging._fails = partial(self._note_message, launched.messaging._fails)  # type: ignore[method-assign]
        self._clusters.append(launched)
        self._supervisor = launched.launch(self._learn, synchronous=self.name not in FAULT_TOLERANT)

    def _note_message(self, fails: Callable[[int, str, float], bool], rank: int, kind: str, share: float) -> bool:
        failed = fails(rank, kind, share)
        self.faults[f"message {kind}"] += failed
        return failed

    def _learn(self, team: SimTeam) -> None:
        setup = copy.copy(make_setup(self.name, self.egs_dir, team.size))
        setup.out = self.out
        setup.run_log = RunLog(self.out, setup.run_log.tracker, TrainingBar(OPTIONS.epochs), {})
        try:
            Trainer(setup, team).train()
        finally:
            setup.run_log.close()

    def _exit_status(self, error: BaseException) -> int:
        known = isinstance(error, ConnectionLost | LearnerLost) or (
            any(text in str(error) for text in EXPECTED)
            if isinstance(error, InputError)
            else isinstance(error, OSError)
        )
        if not known:
            self.problems.append("".join(traceback.format_exception(error, limit=-4)))
        if isinstance(error, LearnerLost) and self.name not in FAULT_TOLERANT:
            return EXIT_LOST
        return report_failure(error, "", self.out) if isinstance(error, Exception) else EXIT_FAILURE

    def _on_end(self, supervisor: SimTask) -> None:
        """Does what a user does: starts the command again after an error."""
        self._supervisor = None
        if supervisor.error is None and not supervisor.killed:
            self._done = True
            return
        if supervisor.error is not None and not isinstance(supervisor.error, InputError):
            raise supervisor.error
        if self.launches > 30:
            raise Hang(f"{self.launches} starts, last error: {supervisor.error}")
        self._start_again()

    def _start_again(self) -> None:
        if not self._starts_again:
            self._starts_again = True
            self._scheduler.call_at(self._scheduler.now + self._rng.choice([0.0, 1.0, 12.0]), self._launch)

    def _check_checkpoints(self) -> None:
        newest = max((int(path.name[-9:]) for path in self.out.glob("checkpoints/checkpoint-?????????")), default=0)
        if newest < self._committed:
            self.problems.append(f"checkpoint {self._committed} was complete, and is gone: the newest is {newest}")

    # faults

    def _plan_faults(self) -> None:
        for _ in range(self._rng.randint(1, 6)):
            at = self._rng.uniform(0.0, FAULT_SECONDS)
            self._scheduler.call_at(at, partial(self._fault, self._rng.choice(KINDS)))

    def _fault(self, kind: str) -> None:
        """Lets a fault happen to the present launch."""
        if self._starts_again or self._supervisor is None:
            return
        launched, now, rng = self._clusters[-1], self._scheduler.now, self._rng
        learner, host = rng.choice(launched.learners), rng.randrange(HOSTS)
        end = now + rng.choice([0.5, 5.0, 15.0])
        self.faults[kind] += kind not in NOTED_WHEN_THEY_ACT
        if kind == "learner killed":
            launched.end(learner, KILLED, "was killed", learner.incarnation)
        elif kind == "learner stopped":
            learner.stopped_until = end
        elif kind == "host stopped":
            launched.processes[host][0].stopped_until = end
            for other in launched.learners:
                other.stopped_until = end if other.host == host else other.stopped_until
        elif kind == "launcher stopped":
            launched.processes[0][0].stopped_until = end
        elif kind == "cut off":
            for each in self._clusters:
                each.network.cut_off(host, end)
        elif kind == "launcher killed":
            self._kill_host(0)
        elif kind == "host killed":
            self._kill_host(host)
        elif kind == "power lost":
            self._lose_power()
        elif kind == "disk full":
            self._disk.full_until = end
        elif kind == "disk error":
            self._disk.failing = 1
        elif kind == "killed at a step":
            self._kill_at_a_step(rng.randint(1, 30), rng.choice(["learner", "power"]))

    def _kill_host(self, host: int) -> None:
        """Kills a host's launcher and learners."""
        launched = self._clusters[-1]
        if host == 0:
            launched.server.crash()
        for learner in launched.learners:
            if learner.host == host:
                launched.end(learner, KILLED, "was killed", learner.incarnation)
        self._scheduler.kill(launched.processes[host][1])

    def _kill_at_a_step(self, steps: int, what: str) -> None:
        """Kills a learner just before one of the next steps on the disk, or lets the power go there."""

        def count() -> None:
            nonlocal steps
            steps -= 1
            task = self._scheduler.current
            if steps or task is None:
                return
            self._disk.at_step = lambda: None
            launched = self._clusters[-1]
            victims = [learner for learner in launched.learners if task in learner.tasks]
            self.faults["killed at a step"] += what == "power" or bool(victims)
            if what == "power":
                self._scheduler.call_at(self._scheduler.now, self._lose_power)
            elif victims:
                end = partial(launched.end, victims[0], KILLED, "was killed", victims[0].incarnation)
                self._scheduler.call_at(self._scheduler.now, end)

        self._disk.at_step = count

    def _lose_power(self) -> None:
        """Kills all processes, also of earlier launches, and loses what is not durable."""
        for launched in self._clusters:
            launched.server.crash()
        self._scheduler.kill_all()
        self._disk.power_loss()
        self._supervisor = None
        self._check_checkpoints()
        if not self._done:
            self._start_again()


class SharedLoader:
    """Assembles each plan, each batch and each list of identities once for all learners and seeds."""

    def __init__(self, loader: Loader) -> None:
        self.order, self.plan, self.batches = loader.order, cache(loader.plan), loader.batches
        self._batch = cache(lambda epoch, number: loader.batch(self.plan(epoch), number))
        self._loader, self._digests = loader, dict[tuple[int, ...], tuple[int, ...]]()

    def batch(self, plan: EpochPlan, number: int) -> Batch:
        return self._batch(plan.epoch, number)

    def digests(self, plan: EpochPlan, first: int, end: int) -> tuple[int, ...]:
        key = plan.epoch, plan.batch_size, first, end  # survivors' plan may have batches of another size
        if key not in self._digests:
            self._digests[key] = self._loader.digests(plan, first, end)
        return self._digests[key]


@cache
def make_setup(name: str, egs_dir: Path, learners: int) -> RunSetup:
    """Returns what all learners share, but for their files."""
    options = replace(OPTIONS, schedule=replace(OPTIONS.schedule, base=BASE_RATES.get(name, 0.2)))  # type: ignore[type-var]
    setup = RunSetup(egs_dir, egs_dir.parent / "unused", options, STRATEGIES[name], learners=learners)
    _ = setup.model(), setup.validator
    setup.loader = SharedLoader(setup.loader)  # type: ignore[assignment]
    return setup


def summary(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def heldout_loss(out: Path) -> float:
    return float(summary(out)["heldout_loss"][-1])


@cache
def fault_free_losses(name: str, egs_dir: Path) -> list[float]:
    """Returns the held-out losses of runs without faults. Those of synchronous strategies are all equal."""
    losses = []
    for seed in range(20 if name in FAULT_TOLERANT else 1):
        with scratch() as folder:
            scenario = Scenario(name, seed, egs_dir, folder, faulty=False)
            scenario.run()
            assert not scenario.problems, scenario.problems
            losses.append(heldout_loss(folder))
    return losses


def linear_hidden(model: Blstm, x_BTF: Tensor, *_: object, **__: object) -> Tensor:
    """The network without its LSTMs, whose weights get no gradient. They would take most of the time of a run."""
    return model.projection(model.normalise(x_BTF))


@contextmanager
def note_applied() -> Iterator[dict[ParameterServer, Counter[tuple[int, int]]]]:
    """Counts how often each server applies a batch, by (number of drains, batch). A restarted server is another one."""
    applied: dict[ParameterServer, Counter[tuple[int, int]]] = {}
    take_new = ParameterServer.take_new

    def take_and_note(server: ParameterServer, pushes: Sequence[Push]) -> list[Push]:
        new = take_new(server, pushes)
        applied.setdefault(server, Counter()).update((push.id.segment, push.batch) for push in new)
        return new

    with mock.patch.object(ParameterServer, "take_new", take_and_note):
        yield applied


@contextmanager
def scratch() -> Iterator[Path]:
    """Returns a directory in memory, if there is one: the runs sync nothing to a real disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def run(name: str, seed: int, egs_dir: Path, resizes: bool = False) -> Scenario:
    """Runs a scenario. Its `problems` say what was not as it must be."""
    fault_free = fault_free_losses(name, egs_dir)
    with scratch() as folder:
        scenario = Scenario(name, seed, egs_dir, folder, resizes=resizes)
        try:
            scenario.run()
            loss, worst = heldout_loss(folder), max(fault_free)
            scenario.change = loss / mean(fault_free) - 1
            most = math.inf if scenario.resized else worst * (1 + TOLERANCE)
            lost = summary(folder)["counts"].get("residuals lost", 0)
            tolerant = name in FAULT_TOLERANT or scenario.resized or lost
            if not (loss <= most if tolerant else math.isclose(loss, worst, rel_tol=1e-5)):
                scenario.problems.append(f"held-out loss {loss:.4f}, without faults at most {worst:.4f}")
        except Exception:
            scenario.problems.append(traceback.format_exc(limit=-3))
    return scenario


@dataclass
class SoakReport:
    """Outcome of the scenarios of one strategy.

    Attributes:
        faults: number of faults that took place, by kind.
        counts: numbers of scenarios, batches, deaths and so on, as COUNTS names them.
        mean: change of the held-out loss, mean of the scenarios.
        worst: largest change of the held-out loss.
    """

    seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    mean: float = 0.0
    worst: float = 0.0

    def add(self, scenario: Scenario) -> None:
        history, counts = scenario.history, scenario.history.counts
        lost = counts["owner died"] + counts["server died"] + counts["lost with the learner"]
        dropped = counts["dropped"] + counts["dropped by a server"]
        numbers = (bool(scenario.problems), scenario.launches > 1, history.batches, history.deaths, scenario.kept)
        self.seeds += 1
        self.faults.update(scenario.faults)
        self.counts.update(dict(zip(COUNTS, (*numbers, counts["leased again"], dropped, lost), strict=True)))
        self.mean += (scenario.change - self.mean) / self.seeds
        self.worst = max(self.worst, scenario.change)


COUNTS = ("failed", "started again", "batches", "deaths", "kept", "leased again", "dropped", "lost")


def soak(name: str, seeds: range, egs_dir: Path, resizes: bool = False) -> SoakReport:
    """Runs the scenarios of one strategy. Prints those with problems."""
    report = SoakReport()
    for seed in seeds:
        scenario = run(name, seed, egs_dir, resizes)
        report.add(scenario)
        if scenario.problems:
            print(f"{name} {seed}: {scenario.problems[0]}", flush=True)
    return report
