"""Compares published throughputs of Parallax (Kim et al., 2018) on 48 GPUs with those on the virtual cluster: Table 1
(servers and MPI for four models), Table 4 (each optimisation added), and the speed-ups over one GPU of Fig. 13.

    python scripts/bench/parallax_tables.py [--jobs N] [--json FILE] [cluster.nic_bandwidth=3e9 ...]

Runs the library's own code on conf/cluster/parallax_tb.yaml with conf/workload/parallax_*.yaml. Models hold zeros. They
have as many rows and lookups as the paper's, but shorter rows and fewer dense weights, which are timed at full size.
Hence row numbers are timed as 1/16 of the bytes of their rows, while in the paper they are 1/512 or less.

TF-PS is BASE, with servers that add gradients one by one. Horovod is all-reduce and all-gather. +OPAU and +OPSW move a
multiplication and slices to the servers. Here lookups always select rows on their server, and nothing is multiplied, so
+LA also stands for them.

Exits with 1 if a figure is more than 1.5 times too high or too low, or if two are in the wrong order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import published
import torch
from published import Row
from torch import Tensor, nn

from asr_am import parallax
from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator import SimCluster, SimTeam
from asr_am.errors import InputError
from asr_am.parallax import Config
from asr_am.parallel import parallel_map
from asr_am.stages.app import values

FACTOR = 1.5
GPUS = 48
WIDTH = 16  # elements of a row in the models of this script
STEPS = 2  # timed steps, which differ by jitter only

BASE = Config(hybrid=False, local_aggregation=False, merge_each=True)
HYB = replace(BASE, hybrid=True, path="servers")
LA = replace(HYB, local_aggregation=True)
MPI = Config(path="all-gather")
NAMES = {BASE: "PS", HYB: "+HYB", LA: "+LA", MPI: "MPI"}


@dataclass(frozen=True)
class Model:
    """A model of the paper.

    Attributes:
        name: Suffix of conf/workload/parallax_*.yaml.
        examples: Images or words of a batch.
        dense: Number of dense elements (Table 1).
        tables: Number of rows of each embedding.
        touched: Rows of each embedding that a batch looks up. Their sum is the subset of Table 1.
        width: Elements of a row.
    """

    name: str
    examples: int
    dense: float
    tables: tuple[int, ...] = ()
    touched: tuple[int, ...] = ()
    width: int = 1024

    @property
    def scale(self) -> int:
        return self.width // WIDTH


RESNET = Model("resnet50", 64, 26e6)
INCEPTION = Model("inception_v3", 64, 24e6)
LM = Model("lm", 128 * 20, 9e6, (793_470, 793_470), (1_100, 11_600), 512)
NMT = Model("nmt", 128 * 25, 94e6, (36_600, 36_600), (3_400, 3_400))


@dataclass(frozen=True)
class Setting:
    """One cell of a table.

    Attributes:
        model: The model.
        config: Options of Parallax.
        overrides: Hydra overrides from the command line.
    """

    model: Model
    config: Config
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model.name:12} {NAMES[self.config]:5}"

    def build(self) -> tuple[Cluster, Workload]:
        """Reads the configuration. Raises InputError for invalid overrides."""
        cfg = published.config(["cluster=parallax_tb", f"workload=parallax_{self.model.name}"], self.overrides)
        return Cluster.build(values(cfg.cluster)), Workload.build(values(cfg.workload))

    def single_gpu(self) -> float:
        """Returns examples per second of one GPU without communication."""
        hardware, workload = self.build()
        return self.model.examples / workload.seconds(hardware.device, 1, 1)


PUBLISHED = {  # examples per second, from Table 4, for PS from Table 1
    Setting(RESNET, BASE): 6.0e3, Setting(RESNET, MPI): 8.1e3, Setting(INCEPTION, BASE): 3.9e3,
    Setting(INCEPTION, MPI): 5.8e3, Setting(LM, BASE): 101.2e3, Setting(LM, HYB): 112e3, Setting(LM, LA): 251e3,
    Setting(LM, MPI): 39.0e3, Setting(NMT, BASE): 86.8e3, Setting(NMT, HYB): 117e3, Setting(NMT, LA): 188e3,
    Setting(NMT, MPI): 67.2e3,
}  # fmt: skip
ALL = {LM: 276e3, NMT: 191e3}  # Table 4's last column
SPEED_UPS = {  # Fig. 13: Parallax, TF-PS, Horovod
    RESNET: (39.8, 30.2, 39.5), INCEPTION: (43.6, 28.4, 44.0), LM: (9.4, 3.4, 1.3), NMT: (17.1, 7.8, 6.0),
}  # fmt: skip


class Zeros(nn.Module):
    """Model of zeros. With `shared`, all elements of an embedding share memory, as nothing is written to them."""

    def __init__(self, model: Model, shared: bool) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(round(model.dense / model.scale)))
        rows = model.tables if shared else tuple(4 * touched for touched in model.touched)
        zeros = (torch.zeros(1, 1).expand(n, WIDTH) if shared else torch.zeros(n, WIDTH) for n in rows)
        self.tables = nn.ParameterList(nn.Parameter(table) for table in zeros)

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        looked_up = (table[numbers].sum() for table, numbers in zip(self.tables, rows, strict=True))
        return sum(looked_up, self.dense.sum())


def log_uniform(count: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Draws `count` distinct row numbers by Zipf's law, like the candidates of a sampled softmax."""
    drawn = torch.zeros(0, dtype=torch.int64)
    while len(drawn) < count:
        more = (vocabulary + 1) ** torch.rand(count, generator=generator, dtype=torch.float64)
        drawn = torch.cat([drawn, more.long().clamp(max=vocabulary) - 1]).unique()
    return drawn[torch.randperm(len(drawn), generator=generator)[:count]]


def throughput(setting: Setting) -> float:
    """Returns examples per virtual second of all GPUs. Reports on stderr."""
    begin = time.monotonic()
    torch.set_num_threads(1)
    model = setting.model
    hardware, workload = setting.build()
    shared = setting.config.path != "all-gather"
    cluster = SimCluster(hardware, workload, GPUS, seed=1, model_elements=round(model.dense / model.scale))

    def run_learner(team: SimTeam) -> float:
        generator = torch.Generator().manual_seed(team.rank)
        zeros = Zeros(model, shared)
        sizes = [len(table) for table in zeros.tables]
        optimizer = torch.optim.SGD(zeros.parameters(), lr=0.0)
        with parallax.get_runner(zeros, lambda m, rows: (m(rows), 1.0), optimizer, team, setting.config) as runner:
            for step in range(1 + STEPS):
                if step == 1:
                    runner.drain()
                    first = team.now()
                runner.run([log_uniform(n, v, generator) for n, v in zip(model.touched, sizes, strict=True)])
            runner.drain()
            return (team.now() - first) / STEPS

    seconds = max(cluster.run(run_learner).values())
    print(f"{setting}: {seconds:.4f} s per step ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
    return GPUS * model.examples / seconds


def measure(overrides: Sequence[str], jobs: int) -> tuple[list[Row], list[str]]:
    """Returns all comparisons, and messages about wrong orders."""
    settings = [replace(setting, overrides=tuple(overrides)) for setting in PUBLISHED]
    found = parallel_map(throughput, settings, jobs, "settings")
    ours = {(s.model, s.config): value for s, value in zip(settings, found, strict=True)}
    rows = [Row(f"{s}  a second", PUBLISHED[s], ours[s.model, s.config]) for s in PUBLISHED]
    rows += [Row(f"{m.name:12} +OPSW  a second", value, ours[m, LA], restates=True) for m, value in ALL.items()]
    for model, speed_ups in SPEED_UPS.items():
        single = Setting(model, MPI, tuple(overrides)).single_gpu()
        best = LA if model.tables else MPI
        for name, config, value in zip(("Parallax", "TF-PS", "Horovod"), (best, BASE, MPI), speed_ups, strict=True):
            rows.append(Row(f"{model.name:12} {name:8} speed-up", value, ours[model, config] / single, restates=True))
    orders = [(RESNET, BASE, MPI), (INCEPTION, BASE, MPI), *((m, a, b) for m in (LM, NMT) for a, b in RISING)]
    wrong = [f"{m.name}: {NAMES[a]} slower than {NAMES[b]}" for m, a, b in orders if ours[m, a] >= ours[m, b]]
    return rows, wrong


RISING = ((MPI, BASE), (BASE, HYB), (HYB, LA))


def main() -> None:
    arguments = published.parser(__doc__).parse_args()
    try:
        rows, wrong = measure(arguments.overrides, arguments.jobs)
    except InputError as error:
        sys.exit(f"parallax_tables.py: {error}")
    published.show("", rows, 1)
    workloads = [f"workload/parallax_{model.name}" for model in SPEED_UPS]
    published.count(rows, published.fitted("cluster/parallax_tb", *workloads))
    print("They were fitted after a look at the other cells, so this is a consistency check")
    published.keep(arguments, rows)
    low = [f"{row.name}: within a factor of {FACTOR}" for row in rows if row.ours * FACTOR < row.published]
    published.judge(rows, FACTOR - 1, [*wrong, *low])


if __name__ == "__main__":
    main()
