"""What a run is measured by beside its accuracy: what its learners sent, waited for, and how far apart they were."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import CommStats, Team


@dataclass(frozen=True)
class Measures:
    """Of all learners of a team. bytes_per_link: {"from-to": real bytes}. modelled_bytes: of a virtual workload.
    consensus_distance: root mean square over learners of |their weights - consensus|. counts: the algorithm's own.
    """

    staleness: dict[int, int]
    counts: dict[str, int]
    bytes_sent: int
    bytes_per_link: dict[str, int]
    modelled_bytes: float
    waiting_seconds: dict[int, float]
    pull_seconds: dict[str, int]
    letters: int
    refused: int
    lost: int
    superseded: int
    restarts: int
    faults_fired: dict[str, int]
    consensus_distance: float

    @property
    def mean_staleness(self) -> float:
        return sum(k * n for k, n in self.staleness.items()) / max(sum(self.staleness.values()), 1)


def measure(team: Team, strategy: Strategy, consensus: Tensor) -> Measures:
    """Called by all learners, at rest. consensus: as `Strategy.consensus` returned it."""
    own = {
        "usage": usage_state(team.comm_stats),
        "staleness": strategy.staleness,
        "counts": strategy.metrics,
        "restarts": team.incarnation,
        "squared_distance": float((strategy.replica() - consensus).square().sum()),
    }
    by_rank = _gather(team, own)
    rows = list(by_rank.values())
    usages = [row["usage"] for row in rows]
    pulls = _sum(comm_stats["pull_latency"] for comm_stats in usages)
    links = {
        f"{rank}-{to}": int(sent) for rank, row in by_rank.items() for to, sent in row["usage"]["bytes_sent"].items()
    }
    return Measures(
        staleness={int(key): count for key, count in sorted(_sum(row["staleness"] for row in rows).items())},
        counts=_sum(row["counts"] for row in rows),
        bytes_sent=sum(links.values()),
        bytes_per_link=links,
        modelled_bytes=sum(comm_stats["modelled_bytes"] for comm_stats in usages),
        waiting_seconds={rank: round(row["usage"]["idle_seconds"], 3) for rank, row in by_rank.items()},
        pull_seconds=dict(sorted(pulls.items(), key=lambda pull: float(pull[0]))),
        letters=sum(comm_stats["messages_sent"] for comm_stats in usages),
        refused=sum(comm_stats["rejected"] for comm_stats in usages),
        lost=sum(comm_stats["lost"] for comm_stats in usages),
        superseded=sum(comm_stats["overwritten"] for comm_stats in usages),
        restarts=sum(row["restarts"] for row in rows),
        faults_fired=_sum(comm_stats["faults"] for comm_stats in usages),
        consensus_distance=(sum(row["squared_distance"] for row in rows) / len(rows)) ** 0.5,
    )


def _gather(team: Team, value: Any) -> dict[int, Any]:
    """Every learner's `value`, through JSON."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    rows = team.gather(text.double())
    return {rank: json.loads(bytes(rows[rank].to(torch.uint8).numpy())) for rank in sorted(rows)}


def _sum(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(total)


def usage_state(comm_stats: CommStats) -> dict[str, Any]:
    """Plain values of a learner's usage, for its checkpoint."""
    return {key: dict(value) if isinstance(value, Counter) else value for key, value in vars(comm_stats).items()}


RENAMED = {
    "letters": "messages_sent", "refused": "rejected", "superseded": "overwritten", "pull_seconds": "pull_latency",
    "waiting_seconds": "idle_seconds",
}  # fmt: skip
"""Names in checkpoints of earlier versions."""


def load_usage(comm_stats: CommStats, state: dict[str, Any]) -> None:
    for key, value in state.items():
        setattr(comm_stats, RENAMED.get(key, key), Counter(value) if isinstance(value, dict) else value)
