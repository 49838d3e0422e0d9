"""Compares our accuracy with Ladkat et al. (2019), Tables 1 to 3.

    python scripts/bench/htm_errors.py [--blocks 1,2,3,6] exp/minicts/train/{htm-local,htm16-*,htm32-*,htm64-*,htm128-*}

The paper has relative reductions of word error rate, we have the held-out frame error of runs with
conf/experiment/htm.yaml. Both are in percent of one learner's, negative is worse. A run counts with its best epoch,
several seeds with their mean.

"held": methods are tuned once, on 16 learners by held-out loss, and keep their learning rate, as in section 4.1 of the
paper. That is the rate of the sum of all gradients. The rate here is of their mean, so it grows with the learners of
gtc and of a group of htm. "best": the best of all rates tried.

Exits with 1 unless, on 128 learners with held rates, HTM loses least and GTC most, and HTM loses less than BMUF at
every block size.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from asr_am.errors import InputError
from asr_am.report.runs import TrainingRun, read_training_run

TUNED_ON = 16  # learners
BLOCKS = (25, 50, 100, 200)  # the paper's: 37, 18, 9 and 5 per epoch


@dataclass(frozen=True)
class Cell:
    """Cell of a table. `block` and `group` are the paper's sizes, 0 if there are none."""

    method: str
    learners: int
    block: int = 0
    group: int = 0

    def __str__(self) -> str:
        block, group = f" block {self.block:3}" * (self.block > 0), f" group {self.group}" * (self.group > 0)
        return f"{self.method:4} {self.learners:3}{block}{group}"


@dataclass(frozen=True)
class Trial:
    """A run and its cell in the tables."""

    cell: Cell
    run: TrainingRun

    @classmethod
    def of(cls, run: TrainingRun, blocks: Mapping[str, int]) -> Trial:
        """Builds the trial of a run. `blocks` maps our block sizes to the paper's."""
        options = dict(run.config.options)
        block, group = blocks.get(options.get("block_size", ""), 0), int(options.get("group_size", "0"))
        return cls(Cell(run.config.strategy, run.config.learners, block, group), run)

    @property
    def frame_error(self) -> float:
        """Frame error in percent at the lowest held-out loss."""
        return self.run.frame_error_E[self.run.best_epoch - 1]

    @property
    def rate_of_sum(self) -> float:
        """Learning rate of the sum of the learners' gradients. schedule.base is that of their mean."""
        cell = self.cell
        return (self.run.config.rate or math.nan) / (cell.learners if cell.method == "gtc" else max(cell.group, 1))


TABLE_1 = {
    Cell("gtc", 16): 0.4, Cell("gtc", 32): -1.4, Cell("gtc", 64): -2.8, Cell("gtc", 128): -15.6,
    Cell("bmuf", 16, 50): -0.8, Cell("bmuf", 32, 50): -3.5, Cell("bmuf", 64, 50): -8.9, Cell("bmuf", 128, 50): -9.6,
    Cell("htm", 16, 50, 8): -0.5, Cell("htm", 32, 50, 8): 0.1, Cell("htm", 64, 50, 8): -3.2,
    Cell("htm", 128, 50, 8): -4.7,
}  # fmt: skip
TABLE_2 = {
    Cell("bmuf", 128, 25): -8.1, Cell("bmuf", 128, 50): -9.6, Cell("bmuf", 128, 100): -13.7,
    Cell("bmuf", 128, 200): -16.6, Cell("htm", 128, 25, 8): -4.4, Cell("htm", 128, 50, 8): -4.7,
    Cell("htm", 128, 100, 8): -6.4, Cell("htm", 128, 200, 8): -7.5,
}  # fmt: skip
TABLE_3 = {  # group 1 is BMUF
    Cell("bmuf", 128, 25): -8.1, Cell("htm", 128, 25, 2): -7.9, Cell("htm", 128, 25, 4): -5.8,
    Cell("htm", 128, 25, 8): -4.4,
}  # fmt: skip


def by_rate(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Groups trials by rate, over seeds, the lowest mean held-out loss first."""
    groups: dict[float, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(round(trial.rate_of_sum, 6), []).append(trial)
    return sorted(groups.values(), key=lambda group: mean(trial.run.best_loss for trial in group))


def frame_error(trials: Sequence[Trial]) -> float:
    """Returns the frame error of the best rate, mean over seeds, percent."""
    return mean(trial.frame_error for trial in by_rate(trials)[0])


def tuned(trials: Sequence[Trial]) -> dict[str, float]:
    """Returns each method's rate of the sum, tuned on 16 learners."""
    tried: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.cell in TABLE_1 and trial.cell.learners == TUNED_ON:
            tried.setdefault(trial.cell.method, []).append(trial)
    return {method: by_rate(found)[0][0].rate_of_sum for method, found in tried.items()}


def show(title: str, table: Mapping[Cell, float], trials: Sequence[Trial], base: float) -> dict[Cell, float]:
    """Prints a table and returns our values with held rates."""
    print(f"{title:26} published    held    best  runs")
    held, rates = {}, tuned(trials)
    for cell, published in table.items():
        tried = [trial for trial in trials if trial.cell == cell]
        rate = rates.get(cell.method, math.nan)
        kept = [trial for trial in tried if math.isclose(trial.rate_of_sum, rate, rel_tol=0.01)]
        ours = [100 * (1 - frame_error(some) / base) if some else None for some in (kept, tried)]
        columns = " ".join("      –" if value is None else f"{value:+7.1f}" for value in ours)
        print(f"{cell!s:26} {published:+9.1f} {columns} {len(tried):5}")
        if ours[0] is not None:
            held[cell] = ours[0]
    return held


def as_published(held: Mapping[Cell, float]) -> bool:
    """Returns True if the order on 128 learners is the paper's. False if a method is missing."""
    methods = Cell("htm", 128, 50, 8), Cell("bmuf", 128, 50), Cell("gtc", 128)
    if any(cell not in held for cell in methods):
        return False
    htm, bmuf, gtc = (held[cell] for cell in methods)
    pairs = [(Cell("htm", 128, block, 8), Cell("bmuf", 128, block)) for block in BLOCKS]
    return htm > bmuf > gtc and all(held[a] > held[b] for a, b in pairs if a in held and b in held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = "the block sizes that stand for the paper's of 25, 50, 100 and 200, by the number of blocks in an epoch"
    parser.add_argument("--blocks", default="1,2,3,6", help=sizes)
    parser.add_argument("runs", nargs="+", type=Path, help="folders")
    options = parser.parse_args()
    ours = options.blocks.split(",")
    if len(ours) != len(BLOCKS):
        parser.error(f"--blocks {options.blocks}: give {len(BLOCKS)} sizes, as 1,2,3,6")
    blocks = dict(zip(ours, BLOCKS, strict=True))
    try:
        runs = [read_training_run(folder) for folder in options.runs]
    except InputError as problem:
        sys.exit(f"htm_errors.py: {problem}")
    trials = [Trial.of(run, blocks) for run in runs if run.epochs_done == run.config.epochs]
    alone = [trial for trial in trials if trial.cell.method == "local"]
    if not alone:
        sys.exit("htm_errors.py: no finished run of a single learner (strategy=local) among these")
    base = frame_error(alone)
    print(f"one learner: {base:.2f} % of the frames wrong")
    held: dict[Cell, float] = {}
    for number, table in enumerate((TABLE_1, TABLE_2, TABLE_3), 1):
        held |= show(f"Table {number}, percent", table, trials, base)
    print(f"order on 128 learners as published: {'yes' if as_published(held) else 'no'}")
    sys.exit(int(not as_published(held)))


if __name__ == "__main__":
    main()
