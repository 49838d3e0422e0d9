"""Compares speed-ups of Ladkat et al. (2019), Tables 1 and 2, with the virtual cluster.

    python scripts/bench/htm_tables.py [--jobs N] [--json FILE] [--steps N] [cluster.nic_bandwidth=1e9 ...]

The strategies' own code runs complete blocks on conf/cluster/aws_p3.yaml with conf/workload/htm_lstm.yaml. GTC gets
gradients of which 1 % exceed the threshold ("reducing total update size by a couple of orders of magnitude", section
2.1). A speed-up is relative to the computing time of the batches on one GPU. Exits with 1 if a value of BMUF or HTM is
more than 15 % off, or if GTC does not rise to 32 GPUs and fall at 64 and 128.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import published
import torch
from omegaconf import DictConfig
from published import Row

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator.epoch_timing import time_epoch
from asr_am.errors import InputError
from asr_am.parallel import parallel_map
from asr_am.stages.app import values
from asr_am.stages.train_config import strategy_factory

TOLERANCE = 0.15
DENSITY = 0.01  # of GTC's messages
ELEMENTS = 1000  # of the vector that stands for the model
GTC_STEPS = 30


@dataclass(frozen=True)
class Cell:
    """A published speed-up. `block` is in steps, 0 for GTC."""

    strategy: str
    learners: int
    block: int
    speed_up: float

    def __str__(self) -> str:
        block = f" block {self.block:3}" if self.block else ""
        return f"{self.strategy:4} {self.learners:3} GPUs{block}"


TABLE_1 = (
    Cell("gtc", 16, 0, 12.5), Cell("gtc", 32, 0, 23.5), Cell("gtc", 64, 0, 21.7), Cell("gtc", 128, 0, 10.9),
    Cell("bmuf", 16, 50, 15.7), Cell("bmuf", 32, 50, 28.1), Cell("bmuf", 64, 50, 58.2), Cell("bmuf", 128, 50, 101.5),
    Cell("htm", 16, 50, 13.9), Cell("htm", 32, 50, 24.2), Cell("htm", 64, 50, 49.2), Cell("htm", 128, 50, 97.8),
)  # fmt: skip
TABLE_2 = (
    Cell("bmuf", 128, 25, 91.3), Cell("bmuf", 128, 100, 106.5), Cell("bmuf", 128, 200, 110.3),
    Cell("htm", 128, 25, 77.9), Cell("htm", 128, 100, 99.6), Cell("htm", 128, 200, 105.5),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Hardware, workload and strategy of a cell, from conf/. `steps` is the least number to run, `overrides` are
    Hydra's.
    """

    cell: Cell
    steps: int
    overrides: tuple[str, ...]

    def config(self) -> DictConfig:
        """Composes the configuration. Raises InputError for invalid overrides."""
        cell = self.cell
        options = [f"strategy.block_size={cell.block}"] if cell.block else []
        options += [] if cell.strategy == "bmuf" else ["strategy.density=null"]
        groups = ["cluster=aws_p3", "workload=htm_lstm", f"strategy={cell.strategy}"]
        return published.config([*groups, *options], self.overrides)


def speed_up(setting: Setting) -> float:
    """Returns frames/s relative to one GPU, and logs it to stderr."""
    begin = time.monotonic()
    torch.set_num_threads(1)
    cell, config = setting.cell, setting.config()
    strategy = strategy_factory(values(config.strategy))
    hardware, workload = Cluster.build(values(config.cluster)), Workload.build(values(config.workload))
    steps = -(-setting.steps // cell.block) * cell.block if cell.block else GTC_STEPS
    batches = steps * cell.learners
    epoch = time_epoch(
        strategy, hardware, workload, learners=cell.learners, batches=batches, elements=ELEMENTS, density=DENSITY
    )
    found = batches * workload.seconds(hardware.device, 1, 1) / epoch.seconds
    print(f"{cell}: {found:.1f} ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
    return found


def measure(cells: Sequence[Cell], steps: int, overrides: Sequence[str], jobs: int) -> dict[Cell, float]:
    settings = [Setting(cell, steps, tuple(overrides)) for cell in cells]
    long_first = sorted(settings, key=lambda s: -s.cell.learners * max(s.cell.block, s.steps))
    found = dict(zip(long_first, parallel_map(speed_up, long_first, jobs, "cells"), strict=True))
    return {setting.cell: found[setting] for setting in settings}


def shape_of_gtc(found: dict[Cell, float]) -> list[str]:
    """Returns messages about violations of GTC's trend."""
    gtc = {cell.learners: ours for cell, ours in found.items() if cell.strategy == "gtc"}
    holds = gtc[16] < gtc[32] > gtc[64] > gtc[128]
    return [] if holds else [f"gtc does not rise to 32 GPUs and fall at 64 and 128: {gtc}"]


def main() -> None:
    parser = published.parser(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="steps of BMUF and HTM, rounded up to complete blocks")
    arguments = parser.parse_args()
    try:
        found = measure([*TABLE_1, *TABLE_2], arguments.steps, arguments.overrides, arguments.jobs)
    except InputError as error:
        sys.exit(f"htm_tables.py: {error}")
    rows = {cell: Row(str(cell), cell.speed_up, ours) for cell, ours in found.items()}
    published.show("Table 1, speed-up in frames/s", [rows[cell] for cell in TABLE_1], 1)
    published.show("Table 2, speed-up in frames/s", [rows[cell] for cell in TABLE_2], 1)
    published.count(list(rows.values()), published.fitted("cluster/aws_p3", "workload/htm_lstm"))
    published.keep(arguments, list(rows.values()))
    bounded = [row for cell, row in rows.items() if cell.strategy != "gtc"]
    published.judge(bounded, TOLERANCE, shape_of_gtc(found))


if __name__ == "__main__":
    main()
