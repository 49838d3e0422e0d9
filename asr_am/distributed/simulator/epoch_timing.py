"""Duration of an epoch on a virtual cluster: the strategy's own code, messages and leases, but no model.

The weights are a few zeros that stand for the workload's bytes, and gradients cost nothing to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.idle_training import IdleLearner
from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.leases import Segment
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.simulator.cluster import SimCluster
from asr_am.distributed.simulator.team import SimTeam
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError

ELEMENTS = 4


@dataclass(frozen=True)
class EpochTime:
    """Result of `time_epoch`.

    Attributes:
        seconds: virtual seconds until the last learner has drained.
        batches: number of batches that each learner did, by rank.
        bytes_sent: by all learners, as the workload sizes their messages.
        pull_latency: number of pulled shards by seconds, see `CommStats`.
        staleness: number of updates by the staleness of their gradient.
    """

    seconds: float
    batches: dict[int, int]
    bytes_sent: float
    pull_latency: dict[float, int]
    staleness: dict[int, int]


def time_epoch(
    strategy: Callable[[FlatParams, Optimizer, Team], Strategy], hardware: Cluster, workload: Workload, *,
    learners: int, batches: int, seed: int = 1, elements: int = ELEMENTS,
    density: float = 0.0, wire: WireDtype = "float32",
) -> EpochTime:  # fmt: skip
    """Simulates an epoch of equal batches, and checks that each was done exactly once.

    Args:
        elements: number of weights. More are needed if the strategy splits them into shards with metadata.
        density: share of each gradient's elements that are above any threshold.
        wire: type in which weights and gradients travel.

    Raises:
        InputError: the cluster has too few devices, or the workload lacks bytes or seconds_per_batch.
    """
    if workload.bytes is None or workload.seconds_per_batch is None:
        raise InputError(f"workload {workload.name}: timing an epoch without a model needs bytes and seconds_per_batch")
    segment = Segment(0, 0, batches, batches, (1,) * batches, updates_before=0, learners=learners)
    cluster = SimCluster(hardware, workload, learners, seed, model_elements=elements, wire=wire)

    def run_learner(team: SimTeam) -> None:
        learner = IdleLearner(strategy, team, elements, density)
        record = learner.do(segment)
        staleness.update(learner.strategy.staleness)
        if team.rank == 0:
            record.audit((1,) * batches)
            owners.update(completion.owner for completion in record.completions)

    owners: Counter[int] = Counter()
    staleness: Counter[int] = Counter()
    cluster.run(run_learner)
    bytes_sent = sum(stats.modelled_bytes for stats in cluster.comm_stats)
    pulls = sum((stats.pull_latency for stats in cluster.comm_stats), Counter[str]())
    latency = {float(seconds): count for seconds, count in pulls.items()}
    return EpochTime(cluster.now, dict(sorted(owners.items())), bytes_sent, latency, dict(staleness))
