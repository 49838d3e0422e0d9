"""Kills every stage of a tiny recipe at random moments: `python -m scripts.soak.recipe_kills [KILLS]`.

A first run of the recipe, which nobody disturbs, leaves a copy of its exp before and after each stage. A second one
shows which files and fields differ without a kill, such as dates. Then each stage is started again and again from the
state before it, by the same command, and killed with SIGKILL after a random part of its usual time. Half of the kills
hit the whole process group, the others the stage's process only. After a few kills the command is left to finish, and
all files must be those of the undisturbed run. FOLDER keeps the undisturbed runs for the next command.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from asr_am.distributed.runtime.worker_process import ended_by_sigterm
from scripts.soak.results import record
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
NOT_COMPARED = ("/log/", ".lock", "/.key", "/.term-")  # logs, locks, hashes of sizes, marks that count launches
OTHER_WORDS = ("date", "seconds", "commit", "frames_per_second", "rss", "inputs")  # parts of names of such fields
SECTION = "Stages that were killed"


def start(stage: str, exp: Path, log: Path, *more: str) -> ForkedPopen:
    """Starts a stage in a session of its own, from a process that has imported what stages need."""
    command = [sys.executable, "-m", f"asr_am.stages.{stage}", "--multirun", f"exp={exp}", *TINY, *more]
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


class StageFailed(Exception):
    """A stage that nobody killed has failed or hangs."""


def finish(stage: str, exp: Path, log: Path, *more: str) -> float:
    """Runs a stage to its end, with overrides `more`. Returns its seconds. Raises StageFailed."""
    begin = time.monotonic()
    process = start(stage, exp, log, *more)
    try:
        status: int | str = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        kill(process, whole_group=True)
        status = "no end"
    if status != 0:
        raise StageFailed(f"stage {stage}: {status}\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}")
    return time.monotonic() - begin


def kill(process: ForkedPopen, whole_group: bool) -> None:
    with suppress(ProcessLookupError):
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    process.wait()


def read_files(exp: Path) -> dict[str, bytes]:
    """Returns the content of all files but NOT_COMPARED, with fields left out that differ from run to run."""
    found = {}
    for path in sorted(exp.rglob("*")):
        name = str(path.relative_to(exp))
        if path.is_file() and not any(part in name for part in NOT_COMPARED):
            found[name] = _content(path)
    return found


def _content(path: Path) -> bytes:
    if path.suffix == ".pt":
        return repr(_timeless(torch.load(path, map_location="cpu", weights_only=True))).encode()
    content = path.read_bytes()
    with suppress(OSError, EOFError, zlib.error):
        content = gzip.decompress(content) if path.suffix == ".gz" else content  # its head has the time
    try:
        lines = [content] if ".jsonl" not in path.suffixes else content.splitlines()
        return json.dumps([_timeless(json.loads(line)) for line in lines]).encode()
    except ValueError:
        return content


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not any(word in str(k) for word in OTHER_WORDS)}
    if isinstance(value, torch.Tensor):
        return value.dtype, hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return [_timeless(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass
class Result:
    """What the kills of one stage gave.

    Attributes:
        kills: stages that ended by SIGKILL before they had finished.
        resumed: runs that were killed some times, and then finished by the same command.
        equal: those of them whose files are those of the undisturbed run.
        different: names of files that were not, in any run.
        failures: what the others have said.
    """

    kills: int = 0
    resumed: int = 0
    equal: int = 0
    different: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)


def kill_often(stage: str, kills: int, folder: Path, seconds: float, varying: set[str], rng: random.Random) -> Result:
    """Kills a stage `kills` times, and compares what it has made in the end.

    Args:
        folder: has the states before and after each stage.
        varying: files that differ between undisturbed runs.
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
        result.resumed += 1
        try:
            finish(stage, exp, log)
        except StageFailed as error:
            result.failures.append(str(error))
            continue
        found = read_files(exp)
        different = {n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)} - varying
        result.equal += not different
        result.different |= different
    return result


def restore(state: Path, exp: Path) -> None:
    shutil.rmtree(exp, ignore_errors=True)
    shutil.copytree(state, exp)  # with the times of files


def undisturbed(folder: Path, stages: Sequence[str], *more: str) -> dict[str, float]:
    """Runs the recipe in `folder`/exp. Keeps the state before and after each stage, and returns their seconds."""
    exp, log = folder / "exp", folder / "undisturbed.log"
    exp.mkdir()
    seconds = {}
    for number, stage in enumerate(stages):
        shutil.copytree(exp, folder / f"state{number}")
        seconds[stage] = finish(stage, exp, log, *more)
        print(f"{stage}: {seconds[stage]:.1f} s undisturbed", flush=True)
    shutil.copytree(exp, folder / f"state{len(stages)}")
    return seconds


def varying_files(folder: Path, stages: Sequence[str], *more: str) -> list[str]:
    """Runs the recipe once more at the same place. Returns the files that differ from the first run."""
    first = read_files(folder / f"state{len(stages)}")
    shutil.rmtree(folder / "exp")
    (folder / "exp").mkdir()
    for stage in stages:
        finish(stage, folder / "exp", folder / "undisturbed.log", *more)
    second = read_files(folder / "exp")
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def prepare(folder: Path, stages: Sequence[str]) -> tuple[dict[str, float], set[str]]:
    """Runs the undisturbed recipe twice, unless `folder` has its states from an earlier command.

    Returns:
        The seconds of each stage, and the files that differ between undisturbed runs.
    """
    notes = folder / "undisturbed.json"
    if not notes.exists():
        folder.mkdir(parents=True, exist_ok=True)
        notes.write_text(json.dumps([undisturbed(folder, stages), varying_files(folder, stages)]))
    seconds, varying = json.loads(notes.read_text())
    if missing := set(stages) - seconds.keys():
        raise SystemExit(f"{folder}: has no undisturbed run of {', '.join(sorted(missing))}: give an empty folder")
    return seconds, set(varying)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak.recipe_kills", description=__doc__.split("\n")[0])
    parser.add_argument("kills", type=int, nargs="?", default=50, help="kills per stage (default: 50)")
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the undisturbed runs here, or take them from here")
    arguments = parser.parse_args()
    FORK_SERVER.set_forkserver_preload([*PRELOADED, *(f"asr_am.stages.{stage}" for stage in STAGES), "lhotse"])
    failed = False
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as name:
        folder = (arguments.folder or Path(name)).resolve()
        chosen = arguments.stage or STAGES
        seconds, varying = prepare(folder, STAGES if arguments.folder else STAGES[: 1 + max(map(STAGES.index, chosen))])
        for stage in chosen:
            rng = random.Random(f"{stage} {arguments.seed}")
            number = STAGES.index(stage)
            result = kill_often(stage, arguments.kills, folder, seconds[stage], varying, rng)
            before, after = (read_files(folder / f"state{n}").keys() for n in (number, number + 1))
            own = sorted(varying & (after - before))
            values = {
                "kills": result.kills, "resumed runs": result.resumed, "equal": result.equal,
                "seconds": f"{seconds[stage]:.1f}",
            }  # fmt: skip
            line = ", ".join(f"{kind} {count}" for kind, count in values.items())
            differs = [f"  differs: {name}" for name in sorted(result.different)]
            print(f"{number} {stage}: {line}; not compared: {', '.join(own) or '-'}", *differs, *result.failures,
                  sep="\n", flush=True)  # fmt: skip
            failed = failed or result.equal < result.resumed
            if arguments.kills > 1:
                record(SECTION, f"{number} {stage}", values)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
