"""Steps of Parallax on a virtual cluster: the library's own runner and messages, on a model of zeros.

A model has as many rows and lookups as the one it stands for, but shorter rows and fewer dense weights. They are timed
at full size. Hence row numbers are timed as 1/16 of the bytes of their rows, where they may be 1/512 or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator import SimCluster, SimTeam
from asr_am.errors import InputError
from asr_am.parallax.config import Config
from asr_am.parallax.runner import get_runner

WIDTH = 16  # elements of a row of the model of zeros
KEPT = 4  # an embedding of the model of zeros has so many times the touched rows, where it cannot share memory


@dataclass(frozen=True)
class SizedModel:
    """Sizes of a model.

    Attributes:
        dense: number of dense elements.
        tables: number of rows of each embedding.
        touched: rows of each embedding that a batch looks up.
        width: elements of a row, divisible by 16.
    """

    dense: float
    tables: Sequence[int] = ()
    touched: Sequence[int] = ()
    width: int = 1024

    def __post_init__(self) -> None:
        """Raises InputError if the sizes do not fit together."""
        if len(self.tables) != len(self.touched) or self.width % WIDTH:
            raise InputError("model: tables and touched must have the same length, and width must be divisible by 16")

    @property
    def scale(self) -> int:
        return self.width // WIDTH


def time_steps(
    model: SizedModel, config: Config, hardware: Cluster, workload: Workload, learners: int, steps: int, seed: int = 1
) -> tuple[float, float]:
    """Simulates synchronous steps, which differ by jitter only. Lookups follow Zipf's law.

    Returns virtual seconds of a step, and bytes that a learner sends in it, with its share of what the servers send.
    """
    shared = config.path != "all-gather"  # else replicas of the tables are written to
    cluster = SimCluster(hardware, workload, learners, seed, model_elements=round(model.dense / model.scale))
    sent_before = {}

    def run_learner(team: SimTeam) -> float:
        generator = torch.Generator().manual_seed(team.rank)
        zeros = _Zeros(model, shared)
        sizes = [len(table) for table in zeros.tables]
        optimizer = torch.optim.SGD(zeros.parameters(), lr=0.0)
        with get_runner(zeros, lambda m, rows: (m(rows), 1.0), optimizer, team, config) as runner:
            for step in range(1 + steps):
                if step == 1:
                    runner.drain()
                    first = team.now()
                    sent_before[team.rank] = cluster.comm_stats[team.rank].modelled_bytes
                runner.run([log_uniform(n, v, generator) for n, v in zip(model.touched, sizes, strict=True)])
            runner.drain()
            return (team.now() - first) / steps

    torch.set_num_threads(1)
    seconds = max(cluster.run(run_learner).values())
    sent = sum(stats.modelled_bytes for stats in cluster.comm_stats) - sum(sent_before.values())
    return seconds, sent / steps / learners


def log_uniform(count: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Draws `count` distinct row numbers by Zipf's law, like the candidates of a sampled softmax."""
    drawn = torch.zeros(0, dtype=torch.int64)
    while len(drawn) < count:
        more = (vocabulary + 1) ** torch.rand(count, generator=generator, dtype=torch.float64)
        drawn = torch.cat([drawn, more.long().clamp(max=vocabulary) - 1]).unique()
    return drawn[torch.randperm(len(drawn), generator=generator)[:count]]


class _Zeros(nn.Module):
    """Model of zeros. With `shared`, all elements of an embedding share memory, as nothing is written to them."""

    def __init__(self, model: SizedModel, shared: bool) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(round(model.dense / model.scale)))
        rows = model.tables if shared else [KEPT * touched for touched in model.touched]
        zeros = (torch.zeros(1, 1).expand(n, WIDTH) if shared else torch.zeros(n, WIDTH) for n in rows)
        self.tables = nn.ParameterList(nn.Parameter(table) for table in zeros)

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        looked_up = (table[numbers].sum() for table, numbers in zip(self.tables, rows, strict=True))
        return sum(looked_up, self.dense.sum())
