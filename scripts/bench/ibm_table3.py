"""Compares hours per epoch of Zhang et al. (ICASSP 2019) with the virtual cluster.

    python scripts/bench/ibm_table3.py [--jobs N] [--json FILE] [--whole] [cluster.nic_bandwidth=1e9 ...]

Covers Table 3 (16 P100, one of them slowed, with the 16-GPU points of Fig. 5b from the text) and section 5.3 (32 V100).
The strategies' own code runs on conf/cluster/ibm_a.yaml and ibm_b.yaml with conf/workload/swb2000_lstm.yaml. Overrides
apply to both clusters. If all iterations are alike (synchronous, or nobody slow), a twentieth of the epoch is run,
unless
--whole. ADPSGD with a slow GPU runs a full epoch, because it ends with the slow GPU's last batch. The last row halves
the bandwidth of the network cards, and SYNC must slow down as computed. Exits with 1 if a value is more than 5 % off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import published
import torch
from omegaconf import DictConfig
from published import Row

from asr_am.distributed.cluster_config import Cluster, Faults, Workload
from asr_am.distributed.simulator.epoch_timing import time_epoch
from asr_am.distributed.simulator.network import ring_share
from asr_am.errors import InputError
from asr_am.parallel import parallel_map
from asr_am.stages.app import values
from asr_am.stages.train_config import strategy_factory

TOLERANCE = 0.05
CHUNKS = 720e6 / 21  # of an epoch
CHUNKS_PER_BATCH = {"ibm_a": 160, "ibm_b": 80}
SLOW_GPU = 5
SHARE = 1 / 20  # of an epoch, where all iterations are alike
EPOCHS = 16


@dataclass(frozen=True)
class Cell:
    """A published time per epoch and its ratio to one GPU. `slowdown` is that of one GPU."""

    cluster: str
    strategy: str
    slowdown: int
    hours: float
    speed_up: float

    def __str__(self) -> str:
        return f"{self.cluster} {self.strategy:6} {self.slowdown:3}x"


PUBLISHED = (
    Cell("ibm_a", "sync", 1, 1.09, 8.70),
    Cell("ibm_a", "sync", 2, 1.67, 5.71),
    Cell("ibm_a", "sync", 10, 6.24, 1.52),
    Cell("ibm_a", "sync", 100, 57.73, 0.16),
    Cell("ibm_a", "hybrid", 1, 1.03, 9.26),
    Cell("ibm_a", "hybrid", 2, 1.63, 5.83),
    Cell("ibm_a", "hybrid", 10, 6.46, 1.47),
    Cell("ibm_a", "hybrid", 100, 60.80, 0.16),
    Cell("ibm_a", "adpsgd", 1, 0.87, 10.88),
    Cell("ibm_a", "adpsgd", 2, 0.89, 10.63),
    Cell("ibm_a", "adpsgd", 10, 0.91, 10.42),
    Cell("ibm_a", "adpsgd", 100, 0.92, 10.38),
    Cell("ibm_b", "sync", 1, 0.75, 16.25),
    Cell("ibm_b", "hybrid", 1, 0.71, 17.17),
    Cell("ibm_b", "adpsgd", 1, 0.83, 14.69),
)
TRAINING_HOURS = {PUBLISHED[8]: 13.98, PUBLISHED[13]: 11.5}  # sections 5.2 and 5.3


@dataclass(frozen=True)
class Setting:
    """Hardware, workload and strategy of a cell, from conf/. `overrides` are Hydra's, from the command line."""

    cell: Cell
    overrides: tuple[str, ...]
    whole: bool

    def config(self) -> DictConfig:
        """Composes the configuration. Raises InputError for invalid overrides."""
        cell = self.cell
        form = ["strategy.form=weights"] if cell.strategy == "sync" else []  # the paper's SYNC
        groups = [f"cluster={cell.cluster}", "workload=swb2000_lstm", f"strategy={cell.strategy}"]
        return published.config([*groups, *form], self.overrides)

    def hardware(self) -> Cluster:
        cluster = Cluster.build(values(self.config().cluster))
        if self.cell.slowdown == 1:
            return cluster
        return replace(cluster, faults=Faults(slow={SLOW_GPU: float(self.cell.slowdown)}))

    def workload(self) -> Workload:
        return Workload.build(values(self.config().workload))

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return round(CHUNKS / CHUNKS_PER_BATCH[self.cell.cluster])

    def single_hours(self) -> float:
        """Hours of an epoch on one GPU, without communication."""
        hardware, workload = self.hardware(), self.workload()
        return self.batches * workload.seconds(hardware.device, 1, 1) / 3600


def epoch_hours(setting: Setting) -> float:
    """Returns virtual hours of an epoch, and logs them to stderr."""
    begin = time.monotonic()
    torch.set_num_threads(1)
    cell, hardware = setting.cell, setting.hardware()
    strategy = strategy_factory(values(setting.config().strategy))
    learners = hardware.devices
    rounds = -(-setting.batches // learners)
    alike = cell.slowdown == 1 or strategy.func.synchronous
    share = round(rounds * SHARE) if alike and not setting.whole else rounds
    batches = min(share * learners, setting.batches)
    epoch = time_epoch(strategy, hardware, setting.workload(), learners=learners, batches=batches)
    hours = epoch.seconds * rounds / share / 3600
    print(f"{cell}: {hours:.2f} h ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
    return hours


def halved(setting: Setting) -> tuple[Setting, float]:
    """Returns the setting with half the bandwidth of the network cards, and by how many hours it should take longer."""
    hardware, workload = setting.hardware(), setting.workload()
    assert workload.bytes is not None
    bandwidth = hardware.nic_bandwidth
    seconds = ring_share(hardware.devices) * workload.bytes / (hardware.all_reduce_efficiency * bandwidth)
    rounds = -(-setting.batches // hardware.devices)
    override = f"cluster.nic_bandwidth={bandwidth / 2}"
    return replace(setting, overrides=(*setting.overrides, override)), rounds * seconds / 3600


def measure(overrides: Sequence[str], whole: bool, jobs: int) -> list[Row]:
    """Returns all comparisons in the order of the tables."""
    settings = [Setting(cell, tuple(overrides), whole) for cell in PUBLISHED]
    slower, longer = halved(settings[0])
    long_first = sorted([*settings, slower], key=lambda s: (s.cell.strategy, -s.cell.slowdown, -s.batches))
    hours = dict(zip(long_first, parallel_map(epoch_hours, long_first, jobs, "epochs"), strict=True))
    rows = [Row(f"{s.cell}  hours per epoch", s.cell.hours, hours[s]) for s in settings]
    rows += [Row(f"{s.cell}  speed-up", s.cell.speed_up, s.single_hours() / hours[s], restates=True) for s in settings]
    for s in settings:
        if s.cell in TRAINING_HOURS:
            rows.append(Row(f"{s.cell}  {EPOCHS} epochs", TRAINING_HOURS[s.cell], EPOCHS * hours[s], restates=True))
    expected = hours[settings[0]] + longer
    rows.append(Row(f"{slower.cell}  NICs at half (by arithmetic)", expected, hours[slower], restates=True))
    return rows


def main() -> None:
    parser = published.parser(__doc__)
    parser.add_argument("--whole", action="store_true", help="run full epochs only (four times the work)")
    arguments = parser.parse_args()
    try:
        rows = measure(arguments.overrides, arguments.whole, arguments.jobs)
    except InputError as error:
        sys.exit(f"ibm_table3.py: {error}")
    published.show("", rows, 3)
    published.count(rows, published.fitted("cluster/ibm_a", "cluster/ibm_b", "workload/swb2000_lstm"))
    published.keep(arguments, rows)
    published.judge(rows, TOLERANCE)


if __name__ == "__main__":
    main()
