"""Training without a model: a strategy's own steps on weights of zeros, with gradients that cost nothing to compute.

It shows what a strategy costs beside the gradients. The virtual cluster times epochs so (`simulator.epoch_timing`),
and real teams whose computing time is emulated (`asr_am.cluster`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import GradientFn, Leases, Segment, SegmentRecord, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team

LARGE = 1e6  # above any threshold


class IdleLearner:
    """A learner that trains no model.

    Args:
        density: share of each gradient's elements that are above any threshold.
    """

    def __init__(
        self, strategy: Callable[[FlatParams, Optimizer, Team], Strategy], team: Team, elements: int, density: float
    ) -> None:
        params = FlatParams(IdleWeights(elements))
        self.team, self._density = team, density
        self.strategy = strategy(params, Optimizer(params, OptimizerOptions(momentum=0.0)), team)

    def do(self, segment: Segment) -> SegmentRecord:
        """Does the batches of a segment, each of one frame, and returns what the team did."""
        leases = self.team.leases(segment, self.strategy.synchronous)
        gradient = self.team.timed(_free_gradient(leases, self.strategy.params, self._density))
        while (step_result := self.strategy.step(gradient)) is not None:
            leases.complete(step_result)
        self.strategy.drain()
        self.team.gather(torch.zeros(0, dtype=torch.float64))  # others may still pull from a server at this learner
        return leases.record()


def matrix_of(elements: int) -> tuple[int, int]:
    """Returns rows and columns of the weights: a matrix, for low rank compression."""
    rows = 32 if elements >= 32**2 and elements % 32 == 0 else 1
    return rows, elements // rows


class IdleWeights(nn.Module):
    """A model of one matrix of zeros."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(matrix_of(elements)))


def _free_gradient(leases: Leases, params: FlatParams, density: float) -> GradientFn:
    """Returns a closure that leases a batch. The gradient is zero except for a share of `density`."""
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
