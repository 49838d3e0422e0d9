"""Random faults of real processes, for every asynchronous strategy: `python -m tests.support.process_soak 200`.

Each run trains a small network with four learners, on one host or on two (network namespaces). Learners 0 and 2 have
the parameter servers, and 0 is the leader. After a random time a random fault of `process_faults.FAULTS` happens: kills
of learners, leader, supervisor and the other host, pauses, partitions, a full and a read-only disk. The next one comes
when a new checkpoint is complete, or the run has finished. The time to recover is that from the end of a fault to this
checkpoint. A command that ends with an error is started again: after faults that may end it, that is no problem.

`asr_am.train.audit` checks the history of each run. The held-out loss is compared with that of runs without faults.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from asr_am.distributed.runtime.worker_process import ended_by_sigterm
from asr_am.errors import InputError
from asr_am.stages.target import git_commit
from asr_am.train.audit import audit, read_summary
from tests.support.egs_examples import write_examples
from tests.support.other_user import mount_privately
from tests.support.process_faults import FAULTS, Team, network, wait_for

STRATEGIES = ("adpsgd", "ps_async", "psp")
EPOCHS = 12
PATIENCE = 120.0  # seconds without a new checkpoint after which a run counts as hanging
ORPHANS = 10.0  # seconds in which learners must end after their launcher
UNDISTURBED = 1  # runs without faults
HEAD = [
    "| strategy | faults | restarts of learners, of the command | to recover: median, longest | runs | held-out loss | "
    "problems | commit | date |",
    "|:--|:--|:--|:--|:--|:--|:--|:--|:--|",
]


@dataclass
class Outcome:
    """What the faults of one run, or of several, gave.

    Attributes:
        runs: number of runs.
        kinds: number of faults by name.
        recovered: (seconds to recover, name of the fault).
        restarts: learners that were started again.
        commands: how often the command was started again.
        losses: best held-out loss of each run.
        problems: what must not be.
    """

    runs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    recovered: list[tuple[float, str]] = field(default_factory=list)
    restarts: int = 0
    commands: int = 0
    losses: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def disturb(team: Team, rng: random.Random, limit: int) -> Outcome:
    """Trains to the end under random faults.

    Args:
        team: the run. Must not have been started.
        rng: chooses faults and their times.
        limit: number of faults after which the run is left alone.
    """
    outcome = Outcome(runs=1)
    possible = [fault for fault in FAULTS if fault.hosts <= len(team.spaces or [""])]
    weights = [fault.weight for fault in possible]
    team.start()
    wait_for(lambda: team.newest() > 0 or team.status() is not None, PATIENCE)
    while True:
        end = time.monotonic() + (rng.uniform(0.05, 1.5) if outcome.kinds.total() < limit else PATIENCE)
        while team.status() is None and time.monotonic() < end:
            time.sleep(0.01)
        if team.status() == 0:
            break
        (fault,) = rng.choices(possible, weights)
        if outcome.kinds.total() >= limit or team.status() is not None:
            outcome.problems.append(f"hangs or ends with status {team.status()} without a fault")
            break
        before = team.newest()
        if not fault.happen(team, rng):
            continue
        outcome.kinds[fault.name] += 1
        began = time.monotonic()
        if problem := _recover(team, team.newest() if fault.ends else before, fault.ends):
            outcome.problems.append(f"{fault.name}: {problem}")
            break
        if team.status() is None:
            outcome.recovered.append((time.monotonic() - began, fault.name))
    if not outcome.problems:
        try:
            history = audit(team.out)
            outcome.problems += history.problems
            outcome.losses.append(min(read_summary(team.out)["heldout_loss"]))
        except InputError as error:
            outcome.problems.append(str(error))
    outcome.restarts = team.starts() - team.commands * 4
    outcome.commands = team.commands - 1
    return outcome


def _recover(team: Team, before: int, may_end: bool) -> str | None:
    """Waits for a newer checkpoint than `before`, or the end of the run. Returns what went wrong instead, or None.

    Args:
        team: the run.
        before: number of the newest checkpoint before the fault.
        may_end: the command may have ended because of the fault.
    """
    end = time.monotonic() + PATIENCE
    while team.status() != 0:
        if (newest := team.newest()) < before:
            return f"checkpoint {newest} after {before}"
        if newest > before and not team.launchers[0].poll():
            return None
        if team.status() is not None:
            if not may_end:
                return f"ended with status {team.status()}: {_last_line(team)}"
            if not wait_for(lambda: not team.learners(), ORPHANS):
                return "learners outlive their launcher"
            team.disk.repair()
            team.start()
        if time.monotonic() > end:
            return f"no checkpoint within {PATIENCE:g} s"
        time.sleep(0.01)
    return None


def _last_line(team: Team) -> str:
    lines = [line for line in team.log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def soak(strategy: str, faults: int, minutes: float, first: int, folder: Path, keep: Path | None) -> Outcome:
    """Trains under faults until there were enough of them, or the time is over.

    Args:
        strategy: name of the strategy.
        faults: number of faults.
        minutes: after which no run begins.
        first: seed of the first run.
        folder: for the runs.
        keep: folder for the logs of runs with a problem, or None.
    """
    egs_dir = write_examples(folder / "egs", frames_U=(60,) * 12)
    total, seed = Outcome(), first
    undisturbed = [_one(strategy, egs_dir, folder / f"undisturbed{n}", f"{n}", 0, n).losses for n in range(UNDISTURBED)]
    reference = statistics.mean(loss for losses in undisturbed for loss in losses)
    end = time.monotonic() + 60 * minutes
    while total.kinds.total() < faults and time.monotonic() < end:
        run = folder / f"{seed}"
        outcome = _one(strategy, egs_dir, run, f"{strategy} {seed}", faults - total.kinds.total(), seed)
        outcome.losses = [loss / reference for loss in outcome.losses]
        if outcome.problems and keep is not None:
            (run / "log").rename(keep / f"{strategy}-{seed}.log")
        verdict = "; ".join(outcome.problems) or "no problem"
        print(f"{strategy} seed {seed}: {outcome.kinds.total()} faults, {verdict}", flush=True)
        total.add(outcome)
        seed += 1
    return total


def _one(strategy: str, egs_dir: Path, folder: Path, dice: str, limit: int, seed: int) -> Outcome:
    """Trains once, on two hosts if the seed is odd."""
    with ExitStack() as stack:
        spaces = stack.enter_context(network(str(os.getpid()))) if seed % 2 else []
        team = Team(strategy, egs_dir, folder, EPOCHS, spaces)
        stack.callback(team.close)
        return disturb(team, random.Random(dice), limit)


def row(strategy: str, outcome: Outcome) -> str:
    seconds = [seconds for seconds, _ in outcome.recovered]
    longest, slowest = max(outcome.recovered, default=(0.0, "-"))
    kinds = ", ".join(f"{count} {name}" for name, count in outcome.kinds.most_common())
    cells = [
        strategy, f"{outcome.kinds.total()}: {kinds}", f"{outcome.restarts}, {outcome.commands}",
        f"{statistics.median(seconds or [0.0]):.1f} s, {longest:.1f} s ({slowest})", outcome.runs,
        f"{100 * statistics.mean(outcome.losses or [0.0]) - 100:+.1f} % "
        f"({100 * min(outcome.losses or [0.0]) - 100:+.1f} to {100 * max(outcome.losses or [0.0]) - 100:+.1f})",
        len(outcome.problems), git_commit(), datetime.date.today(),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def write_row(table: Path, strategy: str, line: str) -> None:
    """Writes one strategy's row into a file, which keeps the latest row of every other strategy."""
    lines = table.read_text().splitlines() if table.exists() else []
    rows = {old.split(" | ")[0].removeprefix("| "): old for old in lines if old.startswith("| ")} | {strategy: line}
    text = [
        "# Faults of real processes", "", "Written by `scripts/soak.sh --processes 200 --out FILE`. Losses are "
        "relative to those of runs without faults: mean, and from best to worst run.", "", *HEAD,
    ]  # fmt: skip
    table.write_text("\n".join([*text, *(rows[name] for name in STRATEGIES if name in rows)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak.sh --processes", description="Random faults of real processes.")
    parser.add_argument("faults", type=int, nargs="?", default=20, help="faults per strategy (default: 20)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run (default: 0)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="test only this strategy")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--logs", type=Path, help="keep the logs of runs with a problem in this folder")
    arguments = parser.parse_args()
    if os.geteuid():
        sys.exit("needs root, for network namespaces and mounts")
    mount_privately()
    failed = False
    for strategy in [arguments.strategy] if arguments.strategy else STRATEGIES:
        with ended_by_sigterm(), tempfile.TemporaryDirectory() as folder:
            outcome = soak(strategy, arguments.faults, arguments.minutes, arguments.first, Path(folder), arguments.logs)
        failed = failed or bool(outcome.problems)
        line = row(strategy, outcome)
        print("\n".join([*HEAD, line]), flush=True)
        if arguments.out:
            write_row(arguments.out, strategy, line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
