"""Sections `virtual` and `processes`: every strategy with four learners, on the virtual cluster and on one GPU."""

from __future__ import annotations

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asr_am.distributed.cluster_config import Workload
from asr_am.distributed.leases import LearnerLost
from asr_am.distributed.runtime.launcher import launch
from asr_am.train.simulate import train_virtually
from scripts.gpu_check.check import Check
from scripts.gpu_check.examples import EPOCHS, PDFS, STRATEGIES, cluster, small_examples, small_options
from scripts.gpu_check.killing import KILLED

LEARNERS = 4
AT_ONCE = 3  # teams of processes
WORKLOAD = Workload("gpu_check", seconds_per_batch={"cuda": 0.1})
LOST = 15.0  # seconds in which a team must end after one of its learners was killed


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
    """Runs teams of processes that share the GPU. In two of them a learner is killed: one team goes on, one ends."""
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
    synchronous = strategy not in ("adpsgd", "ps_async", "psp")
    command = [
        sys.executable,
        "-m",
        "scripts.gpu_check.worker",
        check.device,
        strategy,
        str(egs),
        str(out),
        str(killed),
    ]
    begin, died = time.monotonic(), ""
    try:
        launch(command, learners, synchronous=synchronous, restart_after=0.1, env={"OMP_NUM_THREADS": "1"})
    except LearnerLost as error:
        died = str(error)
    took = f"{time.monotonic() - begin:.0f} s"
    if not (killed and synchronous):
        add_losses(check, title, out, f", {took}, {died or 'all ended well'}")
        return
    waited = time.time() - (out / KILLED).stat().st_mtime if (out / KILLED).exists() else math.inf
    check.row(title, bool(died) and waited < LOST, f"the run ended {waited:.1f} s later", seconds=waited)


def add_losses(check: Check, title: str, out: Path, more: str = "") -> None:
    """Adds a row about a finished run, whose held-out loss must be well below that of guessing."""
    path = out / "summary.json"
    losses = json.loads(path.read_text("utf-8"))["heldout_loss"] if path.exists() else []
    passed = len(losses) == EPOCHS and losses[-1] < 0.9 * math.log(PDFS)
    check.row(title, passed, " -> ".join(f"{loss:.3f}" for loss in losses) + more, losses=losses)
