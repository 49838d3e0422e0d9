"""Kills every stage of a tiny recipe at random moments: `python -m tests.support.recipe_kills [KILLS]`.

A first run of the recipe, which nobody disturbs, leaves a copy of its exp before and after each stage. A second one
shows which files and fields differ without a kill, such as dates. Then each stage is started again and again from the
state before it, by the same command, and killed with SIGKILL after a random part of its usual time. Half of the kills
hit the whole process group, the others the stage's process only. After a few kills the command is left to finish, and
all files must be those of the undisturbed run. Writes a line per stage to FILE (scripts/bench/STAGE_KILLS.md).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asr_am.distributed.runtime.worker_process import ended_by_sigterm
from asr_am.stages.target import git_commit
from tests.support.forked_workers import FORK_SERVER, PRELOADED, ForkedPopen

STAGES = ("data", "lang", "features", "align", "speaker", "egs", "train", "decode", "rescore", "score", "report")
TINY = [
    "corpus=minicts", "nj=2", "rescore=true", "lm.train.epochs=1", "corpus.hours=0.06", "corpus.speakers=6",
    "corpus.test_words=100", "train.threads=1", "align.mono.iterations=4", "align.tri.iterations=3",
    "align.tri.realign=[2]", "align.tri.increase_until=2", "align.tri.leaves=100", "align.tri.gaussians=400",
    "speaker.first_beam=6", "speaker.search.beam=6", "speaker.search.lattice_beam=3", "ivectors.gaussians=16",
    "ivectors.dim=8", "model.layers=1", "model.cells=24", "model.dropout=0", "train.epochs=3",
    "train.checkpoint_every=5", "schedule.warmup_batches=5", "schedule.base=0.01", "logger=none",
    "systems=[mono,sat,nnet]", "decode.search.beam=6", "decode.search.lattice_beam=3", "decode.lm_weights=[8,12]",
]  # fmt: skip
MOST = 6  # kills before a command is left to finish
LIMIT = 600.0  # seconds after which a stage counts as hanging
OTHER_WORDS = ("date", "seconds", "commit", "frames_per_second", "rss", "inputs")  # parts of names of JSON fields
HEAD = [
    "| stage | kills | resumed runs | equal | seconds | not compared | commit | date |",
    "|:--|--:|--:|--:|--:|:--|:--|:--|",
]


def start(stage: str, exp: Path, log: Path) -> ForkedPopen:
    """Starts a stage in a session of its own, from a process that has imported what stages need."""
    command = [sys.executable, "-m", f"asr_am.stages.{stage}", "--multirun", f"exp={exp}", *TINY]
    with log.open("ab") as file:
        saved = os.dup(1), os.dup(2)
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            return ForkedPopen(command, {**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
        finally:
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def finish(stage: str, exp: Path, log: Path) -> float:
    """Runs a stage to its end. Returns its seconds. Raises SystemExit if it fails or hangs."""
    begin = time.monotonic()
    process = start(stage, exp, log)
    try:
        status = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        kill(process, whole_group=True)
        status = "no end"
    if status != 0:
        raise SystemExit(f"stage {stage}: {status}\n{log.read_text(errors='replace')[-2000:]}")
    return time.monotonic() - begin


def kill(process: ForkedPopen, whole_group: bool) -> None:
    with suppress(ProcessLookupError):
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    process.wait()


def read_files(exp: Path) -> dict[str, bytes]:
    """Returns the content of all files but logs, with fields of JSON left out that differ from run to run."""
    found = {}
    for path in sorted(exp.rglob("*")):
        name = str(path.relative_to(exp))
        if path.is_file() and "/log/" not in name and not path.name.endswith(".lock"):
            found[name] = _content(path)
    return found


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        lines = [content] if path.suffix != ".jsonl" else content.splitlines()
        return json.dumps([_timeless(json.loads(line)) for line in lines]).encode()
    except ValueError:
        return content


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not any(word in k for word in OTHER_WORDS)}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


@dataclass
class Result:
    """What the kills of one stage gave.

    Attributes:
        kills: stages that ended by SIGKILL before they had finished.
        resumed: runs that were killed some times, and then finished by the same command.
        equal: those of them whose files are those of the undisturbed run.
        different: names of files that were not, in any run.
    """

    kills: int = 0
    resumed: int = 0
    equal: int = 0
    different: set[str] = field(default_factory=set)


def kill_often(stage: str, kills: int, folder: Path, seconds: float, varying: set[str], rng: random.Random) -> Result:
    """Kills a stage `kills` times, and compares what it has made in the end.

    Args:
        stage: name of the stage.
        kills: number of kills.
        folder: has the states before and after each stage.
        seconds: usual time of the stage.
        varying: files that differ between undisturbed runs.
        rng: chooses the moments.
    """
    result, exp, log = Result(), folder / "exp", folder / f"{stage}.log"
    number = STAGES.index(stage)
    expected = read_files(folder / f"state{number + 1}")
    while result.kills < kills:
        restore(folder / f"state{number}", exp)
        for _ in range(min(rng.randint(1, MOST), kills - result.kills)):
            process = start(stage, exp, log)
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, seconds))
            if process.poll() is not None:
                break
            kill(process, whole_group=rng.random() < 0.5)
            result.kills += 1
        finish(stage, exp, log)
        found = read_files(exp)
        different = {n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)} - varying
        result.resumed += 1
        result.equal += not different
        result.different |= different
    return result


def restore(state: Path, exp: Path) -> None:
    shutil.rmtree(exp, ignore_errors=True)
    shutil.copytree(state, exp)  # with the times of files


def undisturbed(folder: Path, stages: Sequence[str]) -> list[float]:
    """Runs the recipe in `folder`/exp. Keeps the state before and after each stage, and returns their seconds.

    Args:
        folder: for exp and its states.
        stages: the first stages of the recipe.
    """
    exp, log = folder / "exp", folder / "undisturbed.log"
    exp.mkdir()
    seconds = []
    for number, stage in enumerate(stages):
        shutil.copytree(exp, folder / f"state{number}")
        seconds.append(finish(stage, exp, log))
        print(f"{stage}: {seconds[-1]:.1f} s undisturbed", flush=True)
    shutil.copytree(exp, folder / f"state{len(stages)}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.recipe_kills", description=__doc__.split("\n")[0])
    parser.add_argument("kills", type=int, nargs="?", default=50, help="kills per stage (default: 50)")
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    FORK_SERVER.set_forkserver_preload([*PRELOADED, *(f"asr_am.stages.{stage}" for stage in STAGES), "lhotse"])
    rows: dict[str, str] = {}
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = arguments.stage or STAGES
        needed = STAGES[: 1 + max(map(STAGES.index, chosen))]
        seconds = undisturbed(folder, needed)
        varying = varying_files(folder, needed)
        for stage in chosen:
            rng = random.Random(f"{stage} {arguments.seed}")
            number = STAGES.index(stage)
            result = kill_often(stage, arguments.kills, folder, seconds[number], varying, rng)
            own = sorted(n for n in varying if n not in read_files(folder / f"state{number}"))
            cells = [
                f"{number} {stage}", result.kills, result.resumed, result.equal, f"{seconds[number]:.1f}",
                ", ".join(own) or "-", git_commit(), datetime.date.today(),
            ]  # fmt: skip
            rows[stage] = f"| {' | '.join(map(str, cells))} |"
            print(rows[stage], *(f"  differs: {name}" for name in sorted(result.different)), sep="\n", flush=True)
            if arguments.out:
                text = [
                    "# Stages that were killed",
                    "",
                    f"Written by `{parser.prog} {arguments.kills} --out FILE`.",
                    "",
                ]
                arguments.out.write_text("\n".join([*text, *HEAD, *rows.values()]) + "\n")
    return 0


def varying_files(folder: Path, stages: Sequence[str]) -> set[str]:
    """Runs the recipe once more at the same place. Returns the files that differ from the first run.

    Args:
        folder: has exp and its states.
        stages: the first stages of the recipe.
    """
    first = read_files(folder / f"state{len(stages)}")
    shutil.rmtree(folder / "exp")
    (folder / "exp").mkdir()
    for stage in stages:
        finish(stage, folder / "exp", folder / "undisturbed.log")
    second = read_files(folder / "exp")
    return {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}


if __name__ == "__main__":
    sys.exit(main())
