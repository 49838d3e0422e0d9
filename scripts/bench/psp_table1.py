"""Compares running times of PSP-SGD (Table 1 of "Faster distributed synchronous SGD with weak synchronization", 2018).

    python scripts/bench/psp_table1.py [--jobs N] [--steps N] [--json FILE] [cluster.nic_bandwidth=1e9 ...]

The strategy's own code runs on conf/cluster/psp_32.yaml with conf/workload/resnet50_cifar10.yaml, without a model. The
paper gives no unit of time, so ratios to the first setting are compared. One more run has no delays: delays must
prolong the first setting as section 4.4 says. The seconds per batch were calibrated on that, after a look at the ratios
that several values give. Exits with 1 if a ratio is more than 10 % off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import published
import torch
from published import Row

from asr_am.distributed.cluster_config import Cluster, Faults, Workload
from asr_am.distributed.simulator.epoch_timing import time_epoch
from asr_am.errors import InputError
from asr_am.parallel import parallel_map
from asr_am.stages.app import values
from asr_am.stages.train_config import strategy_factory

TOLERANCE = 0.10
WORKERS = 32
ELEMENTS = WORKERS * 1024  # large enough that the metadata of a shard is negligible
STEPS = 879  # of 90 epochs
PROLONGED = 1.30  # section 4.4


@dataclass(frozen=True)
class Setting:
    """A column of the table with its running time.

    Attributes:
        overrides: Hydra's, from the command line.
        steps: number of steps to run.
    """

    c: int
    b: float
    published: float
    overrides: tuple[str, ...]
    steps: int
    delays: bool = True

    def __str__(self) -> str:
        return f"c={self.c} b={self.b:.0%}" + ("" if self.delays else " without delays")

    def config(self) -> dict[str, Any]:
        """Composes the configuration. Raises InputError for invalid overrides."""
        own = [f"strategy.c={self.c}", f"strategy.b={self.b}", f"strategy.servers={WORKERS}", f"learners={WORKERS}"]
        groups = ["cluster=psp_32", "workload=resnet50_cifar10", "strategy=psp"]
        cfg = published.config([*groups, *own], self.overrides)
        return {name: values(cfg[name]) for name in ("cluster", "workload", "strategy")}


TABLE = ((32, 1.0, 199.97), (28, 1.0, 164.97), (28, 0.9, 139.95), (20, 0.75, 136.54))


def seconds_per_step(setting: Setting) -> float:
    """Returns virtual seconds per step, and logs them to stderr."""
    begin = time.monotonic()
    torch.set_num_threads(1)
    config = setting.config()
    hardware = Cluster.build(config["cluster"])
    if not setting.delays:
        hardware = replace(hardware, faults=Faults())
    strategy = strategy_factory(config["strategy"])
    batches = WORKERS * setting.steps
    epoch = time_epoch(
        strategy, hardware, Workload.build(config["workload"]), learners=WORKERS, batches=batches, elements=ELEMENTS
    )  # fmt: skip
    seconds = epoch.seconds / setting.steps
    print(f"{setting}: {seconds:.2f} s a step ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
    return seconds


def measure(overrides: Sequence[str], steps: int, jobs: int) -> list[Row]:
    """Returns all comparisons in the order of the table."""
    settings = [Setting(*column, tuple(overrides), steps) for column in TABLE]
    undelayed = replace(settings[0], delays=False)
    everything = [*settings, undelayed]
    seconds = dict(zip(everything, parallel_map(seconds_per_step, everything, jobs, "settings"), strict=True))
    first = settings[0]
    rows = [Row(f"{s}", s.published / first.published, seconds[s] / seconds[first]) for s in settings]
    return [*rows, Row(f"{first}, to that without delays", PROLONGED, seconds[first] / seconds[undelayed])]


def main() -> None:
    parser = published.parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help=f"of each setting (default: 100; 90 epochs are {STEPS})")
    arguments = parser.parse_args()
    try:
        rows = measure(arguments.overrides, arguments.steps, arguments.jobs)
    except InputError as error:
        sys.exit(f"psp_table1.py: {error}")
    published.show("running time", rows, 3)
    published.count(rows[1:], published.fitted("cluster/psp_32", "workload/resnet50_cifar10"))  # the first is 1
    published.keep(arguments, rows)
    published.judge(rows, TOLERANCE)


if __name__ == "__main__":
    main()
