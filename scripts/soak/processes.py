"""Random faults of real processes, for every strategy: `python -m scripts.soak.processes [FAULTS=200]`.

Each run trains a small network with four learners, on one host or on two (network namespaces). Learners 0 and 2 have
the parameter servers, and 0 is the leader. After a random time a random fault of `process_faults.FAULTS` happens: kills
of learners, leader, supervisor and the other host, pauses, partitions, a full and a read-only disk. The next one comes
when a new checkpoint is complete, or the run has finished. Measured is the longest time without a step of any learner
from the fault to this checkpoint. A command that ends with an error is started again: after faults that may end it,
that is no problem. With `--fault` the chosen ones happen in turn, and with `--deaths` those of `DEATHS`.

`asr_am.train.audit` checks the history of each run. The held-out loss is compared with that of runs without faults.
Prints tables of the kinds of faults and of the runs. With `--journal` a soak that was killed goes on after the last run
that has ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from asr_am.data.record import read_record
from asr_am.distributed.runtime.worker_process import ended_by_sigterm
from asr_am.errors import InputError
from asr_am.train.audit import audit
from scripts.soak.process_faults import FAULTS, STRATEGIES, Fault, Team, network, wait_for
from scripts.soak.results import record
from tests.support.egs_examples import write_examples
from tests.support.other_user import mount_privately

EPOCHS = 12
PATIENCE = 120.0  # seconds without a new checkpoint after which a run counts as hanging
UNDISTURBED = 3  # runs without faults
ORPHANS = 10.0  # seconds in which learners must end after their launcher
SECTION, DEATHS_SECTION = "Faults of real processes", "Deaths and pauses of real processes"
KILLS = ("one learner killed", "two killed", "all killed")
ONE, TWO, ALL = KILLS
DEATHS = (ONE, TWO, ONE, ALL, ONE, "learner paused 12 to 14 s", ONE, "supervisor killed")
Choose = Callable[[random.Random], Fault]
KINDS = ["| fault | times | without a step, median | longest |", "|:--|--:|--:|--:|"]
RUNS = ["| seed | hosts | faults | history, and verdict | held-out loss |", "|--:|--:|--:|:--|--:|"]


@dataclass
class Outcome:
    """What the faults of one run gave.

    `gaps` has the name of each fault and the longest seconds without a step of any learner, `history` what the checker
    has counted, and `problems` what must not be.
    """

    seed: int
    hosts: int
    kinds: Counter[str] = field(default_factory=Counter)
    gaps: list[tuple[str, float]] = field(default_factory=list)
    restarts: int = 0
    commands: int = 0
    history: str = "-"
    loss: float = math.nan
    problems: list[str] = field(default_factory=list)


class Journal:
    """The outcomes of runs that have ended, one a line of JSON, so that a soak goes on where it was killed.

    Args:
        path: the file, or None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def outcomes(self, name: str) -> list[Outcome]:
        """Returns the outcomes that were added under a name. The last line may be cut off."""
        if self._path is None or not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]
        found = [fields for other, fields in map(json.loads, lines) if other == name]
        for fields in found:
            fields["kinds"], fields["gaps"] = Counter(fields["kinds"]), [(name, gap) for name, gap in fields["gaps"]]
        return [Outcome(**fields) for fields in found]

    def add(self, name: str, outcome: Outcome) -> None:
        if self._path is not None:
            content = self._path.read_bytes() if self._path.exists() else b""
            with self._path.open("r+b" if content else "wb") as file:
                file.truncate(content.rfind(b"\n") + 1)
                file.seek(0, os.SEEK_END)
                file.write(json.dumps([name, vars(outcome)]).encode() + b"\n")


def chooser(kinds: Sequence[Fault], done: int = 0) -> Choose:
    """Returns what chooses the next fault: of `FAULTS` by their weights, of others in turn, after `done` of them."""
    if kinds is FAULTS:
        return lambda rng: rng.choices(kinds, [kind.weight for kind in kinds])[0]
    turns = islice(cycle(kinds), done, None)
    return lambda rng: next(turns)


def disturb(team: Team, choose: Choose, seed: int, dice: str, limit: int) -> Outcome:
    """Trains to the end, the team not yet started, under random faults until there were `limit`."""
    outcome, rng = Outcome(seed, len(team.spaces or [""])), random.Random(dice)
    team.start()
    wait_for(lambda: team.newest() > 0 or team.status() is not None, PATIENCE)
    while outcome.kinds.total() < limit and not outcome.problems:
        wait_for(lambda: team.status() is not None, rng.uniform(0.05, 1.5))
        if team.status() is not None:
            break
        fault, before, began = choose(rng), team.newest(), time.monotonic()
        if fault.hosts > outcome.hosts or not fault.happen(team, rng):
            continue
        outcome.kinds[fault.name] += 1
        may_end = fault.may_end(team.strategy)
        if problem := _recover(team, team.newest() if may_end else before, may_end):
            outcome.problems.append(f"{fault.name}: {problem}")
            break
        wait_for(lambda began=began: team.longest_gap(began) is not None or team.status() is not None, PATIENCE)
        if (gap := team.longest_gap(began)) is not None:
            outcome.gaps.append((fault.name, gap))
    while not outcome.problems and team.status() is None:
        if problem := _recover(team, team.newest(), may_end=False):
            outcome.problems.append(f"after the last fault: {problem}")
    if not outcome.problems and team.status():
        outcome.problems.append(f"ended with status {team.status()} without a fault: {_last_line(team)}")
    if not outcome.problems:
        try:
            history = audit(team.out)
            outcome.history, outcome.problems = str(history), history.problems
            outcome.loss = min(read_record(team.out / "summary.json")["heldout_loss"])
        except InputError as error:
            outcome.problems.append(str(error))
    outcome.restarts = team.starts() - team.commands * 4
    outcome.commands = team.commands - 1
    return outcome


def _recover(team: Team, before: int, may_end: bool) -> str | None:
    """Waits for a newer checkpoint than `before`, or the end of the run. Returns what went wrong instead, or None.

    Args:
        before: number of the newest checkpoint before the fault.
        may_end: the command may have ended because of the fault.
    """
    end = time.monotonic() + PATIENCE
    while (status := team.status()) != 0:
        if (newest := team.newest()) < before:
            return f"checkpoint {newest} after {before}"
        if newest > before and not team.launchers[0].poll():
            return None
        if status is not None:
            if not may_end:
                return f"ended with status {status}: {_last_line(team)}"
            if not wait_for(lambda: not team.learners(), ORPHANS):
                return "learners outlive their launcher"
            team.disk.repair()
            before = team.newest()  # learners may have completed it after their launcher was killed
            team.start()
        if time.monotonic() > end:
            return f"no checkpoint within {PATIENCE:g} s"
        time.sleep(0.01)
    return None


def _last_line(team: Team) -> str:
    lines = [line for line in team.log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def soak(
    strategy: str, kinds: Sequence[Fault], faults: int, minutes: float, first: int, folder: Path, keep: Path | None,
    heading: str | None, journal: Journal,
) -> list[Outcome]:  # fmt: skip
    """Trains under faults until there were enough of them, or the time is over.

    Args:
        minutes: after which no run begins.
        folder: for the runs.
        keep: folder for what runs with a problem have left, or None.
        heading: section of RESULTS.md that gets a row, or None.
        journal: has the runs that an earlier command has finished, and gets those of this one.
    """
    egs_dir = write_examples(folder / "egs", frames_U=(60,) * 12)
    undisturbed, outcomes = journal.outcomes(f"{strategy}, undisturbed"), journal.outcomes(strategy)
    choose = chooser(kinds, total(outcomes).total())
    for number in range(len(undisturbed), UNDISTURBED):
        outcome = _one(strategy, choose, egs_dir, folder / f"undisturbed{number}", number, "", 0, keep)
        if outcome.problems:
            raise SystemExit(f"{strategy}, without faults: {'; '.join(outcome.problems)}")
        undisturbed.append(outcome)
        journal.add(f"{strategy}, undisturbed", outcome)
    references = [outcome.loss for outcome in undisturbed]
    end = time.monotonic() + 60 * minutes
    begin = seed = first + len(outcomes)
    while (left := faults - total(outcomes).total()) > 0 and time.monotonic() < end:
        outcome = _one(strategy, choose, egs_dir, folder / f"{seed}", seed, f"{strategy} {seed}", left, keep)
        outcomes.append(outcome)
        journal.add(strategy, outcome)
        verdict = "; ".join(outcome.problems) or "no problem"
        print(f"{strategy} seed {seed}: {outcome.kinds.total()} faults, {verdict}", flush=True)
        seed += 1
    print(section(strategy, outcomes, references), flush=True)
    if heading is not None and seed > begin:  # else its row stays, with the commit that made it
        record(heading, strategy, summary(outcomes, references))
    return outcomes


def _one(
    strategy: str, choose: Choose, egs_dir: Path, folder: Path, seed: int, dice: str, limit: int,
    keep: Path | None,
) -> Outcome:  # fmt: skip
    """Trains once, on two hosts if the seed is odd."""
    with ExitStack() as stack:
        spaces = stack.enter_context(network(str(os.getpid()))) if seed % 2 else []
        team = Team(strategy, egs_dir, folder, EPOCHS, spaces)
        stack.callback(team.close)
        outcome = disturb(team, choose, seed, dice, limit)
        if outcome.problems and keep is not None:
            left = keep / f"{strategy}-{seed}"
            shutil.copytree(team.out, left / "run", ignore_dangling_symlinks=True, dirs_exist_ok=True)
            shutil.copyfile(team.log, left / "log")
    return outcome


def total(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Returns the number of faults by name."""
    return sum((outcome.kinds for outcome in outcomes), Counter())


def relative_losses(outcomes: Sequence[Outcome], references: Sequence[float]) -> list[float]:
    """Returns the held-out losses of the runs that have ended, in percent against the mean without faults."""
    reference = statistics.mean(references)
    return [100 * outcome.loss / reference - 100 for outcome in outcomes if math.isfinite(outcome.loss)]


def summary(outcomes: Sequence[Outcome], references: Sequence[float]) -> dict[str, object]:
    """Returns a strategy's row for RESULTS.md: counts, losses relative to those without faults, seconds to recover."""
    losses = relative_losses(outcomes, references)
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    kills = [seconds for name, seconds in gaps if name in KILLS] or [math.nan]
    others = [seconds for name, seconds in gaps if name not in KILLS] or [math.nan]
    return {
        "faults": total(outcomes).total(),
        "runs": len(outcomes),
        "ended": sum(outcome.history == "-" for outcome in outcomes),
        "batches lost or twice": sum(len(outcome.problems) for outcome in outcomes if outcome.history != "-"),
        "learners started again": sum(outcome.restarts for outcome in outcomes),
        "commands started again": sum(outcome.commands for outcome in outcomes),
        "held-out loss": f"{min(losses, default=0):+.1f} to {max(losses, default=0):+.1f} %",
        "no step after a kill, median": f"{statistics.median(kills):.2f} s",
        "longest": f"{max(kills):.2f} s",
        "after others, longest": f"{max(others):.1f} s",
    }


def section(strategy: str, outcomes: Sequence[Outcome], references: Sequence[float]) -> str:
    """Returns the tables of a strategy: its kinds of faults, and its runs with the verdict on each history."""
    reference = statistics.mean(references)
    kinds, gaps = total(outcomes), [entry for outcome in outcomes for entry in outcome.gaps]
    lines = [f"## {strategy}", "", *KINDS]
    for name, count in [*kinds.most_common(), ("all", kinds.total())]:
        seconds = [seconds for fault, seconds in gaps if name in (fault, "all")]
        times = f"{statistics.median(seconds):.2f} s | {max(seconds):.2f} s" if seconds else "- | -"
        lines.append(f"| {name} | {count} | {times} |")
    lines += ["", *RUNS]
    for outcome in outcomes:
        verdict = outcome.history if outcome.history != "-" else "; ".join(outcome.problems)
        loss = f"{100 * outcome.loss / reference - 100:+.1f} %" if math.isfinite(outcome.loss) else "-"
        cells = [outcome.seed, outcome.hosts, outcome.kinds.total(), verdict, loss]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", type=int, nargs="?", default=200, help="faults per strategy (default: 200)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run (default: 0)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="test only this strategy")
    parser.add_argument("--fault", choices=[fault.name for fault in FAULTS], action="append", help="take these in turn")
    parser.add_argument("--deaths", dest="fault", action="store_const", const=DEATHS, help="kills and a pause, in turn")
    parser.add_argument("--keep", type=Path, help="keep the logs and files of runs with a problem in this folder")
    parser.add_argument("--journal", type=Path, help="go on after the runs in this file, and add those that end")
    arguments = parser.parse_args()
    if os.geteuid():
        sys.exit("needs root, for network namespaces and mounts")
    mount_privately()
    named = {fault.name: fault for fault in FAULTS}
    kinds = tuple(named[name] for name in arguments.fault) if arguments.fault else FAULTS
    headings = {None: SECTION, DEATHS: DEATHS_SECTION} if arguments.faults > 1 else {}
    heading = headings.get(arguments.fault and tuple(arguments.fault))
    failed = False
    for strategy in [arguments.strategy] if arguments.strategy else STRATEGIES:
        with ended_by_sigterm(), tempfile.TemporaryDirectory() as folder:
            outcomes = soak(
                strategy, kinds, arguments.faults, arguments.minutes, arguments.first, Path(folder), arguments.keep,
                heading, Journal(arguments.journal),
            )  # fmt: skip
        failed = failed or any(outcome.problems for outcome in outcomes)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
