"""Training runs of a small recurrent LM on sentences that no trigram can predict."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.team import SingleProcess
from asr_am.models.lstm_lm import LstmLmOptions
from asr_am.parallax.strategy import Parallax
from asr_am.train.lm import HeldOutText, LmOptions, LmRun
from asr_am.train.lm_text import read_text
from asr_am.train.run_setup import StrategyFactory
from asr_am.train.simulate import simulate_run
from asr_am.train.tracking import NoTracker, Tracker
from asr_am.train.trainer import train_run
from tests.support.toy_runs import cluster

LETTERS = "ABCDEFGH"
WORDS = [*LETTERS, "<unk>"]
OPTIONS = LmOptions(
    model=LstmLmOptions(embedding=12, cells=24, projection=12), epochs=8, batch_size=8, rate=0.03, report_every=5,
    checkpoint_every=7,
)  # fmt: skip
ADAGRAD = replace(OPTIONS, epochs=1, optimizer="adagrad", rate=0.1, accumulator=1e-4)


def sentences(count: int, seed: int) -> list[list[str]]:
    """Makes sentences whose last word repeats the first, four words before."""
    rng = np.random.default_rng(seed)
    return [
        [first, *("E" if rng.random() < 0.5 else "F" for _ in range(3)), first]
        for first in ("ABCD"[rng.integers(4)] for _ in range(count))
    ]


DEV = HeldOutText(sentences(40, 2), WORDS)


def write_text(folder: Path) -> Path:
    """Writes the training text. Learners that start together write the same file, and none may read it half-written."""
    path = folder / "text.txt"
    temporary = folder / f"text.{os.getpid()}.{threading.get_ident()}.tmp"
    temporary.write_text("".join(" ".join(sentence) + "\n" for sentence in sentences(160, 1)))
    temporary.replace(path)
    return path


def make_run(
    folder: Path, options: LmOptions = OPTIONS, strategy: StrategyFactory = Local, *, learners: int = 1,
    tracker: Tracker | None = None, kind: str = "word",
) -> LmRun:  # fmt: skip
    folder.mkdir(exist_ok=True)
    units, text = read_text(write_text(folder.parent), WORDS, options.longest, kind=kind, pieces=9)  # type: ignore[arg-type]
    return LmRun(folder, options, units, text, DEV, strategy, learners=learners, tracker=tracker)


def train_alone(folder: Path, options: LmOptions = OPTIONS, strategy: StrategyFactory = Local, **more: Any) -> LmRun:
    train_run(run := make_run(folder, options, strategy, **more), SingleProcess())
    return run


def train_on_team(
    folder: Path, options: LmOptions = OPTIONS, strategy: StrategyFactory = Parallax, hardware: Cluster | None = None,
    **more: Any,
) -> LmRun:  # fmt: skip
    """Trains with four virtual learners on two hosts."""
    run = make_run(folder, options, strategy, learners=4, **more)
    simulate_run(run, hardware or cluster(), Workload("test", seconds_per_batch={"cpu": 1.0}))
    return run


class Killed(Exception):
    pass


class Killer(NoTracker):
    """Ends the training at the given record."""

    def __init__(self, records: int) -> None:
        self.records = records

    def log(self, record: Mapping[str, Any], step: int) -> None:
        self.records -= 1
        if self.records == 0:
            raise Killed
