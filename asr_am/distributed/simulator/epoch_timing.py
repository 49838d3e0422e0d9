"""How long an epoch takes on a virtual cluster: a strategy's own code, its messages and its leases, but no model.

The weights are a handful of zeros, which stand for the workload's bytes, and gradients cost nothing to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import GradientFn, Leases, Segment, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.simulator.cluster import SimCluster
from asr_am.distributed.simulator.team import SimTeam
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError

ELEMENTS = 4
LARGE = 1e6  # above any threshold


@dataclass(frozen=True)
class EpochTime:
    """seconds: virtual, until the last learner is at rest. batches: by learner."""

    seconds: float
    batches: dict[int, int]


def time_epoch(
    strategy: Callable[[FlatParams, Optimizer, Team], Strategy], hardware: Cluster, workload: Workload, *,
    learners: int, batches: int, seed: int = 1, elements: int = ELEMENTS,
    density: float = 0.0,
) -> EpochTime:  # fmt: skip
    """An epoch of so many equal batches, each of which was done exactly once.

    elements: of the weights; many where strategies cut them up, and write a few numbers beside them. density: share of
    each gradient's elements that are so large that a strategy which sends the large ones sends them.

    InputError where the learners do not fit, or the workload does not say its bytes and seconds per batch.
    """
    if workload.bytes is None or workload.seconds_per_batch is None:
        raise InputError(f"workload {workload.name}: timing an epoch without a model needs bytes and seconds_per_batch")
    segment = Segment(0, 0, batches, batches, (1,) * batches, updates_before=0, learners=learners)
    cluster = SimCluster(hardware, workload, learners, seed, model_elements=elements)

    def live(team: SimTeam) -> None:
        params = FlatParams(_Weights(elements))
        learner = strategy(params, Optimizer(params, OptimizerOptions(momentum=0.0)), team)
        leases = team.leases(segment, learner.synchronous)
        gradient = team.timed(_free_gradient(leases, params, density))
        while (step_result := learner.step(gradient)) is not None:
            leases.complete(step_result)
        learner.drain()
        record = leases.record()
        if team.rank == 0:
            record.audit((1,) * batches)
            owners.update(completion.owner for completion in record.completions)

    owners: Counter[int] = Counter()
    cluster.run(live)
    return EpochTime(cluster.now, dict(sorted(owners.items())))


class _Weights(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))


def _free_gradient(leases: Leases, params: FlatParams, density: float) -> GradientFn:
    """A closure that leases a batch; the gradient is zero, but for a share of `density`."""
    nothing = torch.zeros(())
    large = round(density * len(params))

    def gradient(on_bucket: BucketHook | None) -> StepResult | None:
        lease = leases.lease()
        if lease is None:
            return None
        params.g[:large] = LARGE
        params.notify_all_buckets(on_bucket)
        idle = lease.batch is None
        return StepResult(lease, float(not idle), int(not idle), 0.0, nothing, nothing)

    return gradient
