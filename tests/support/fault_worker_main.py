"""One learner of a real team that dies at chosen moments: python -m tests.support.fault_worker_main ARGUMENTS.

ARGUMENTS are STRATEGY EGS OUT FAULTS [EPOCHS].
FAULTS is a JSON list of [rank, incarnation, moment, number]: the learner kills itself with SIGKILL in that call of the
moment, counted from 1. In the moment `preempted` it sends itself SIGUSR1 in that gradient.

In the folder NOTES of the environment it notes itself as `<rank>`, its start as a line of `starts`, and the time of
each step in `steps`, as a float64.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from asr_am.distributed.param_server.server import ParameterServer
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.preemption import noting
from asr_am.distributed.runtime.worker_process import end_process
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.diloco import Diloco
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.powersgd import Powersgd
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.psp import Psp
from asr_am.distributed.strategies.slowmo import Slowmo
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategies.topk import Topk
from asr_am.egs.loader import load_compiled
from asr_am.parallax.strategy import Parallax
from asr_am.stages.train_worker import report_failure
from asr_am.train import trainer
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.gradient import ModelState
from asr_am.train.run_setup import StrategyFactory
from asr_am.train.schedule import Anneal
from asr_am.train.step_reports import StepReports
from asr_am.train.trainer import Trainer, train
from tests.support.toy_runs import OPTIONS
from tests.support.train_worker_main import die_in

STRATEGIES: dict[str, StrategyFactory] = {
    "adpsgd": partial(Adpsgd, timeout=5.0),
    "ps_async": partial(PsAsync, staleness_aware=True, servers=2, timeout=5.0),  # beside learners 0 and 2
    "psp": partial(Psp, servers=2, timeout=5.0, c=3, b=0.5),
    "sync": Sync, "hybrid": Hybrid, "dpsgd": Dpsgd, "ps_sync": partial(PsSync, servers=2, timeout=5.0),
    "gtc": partial(Gtc, threshold=0.01), "bmuf": partial(Bmuf, block_size=2), "diloco": partial(Diloco, block_size=2),
    "htm": partial(Htm, group_size=2, threshold=0.01, block_size=2), "slowmo": partial(Slowmo, block_size=2),
    "powersgd": partial(Powersgd, rank=2), "topk": partial(Topk, density=0.2), "parallax": Parallax,
}  # fmt: skip
MOMENTS: dict[str, tuple[type, str]] = {
    "gradient": (ModelState, "backward"), "preempted": (ModelState, "backward"),
    "update": (ParameterServer, "update"), "validate": (Trainer, "_validate"),
    "save": (Checkpoints, "save_learner"), "commit": (Checkpoints, "commit"), "publish": (Checkpoints, "publish"),
}  # fmt: skip
RATES = {"bmuf": 0.01, "diloco": 0.005}  # learning rates. At 0.03 these overshoot, and no two runs are alike


def prepare(*_: str) -> None:
    """Prepares what learners need, in the process that forks them."""
    import_module("torch._dynamo")
    load_compiled()


def note(folder: Path) -> None:
    """Notes this learner, and its steps from now on."""
    rank = os.environ["RANK"]
    with (folder / "starts").open("a", encoding="utf-8") as file:
        file.write(f"{rank}\n")
    (folder / f".{rank}").write_text(str(os.getpid()), encoding="utf-8")
    (folder / f".{rank}").rename(folder / rank)
    steps, real = os.open(folder / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT), StepReports.show

    def show(self: Any, batches: int) -> None:
        os.write(steps, struct.pack("d", time.monotonic()))
        real(self, batches)

    StepReports.show = show  # type: ignore[method-assign]


def main() -> None:
    if "NOTES" in os.environ:
        note(Path(os.environ["NOTES"]))
    strategy, egs_dir, out, faults = sys.argv[1:5]
    epochs = int(sys.argv[5]) if len(sys.argv) > 5 else OPTIONS.epochs
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    for rank, incarnation, moment, number in json.loads(faults):
        if [os.environ["RANK"], os.environ["ASR_AM_INCARNATION"]] == [str(rank), str(incarnation)]:
            die_in(*MOMENTS[moment], number, "preempt" if moment == "preempted" else "kill")
        if moment == "preempted":
            trainer.CHECK_SECONDS = 0.0  # after each step: this training may be over within a second
    options = replace(OPTIONS, epochs=epochs, schedule=Anneal(base=RATES.get(strategy, 0.03)))
    try:
        with noting(("USR1",)):
            train(Path(egs_dir), Path(out), options, strategy=STRATEGIES[strategy], team=connect())
    except Exception as error:
        end_process(report_failure(error, os.environ["RANK"], Path(out)))
    end_process()


if __name__ == "__main__":
    main()
