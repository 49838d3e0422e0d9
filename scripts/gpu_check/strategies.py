"""Sections `virtual`, `processes` and `mpi`: every strategy, with four virtual learners and four processes on a GPU."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.leases import LearnerLost
from asr_am.distributed.runtime.launcher import launch
from asr_am.train.simulate import train_virtually
from scripts.gpu_check.check import Check
from scripts.gpu_check.examples import ASYNCHRONOUS, EPOCHS, PDFS, STRATEGIES, cluster, small_examples, small_options

LEARNERS = 4
AT_ONCE = 4  # teams of processes
WORKLOAD = Workload("gpu_check", seconds_per_batch={"cuda": 0.1})


def virtual(check: Check) -> None:
    egs = small_examples(check)
    for name in ("adpsgd",) if check.small else STRATEGIES:
        out = check.folder / name
        train_virtually(
            egs, out, small_options(check), learners=LEARNERS, cluster=cluster(), workload=WORKLOAD,
            strategy=STRATEGIES[name],
        )  # fmt: skip
        add_losses(check, f"{name}, {LEARNERS} virtual learners", out)


def processes(check: Check) -> None:
    """Runs teams of processes that share the GPU. In two of them a learner is killed and started again."""
    egs = small_examples(check)
    teams = [(name, False) for name in STRATEGIES] + [("adpsgd", True), ("sync", True)]
    if check.small:
        teams = [("sync", True)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for work in [pool.submit(run_team, check, egs, *chosen) for chosen in teams]:
            work.result()


def run_team(check: Check, egs: Path, strategy: str, killed: bool) -> None:
    """Trains with one team of processes."""
    learners = 2 if check.small else LEARNERS
    title = f"{strategy}, {learners} processes" + (", one killed" if killed else "")
    out = check.folder / title.replace(", ", "-").replace(" ", "-")
    command = worker(check, strategy, egs, out, killed)
    begin, ended = time.monotonic(), "all ended well"
    try:
        launch(
            command, learners, synchronous=strategy not in ASYNCHRONOUS, together=strategy == "ps_sync",
            restart_after=0.1, env={"OMP_NUM_THREADS": "1"}, fork=True,
        )  # fmt: skip
    except LearnerLost as error:
        ended = str(error)
    add_losses(check, title, out, f", {time.monotonic() - begin:.0f} s, {ended}")


def mpi(check: Check) -> None:
    """Runs teams that mpirun starts, if there is one."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        check.row("mpirun", None, "there is none")
        return
    egs, learners = small_examples(check), 2 if check.small else LEARNERS
    environment = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for name in ("sync",) if check.small else ("sync", "adpsgd", "bmuf"):
        out = check.folder / name
        command = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(learners), *worker(check, name, egs, out)]
        begin = time.monotonic()
        status = subprocess.run(command, env=os.environ | environment).returncode
        add_losses(
            check, f"{name}, {learners} processes", out, f", {time.monotonic() - begin:.0f} s, exit status {status}"
        )


def worker(check: Check, strategy: str, egs: Path, out: Path, killed: bool = False) -> list[str]:
    """Returns the command of one learner."""
    module = [sys.executable, "-m", "scripts.gpu_check.worker"]
    return [*module, check.device, strategy, str(egs), str(out), str(killed)]


def add_losses(check: Check, title: str, out: Path, more: str = "") -> None:
    """Adds a row about a finished run, whose held-out loss must be well below that of guessing."""
    path = out / "summary.json"
    losses = json.loads(path.read_text("utf-8"))["heldout_loss"] if path.exists() else []
    passed = len(losses) == EPOCHS and losses[-1] < 0.9 * math.log(PDFS)
    check.row(title, passed, " -> ".join(f"{loss:.3f}" for loss in losses) + more, losses=losses)
