"""DiLoCo: Nesterov's momentum on the mean of what learners have learnt apart, and its streaming form.

Douillard et al. (2023, arXiv 2311.08105), algorithm 1. In round t each of k learners takes H steps with the inner rule
(AdamW in the paper: train.optimizer.kind=adam) from the common θ(t-1). Then

    Δ(t) = θ(t-1) - mean_i θ_i(t)                    the outer gradient
    b(t) = μ b(t-1) + Δ(t)
    θ(t) = θ(t-1) - β (Δ(t) + μ b(t))                Nesterov's rule, as torch.optim.SGD(nesterov=True) has it

θ_i weights of learner i, θ the common ones, b outer momentum, β outer learning rate, μ outer momentum coefficient. The
inner rule's moments stay local. With H = 1, β = 1 and μ = 0 weights are averaged every step (`sync` with form=weights).
It is `bmuf` with update=nesterov, ζ = β and η = μ.

Streaming (Douillard et al., 2025, arXiv 2501.18512, section 2.2): the model is split into fragments, of which one is
combined every H / fragments steps, so that no more than 1 / fragments of it is sent at a time. Here the mean is merged
at once, without the paper's delay of some steps.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.blocks import BlockStrategy, MakeInner
from asr_am.distributed.team import Team
from asr_am.errors import InputError


class Diloco(BlockStrategy):
    """DiLoCo.

    Args:
        params: flat weights and gradient.
        optimizer: the inner rule.
        team: this learner's end of the team.
        block_size: H.
        outer_lr: β.
        outer_momentum: μ.
        fragments: parts of the model that are combined at different steps of a block.
        inner: and `group_size`: see `BlockStrategy`.
    """

    name = "diloco"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, block_size: int = 50, outer_lr: float = 0.7,
        outer_momentum: float = 0.9, fragments: int = 1, inner: MakeInner | None = None, group_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            params, optimizer, team, block_size, inner=inner, group_size=group_size, fragments=fragments
        )  # fmt: skip
        if not outer_lr > 0:
            raise InputError(f"strategy.outer_lr={outer_lr}: must be above 0")
        if not 0 <= outer_momentum < 1:
            raise InputError(f"strategy.outer_momentum={outer_momentum}: must be from 0 to below 1")
        self._beta, self._mu = outer_lr, outer_momentum
        self._b = self._zeros()

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        b, outer_gradient = self._b[part], W_g - w
        b.mul_(self._mu).add_(outer_gradient)
        w.add_(outer_gradient, alpha=1 - self._beta)  # = θ(t-1) - β Δ(t)
        w.add_(b, alpha=-self._beta * self._mu)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "outer_momentum": self._b}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._b.copy_(state["outer_momentum"])
