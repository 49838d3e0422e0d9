"""Faults of everything together, by seed: `python -m tests.support.control_soak 1000`.

A scenario trains a small network with `asr_am.train.trainer` on four virtual learners of two hosts. Supervisor, agents,
control plane, strategies, checkpoints and logs are those of real processes. Only processes, connections, clocks and
the disk are virtual. At random times a learner, a host, the launcher or the power fails, a process or a host is
stopped, the hosts are cut off from each other, or the disk fills up or fails. Messages are lost and late all the time.
Whoever runs the command starts it again when it has ended with an error.

The following must hold. The run ends. Learners end with messages that name the fault. A checkpoint that was completed
is there after every fault, and checkpoints never go back. `asr_am.train.audit` finds no problem: every batch counts
once, and is applied, or counted as dropped or as lost with its learner or server. The held-out loss is at most 5 %
above that without faults. Synchronous strategies reach the same loss.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.launch_spec import EXIT_FAILURE
from asr_am.distributed.simulator.cluster import KILLED, SimCluster
from asr_am.distributed.simulator.scheduler import Scheduler, SimTask
from asr_am.distributed.simulator.team import SimTeam
from asr_am.distributed.team import LearnerLost
from asr_am.errors import ConnectionLost, InputError
from asr_am.model.blstm import BlstmOptions
from asr_am.stages.train_worker import report_failure
from asr_am.train.audit import audit
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.run_log import RunLog, TrainingBar
from asr_am.train.run_setup import RunSetup
from asr_am.train.schedule import Schedule
from asr_am.train.trainer import Trainer
from tests.support.egs_examples import write_examples
from tests.support.sim_disk import SimDisk
from tests.support.soak import FAULT_TOLERANT, STRATEGIES
from tests.support.toy_runs import OPTIONS as TOY_OPTIONS
from tests.support.toy_runs import WORKLOAD, cluster

OPTIONS = replace(
    TOY_OPTIONS, epochs=3, model=BlstmOptions(1, 4, 4), schedule=Schedule(base=0.2, anneal_from=2, anneal=0.2),
    random_offset=False, checkpoint_every=2, report_every=2,
)  # fmt: skip
BASE_RATES = {"ps_async": 0.06}
LEARNERS, HOSTS = 4, 2
FAULT_SECONDS = 60.0  # virtual seconds in which faults happen
LIMIT = 2000.0  # virtual seconds after which a run hangs
MAX_EVENTS = 2_000_000
TOLERANCE = 0.05
KINDS = (
    "learner killed", "learner stopped", "host stopped", "cut off", "launcher killed", "launcher stopped",
    "host killed", "power lost", "disk full", "disk error", "killed at a step",
)  # fmt: skip
EXPECTED = ("cannot be written", "the disk is full", "another start of this run", "has not answered")


class Hang(Exception):
    """The run does not come to an end."""


@dataclass
class Scenario:
    """One run, through all its launches.

    Args:
        name: name of the strategy.
        seed: chooses the faults.
        egs_dir: the examples.
        out: directory of the run, empty.
        faulty: there are faults.

    Attributes:
        faults: number of faults that took place, by kind.
        launches: number of times that the command was started.
        problems: what must not be.
    """

    name: str
    seed: int
    egs_dir: Path
    out: Path
    faulty: bool = True
    faults: Counter[str] = field(default_factory=Counter)
    launches: int = 0
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
        commit = Checkpoints.commit

        def commit_and_note(checkpoints: Checkpoints, updates: int, state: dict[str, object]) -> None:
            commit(checkpoints, updates, state)
            self._committed = max(self._committed, updates)

        with self._disk.installed(), mock.patch.object(Checkpoints, "commit", commit_and_note):
            try:
                if self.faulty:
                    self._plan_faults()
                self._launch()
                self._scheduler.run(self._is_over)
            finally:
                self._scheduler.kill_all()
        self.problems += audit(self.out).problems

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
        hardware = cluster()
        hardware = replace(hardware, jitter=0.3, faults=self._messages if self._scheduler.now < 200 else Faults())
        launched = SimCluster(
            hardware, WORKLOAD, LEARNERS, self.seed + 1000 * self.launches, scheduler=self._scheduler,
            control_latency=0.01, exit_status=self._exit_status,
        )  # fmt: skip
        self._clusters.append(launched)
        self._supervisor = launched.launch(self._learn, synchronous=self.name not in FAULT_TOLERANT)

    def _learn(self, team: SimTeam) -> None:
        setup = copy.copy(make_setup(self.name, self.egs_dir))
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
        self.faults[kind] += 1
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


@cache
def make_setup(name: str, egs_dir: Path) -> RunSetup:
    """Returns what all learners share, but for their files."""
    options = replace(OPTIONS, schedule=replace(OPTIONS.schedule, base=BASE_RATES.get(name, 0.2)))  # type: ignore[type-var]
    setup = RunSetup(egs_dir, egs_dir.parent / "unused", options, STRATEGIES[name], learners=LEARNERS)
    _ = setup.model(), setup.validator
    return setup


def heldout_loss(out: Path) -> float:
    return float(json.loads((out / "summary.json").read_text())["heldout_loss"][-1])


@cache
def fault_free_loss(name: str, egs_dir: Path) -> float:
    """Returns the mean held-out loss of runs without faults."""
    losses = []
    for seed in range(1 if name not in FAULT_TOLERANT else 5):
        with tempfile.TemporaryDirectory() as folder:
            scenario = Scenario(name, seed, egs_dir, Path(folder), faulty=False)
            scenario.run()
            assert not scenario.problems, scenario.problems
            losses.append(heldout_loss(Path(folder)))
    return sum(losses) / len(losses)


def run(name: str, seed: int, egs_dir: Path) -> Scenario:
    """Runs a scenario. Its `problems` say what was not as it must be."""
    expected = fault_free_loss(name, egs_dir)
    with tempfile.TemporaryDirectory() as folder:
        scenario = Scenario(name, seed, egs_dir, Path(folder))
        try:
            scenario.run()
            change = heldout_loss(Path(folder)) / expected - 1
            if (change if name in FAULT_TOLERANT else abs(change)) > (TOLERANCE if name in FAULT_TOLERANT else 1e-5):
                scenario.problems.append(f"held-out loss changes by {change:.1%}")
        except Exception:
            scenario.problems.append(traceback.format_exc(limit=-3))
    return scenario


def soak(name: str, seeds: range, egs_dir: Path, report: Callable[[str], None] = print) -> tuple[Counter[str], int]:
    """Runs the scenarios of one strategy. Returns the number of seeds with each kind of fault, and of failures."""
    seen: Counter[str] = Counter()
    failed = 0
    for seed in seeds:
        scenario = run(name, seed, egs_dir)
        seen.update(kind for kind, count in scenario.faults.items() if count)
        seen["started again"] += scenario.launches > 1
        if scenario.problems:
            failed += 1
            report(f"{name} {seed}: {scenario.problems[0]}")
    return seen, failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak.sh --control", description="Faults of everything together.")
    parser.add_argument("seeds", type=int, nargs="?", default=1000, help="number of seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="test only this strategy")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("asr_am").setLevel(logging.CRITICAL)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        egs_dir = write_examples(Path(folder) / "egs", frames_U=(60,) * 12)
        for name in [arguments.strategy] if arguments.strategy else STRATEGIES:
            begin = time.monotonic()
            seeds = range(arguments.first, arguments.first + arguments.seeds)
            seen, failures = soak(name, seeds, egs_dir, partial(print, flush=True))
            failed += failures
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(seen.items()))
            print(
                f"{name}: {len(seeds)} seeds, {time.monotonic() - begin:.0f} s, {failures} failed; seeds with {kinds}"
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
