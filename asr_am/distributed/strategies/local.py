"""SGD with one learner and no communication: the reference for every other algorithm.

    W <- W - alpha u(g)        Zhang et al. (ICASSP 2019), equation (1c)

W weights, g gradient (the mean over the frames of a batch), alpha learning rate, u the optimizer's rule (momentum).
"""

from __future__ import annotations

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.errors import InputError


class Local(Strategy):
    """Single-learner SGD. Staleness 0."""

    name = "local"

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        if team.size != 1:
            raise InputError(f"strategy=local is for one learner, not {team.size}: use strategy=sync")
        super().__init__(params, optimizer, team)

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = gradient(None)  # g = calGrad(W)
        if step_result is None:
            return None
        self.optimizer.step()  # W = apply(W, g)
        self.staleness[0] += 1
        return step_result
