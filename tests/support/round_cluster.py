"""A virtual cluster with round figures: 2 hosts x 2 devices, batches of 3 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.leases import Lease, Segment, StepResult
from asr_am.distributed.simulator import SimCluster, SimTeam

T = TypeVar("T")
VALUES: dict[str, Any] = {
    "name": "round", "hosts": 2, "devices_per_host": 2, "device": "abacus",
    "nic_bandwidth": 100.0, "nic_latency": 0.5, "host_bandwidth": 1000.0, "host_latency": 0.125,
    "all_reduce_efficiency": 0.1, "overlap_speed": 0.5,
    "update_bandwidth": 40.0, "averaging_bandwidth": 20.0,
}  # fmt: skip
WORKLOAD = Workload("round", seconds_per_batch={"abacus": 3.0})


def cluster_of(
    learners: int = 4,
    seed: int = 1,
    workload: Workload = WORKLOAD,
    model_elements: int | None = None,
    **changes: object,
) -> SimCluster:
    """Builds a cluster. `changes` override the hardware and its faults."""
    return SimCluster(Cluster.build({**VALUES, **changes}), workload, learners, seed, model_elements)


def run(main: Callable[[SimTeam], T], learners: int = 4, **changes: Any) -> dict[int, T]:
    return cluster_of(learners, **changes).run(main)


def segment(batches: int, begin: int = 0, epoch: int = 0) -> Segment:
    return Segment(epoch, begin, begin + batches, 100, (10,) * batches, 0, 4)


def step_result(lease: Lease | None = None, frames: float = 10.0) -> StepResult:
    """Returns the result of a batch with loss 1 and two examples."""
    lease = lease or Lease(0, 0.0, 0.0, frames)
    return StepResult(lease, frames, 2, 0.1, torch.tensor(1.0), torch.tensor(3))
