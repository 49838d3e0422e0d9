"""Kills processes of MPI at random, under every strategy: `python -m scripts.soak.mpi_kills [KILLS=50]`.

Needs the extra mpi, and Open MPI 5. Each run trains a small network with four learners and up to two spares. One or
two of its processes, but for the first, are killed (SIGKILL) at random times. The others must go on to the end, as a
smaller team where there is no spare left, with the right history (`asr_am.train.audit`). The held-out loss is compared
with that of a run without kills. Prints a line per run.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from asr_am.data.record import read_record
from asr_am.errors import InputError
from asr_am.stages.recipe_files import ROOT
from asr_am.train.audit import audit
from scripts.soak.process_faults import STRATEGIES
from scripts.soak.results import record
from tests.support.egs_examples import write_examples
from tests.support.mpirun import ENVIRONMENT, ULFM, mpirun_command

SECTION = "Processes of MPI that were killed"
LEARNERS = 4
STAGE = (
    "-m", "asr_am.stages", "train", "corpus=minicts", "launcher=mpi", f"learners={LEARNERS}", "model.layers=1",
    "model.cells=8", "train.batch_size=24", "train.epochs=60", "train.threads=1", "train.device=cpu", "logger=none",
    "run=run",
)  # fmt: skip
GROUPS = {"htm": ["strategy.group_size=2"]}
LIMIT = 150.0  # seconds of a run
BEGUN = 200  # bytes of metrics.jsonl
LEAST = 2  # processes that a kill leaves
TOLERANCE = 0.05  # of the held-out loss


@dataclass
class Outcome:
    """What a run gave. `steps_kept` counts the times that survivors had saved their state."""

    kills: int = 0
    spares: int = 0
    teams: list[int] = field(default_factory=list)
    steps_kept: int = 0
    loss: float = math.nan
    problems: list[str] = field(default_factory=list)


class MpiRun:
    """A training by mpirun in a folder of its own, which has the examples."""

    def __init__(self, folder: Path, strategy: str, spares: int) -> None:
        examples = folder / "minicts/egs/fmllr+logmel-sat"
        examples.parent.mkdir(parents=True)
        write_examples(examples, frames_U=(60,) * 24)
        self.out, self.log, self._mark = folder / "minicts/train/run", folder / "log", f"exp={folder}"
        stage = [*STAGE, f"strategy={strategy}", *GROUPS.get(strategy, []), self._mark]
        command = mpirun_command(LEARNERS + spares, sys.executable, *stage, options=ULFM)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, cwd=ROOT, stdout=log, stderr=log)

    def wait(self, seconds: float) -> int | None:
        """Waits for the end, at most so long. Returns mpirun's status, or None."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def wait_for_begin(self) -> None:
        """Waits for the first steps."""
        metrics, end = self.out / "metrics.jsonl", time.monotonic() + LIMIT
        while not metrics.exists() or metrics.stat().st_size < BEGUN:
            if self.wait(0.02) is not None or time.monotonic() > end:
                return

    def processes(self) -> dict[int, int]:
        """Returns the process id of each MPI process that lives, by its rank in COMM_WORLD."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "cmdline").read_bytes():
                    rank = re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", (folder / "environ").read_bytes())
                    found |= {int(rank[1]): int(folder.name)} if rank else {}
            except OSError:
                continue  # it has just ended
        return found

    def end(self) -> None:
        """Kills what is left."""
        for pid in self.processes().values():
            kill(pid)
        self._process.kill()
        self._process.wait()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)


def train(folder: Path, strategy: str, seed: int, kills: int) -> Outcome:
    """Trains with some kills."""
    rng = random.Random(f"{strategy} {seed}")
    outcome = Outcome(spares=rng.randrange(3) if kills else 0)
    mpi = MpiRun(folder, strategy, outcome.spares)
    try:
        mpi.wait_for_begin()
        for _ in range(kills):
            if mpi.wait(rng.uniform(0.05, 2.5)) is not None:
                break
            others = [pid for rank, pid in sorted(mpi.processes().items()) if rank > 0]
            if len(others) >= LEAST:
                kill(rng.choice(others))
                outcome.kills += 1
        status = mpi.wait(LIMIT)
    finally:
        mpi.end()
    if status != 0:
        outcome.problems.append("hangs" if status is None else f"status {status}")
        return outcome
    outcome.steps_kept = mpi.log.read_text(encoding="utf-8").count("have saved their state after")
    try:
        summary = read_record(mpi.out / "summary.json")
        outcome.teams = [team["learners"] for team in summary["teams"]]
        outcome.loss = summary["heldout_loss"][-1]
        outcome.problems += audit(mpi.out).problems
    except InputError as error:
        outcome.problems.append(str(error))
    return outcome


def run(strategy: str, seed: int, kills: int, undisturbed: float, keep: Path | None) -> Outcome:
    """Does `train`, compares the held-out loss, and prints what was found."""
    with tempfile.TemporaryDirectory(prefix="mpi_kills-") as folder:
        outcome = train(Path(folder), strategy, seed, kills)
        change = outcome.loss / undisturbed - 1
        if change > TOLERANCE:
            outcome.problems.append(f"held-out loss {change:+.1%}")
        print(f"{strategy} {seed}: {outcome}", flush=True)
        if outcome.problems and keep:
            shutil.copytree(folder, keep / f"{strategy}-{seed}")
    return outcome


def soak(strategy: str, kills: int, first: int, keep: Path | None) -> bool:
    """Kills so many processes of runs of a strategy, and records a row. Returns True if there was a problem."""
    undisturbed = run(strategy, first, 0, math.inf, keep)
    if undisturbed.problems:
        return True
    outcomes: list[Outcome] = []
    while sum(outcome.kills for outcome in outcomes) < kills and len(outcomes) < 2 * kills:
        seed = first + len(outcomes)
        outcomes.append(run(strategy, seed, 1 + seed % 2, undisturbed.loss, keep))
    changes = [100 * (outcome.loss / undisturbed.loss - 1) for outcome in outcomes if not math.isnan(outcome.loss)]
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    record(SECTION, strategy, {
        "kills": sum(outcome.kills for outcome in outcomes), "runs": len(outcomes), "with a problem": failed,
        "smaller teams": sum(len(outcome.teams) > 1 for outcome in outcomes),
        "steps kept": sum(outcome.steps_kept for outcome in outcomes),
        "held-out loss": f"{min(changes, default=math.nan):+.1f} to {max(changes, default=math.nan):+.1f} %",
    })  # fmt: skip
    return failed > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=50, help="kills per strategy (default: 50)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run (default: 0)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="test only this strategy")
    parser.add_argument("--keep", type=Path, help="keep the logs and files of runs with a problem in this folder")
    options = parser.parse_args()
    if shutil.which("mpirun") is None:
        sys.exit("needs mpirun and mpi4py: install '.[mpi]'")
    names = [options.strategy] if options.strategy else STRATEGIES
    return int(any([soak(name, options.kills, options.first, options.keep) for name in names]))


if __name__ == "__main__":
    sys.exit(main())
