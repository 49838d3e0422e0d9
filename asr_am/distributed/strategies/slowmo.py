"""SlowMo: a slow momentum on top of learners that train apart.

Wang et al. (ICLR 2020, arXiv 1910.00643), algorithm 1. In round t each learner takes τ steps from the common x(t,0).
Then with x(t,τ) = mean_i x_i(t,τ)

    u(t+1)   = β u(t) + (x(t,0) - x(t,τ)) / γ(t)
    x(t+1,0) = x(t,0) - α γ(t) u(t+1)

x weights, u slow momentum, β its coefficient, α slow learning rate, γ the learners' rate, here that of the last step of
the round. The division by γ keeps the scale of u when the rate changes, which `bmuf` does not. With β = 0 and α = 1 it
is averaging every τ steps. `momentum` are the paper's buffer strategies: reset, maintain (keep) and average.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.blocks import AtBlock, BlockStrategy, MakeInner
from asr_am.distributed.team import Team
from asr_am.errors import InputError


class Slowmo(BlockStrategy):
    """SlowMo.

    Args:
        params: flat weights and gradient.
        optimizer: the rule inside a round.
        team: this learner's end of the team.
        block_size: τ.
        slow_lr: α.
        slow_momentum: β.
        momentum: and `inner`, `group_size`: see `BlockStrategy`.
    """

    name = "slowmo"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, block_size: int = 12, slow_lr: float = 1.0,
        slow_momentum: float = 0.7, momentum: AtBlock = "reset", inner: MakeInner | None = None, group_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(params, optimizer, team, block_size, momentum, inner, group_size)
        if not slow_lr > 0:
            raise InputError(f"strategy.slow_lr={slow_lr}: must be above 0")
        if not 0 <= slow_momentum < 1:
            raise InputError(f"strategy.slow_momentum={slow_momentum}: must be from 0 to below 1")
        self._alpha, self._beta = slow_lr, slow_momentum
        self._u = self._zeros()

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        gamma = self.optimizer.lr
        if gamma == 0:
            return  # u has no scale: the models are averaged only
        u, moved = self._u[part], W_g - w
        w.add_(moved, alpha=1 - self._alpha)
        w.add_(u, alpha=-self._alpha * gamma * self._beta)
        u.mul_(self._beta).add_(moved, alpha=1 / gamma)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow_momentum": self._u}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._u.copy_(state["slow_momentum"])
