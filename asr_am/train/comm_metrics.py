"""Metrics of a team beside its accuracy: communication, waiting, staleness, distance between the learners."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import CommStats, Team
from asr_am.errors import InputError

SAMPLE = 100  # weights that are compared


@dataclass(frozen=True)
class CommMetrics:
    """Sums over all learners of a team since the start of the run. The names are keys of summary.json.

    Attributes:
        staleness: number of gradients by staleness, in updates.
        counts: further counts of the algorithm.
        bytes_sent: bytes really sent.
        bytes_per_link: bytes by "from-to".
        modelled_bytes: bytes sent as the workload of a virtual cluster sizes them.
        waiting_seconds: seconds that the training task waited for others, by rank.
        pull_latency: number of weight shards pulled from parameter servers, by latency in seconds.
        messages_sent: messages sent.
        rejected: messages, connections and packets.
        lost: messages dropped by fault injection.
        overwritten: messages replaced by a newer one before they left.
        restarts: restarts of learners.
        faults_fired: number of faults that took place, by kind.
        consensus_distance: root mean square over learners of |their weights - consensus|, now.
    """

    staleness: dict[int, int]
    counts: dict[str, int]
    bytes_sent: int
    bytes_per_link: dict[str, int]
    modelled_bytes: float
    waiting_seconds: dict[int, float]
    pull_latency: dict[str, int]
    messages_sent: int
    rejected: int
    lost: int
    overwritten: int
    restarts: int
    faults_fired: dict[str, int]
    consensus_distance: float

    @property
    def mean_staleness(self) -> float:
        return sum(k * n for k, n in self.staleness.items()) / max(sum(self.staleness.values()), 1)


def gather_comm_metrics(team: Team, strategy: Strategy, consensus: Tensor) -> CommMetrics:
    """Gathers the metrics of all learners. All call it when drained.

    Args:
        team: this learner's end of the team.
        strategy: this learner's strategy.
        consensus: weights [N] that `Strategy.consensus` returned.

    Returns:
        The same metrics at every learner.
    """
    local = {
        "usage": comm_stats_to_dict(team.comm_stats),
        "staleness": strategy.staleness,
        "counts": strategy.metrics,
        "restarts": team.restarts,
        "squared_distance": float((strategy.replica() - consensus).square().sum()),
    }
    if alike := type(strategy).consensus is Strategy.consensus:
        local["sample"] = consensus[:: -(-len(consensus) // SAMPLE)].tolist()
    by_rank = _gather(team, local)
    if alike and not _alike([row["sample"] for row in by_rank.values()]):
        raise InputError(
            f"strategy={strategy.name}: the learners have different weights, and its `consensus` returns each its own; "
            "override it, for instance by the mean: return self.team.average(self.params.w)"
        )
    return _metrics(by_rank)


def metrics_of_parts(parts: Mapping[int, Mapping[str, Any]], restarts: int) -> CommMetrics:
    """Returns the metrics of a team with equal replicas from its parts of a checkpoint, by rank.

    Args:
        restarts: restarts of each learner.
    """
    alike = {"restarts": restarts, "squared_distance": 0.0}
    return _metrics({
        rank: {**alike, "usage": part["usage"], **{name: part["strategy"][name] for name in ("staleness", "counts")}}
        for rank, part in parts.items()
    })  # fmt: skip


def _metrics(by_rank: Mapping[int, Mapping[str, Any]]) -> CommMetrics:
    rows = list(by_rank.values())
    stats = [row["usage"] for row in rows]
    pulls = _sum(comm_stats["pull_latency"] for comm_stats in stats)
    links = {
        f"{rank}-{to}": int(sent) for rank, row in by_rank.items() for to, sent in row["usage"]["bytes_sent"].items()
    }
    return CommMetrics(
        staleness={int(key): count for key, count in sorted(_sum(row["staleness"] for row in rows).items())},
        counts=_sum(row["counts"] for row in rows),
        bytes_sent=sum(links.values()),
        bytes_per_link=links,
        modelled_bytes=sum(comm_stats["modelled_bytes"] for comm_stats in stats),
        waiting_seconds={rank: round(row["usage"]["waiting_seconds"], 3) for rank, row in by_rank.items()},
        pull_latency=dict(sorted(pulls.items(), key=lambda pull: float(pull[0]))),
        messages_sent=sum(comm_stats["messages_sent"] for comm_stats in stats),
        rejected=sum(comm_stats["rejected"] for comm_stats in stats),
        lost=sum(comm_stats["lost"] for comm_stats in stats),
        overwritten=sum(comm_stats["overwritten"] for comm_stats in stats),
        restarts=sum(row["restarts"] for row in rows),
        faults_fired=_sum(comm_stats["faults"] for comm_stats in stats),
        consensus_distance=(sum(row["squared_distance"] for row in rows) / len(rows)) ** 0.5,
    )


def _alike(samples: Sequence[Sequence[float]]) -> bool:
    """Returns True if weights differ by no more than what sending them in 16 bits rounds off."""
    first, largest = samples[0], max(map(abs, samples[0]))
    return all(abs(x - y) <= 0.02 * largest for sample in samples for x, y in zip(first, sample, strict=True))


def _gather(team: Team, value: Any) -> dict[int, Any]:
    """Gathers every learner's `value` as JSON text in a tensor."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    rows = team.gather(text.double())
    return {rank: json.loads(bytes(rows[rank].to(torch.uint8).numpy())) for rank in sorted(rows)}


def _sum(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(total)


def comm_stats_to_dict(comm_stats: CommStats) -> dict[str, Any]:
    """Converts a learner's statistics to plain values for its checkpoint."""
    return {key: dict(value) if isinstance(value, Counter) else value for key, value in vars(comm_stats).items()}


def load_comm_stats(comm_stats: CommStats, states: Sequence[dict[str, Any]]) -> None:
    """Restores statistics from a checkpoint. A fault that was counted since is one more that took place.

    Args:
        comm_stats: statistics of a learner.
        states: those of the learner, and of others whose place it takes. They are added.
    """
    faults = comm_stats.faults
    for key in vars(CommStats()):
        values = [Counter(state[key]) if isinstance(state[key], dict) else state[key] for state in states]
        setattr(comm_stats, key, sum(values[1:], values[0]))
    comm_stats.faults |= faults
