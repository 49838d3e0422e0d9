"""Blockwise Model Update Filtering (BMUF): independent training, with a filtered model average every block_size steps.

Chen and Huo (ICASSP 2016) and Ladkat et al. (2019), section 2.2. In block t each of N learners takes block_size steps
from the common W_g(t-1). Then

    W̄(t)   = mean_i W_i(t)                                              (1)
    G(t)   = W̄(t) - W_g(t-1)                                            (2)
    Δ(t)   = η Δ(t-1) + ζ G(t)                                          (3)
    W(t)   = W(t-1) + Δ(t)

and all learners continue from W_g(t), which depends on `update`:

    classical    W_g(t) = W(t)                        Chen and Huo's CBM
    nesterov     W_g(t) = W(t) + η Δ(t)               Chen and Huo's NBM
    equation4    W_g(t) = W_g(t-1) + Δ(t) + η Δ(t)    (4) as Ladkat et al. print it

W_i weights of learner i, W_g the model that is broadcast, W the filtered model, G block gradient, η block momentum, ζ
block learning rate. With a constant block gradient, the first two forms move by ζ/(1-η) of it per block in the long
run. The third continues from its look-ahead and moves (1+η) times as far. Unless given, η = 1 - ζ/(N C), by
ζ / (N (1-η)) = C (5). With η = 0 and ζ = 1 all three are model averaging.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Group, SingleProcess, Team
from asr_am.errors import InputError


class Bmuf(Strategy):
    """Block momentum SGD.

    Blocks continue over checkpoints and epochs, with all learners in each. In the last round of an epoch, learners
    without data take an idle step, and the steps of the others are longer, because gradients are scaled so that the
    mean over all learners stays the same. `train.optimizer.clip_norm` limits them. `metrics` counts `blocks`.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule inside a block.
        team: this learner's end of the team.
        block_size: steps of a block.
        update: classical, nesterov or equation4, see above.
        zeta: ζ.
        C: C of (5).
        eta: η, None to compute it by (5).
        momentum: what happens to the learners' own momentum at the end of a block: keep, average (over all) or reset.
        inner: the strategy that takes the steps of a block, for all learners of `group`. None: `Local`.
        group: the learners that share a model, None for this learner alone. N of (5) is the number of models.
    """

    name = "bmuf"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, block_size: int = 50,
        update: Literal["classical", "nesterov", "equation4"] = "nesterov",
        zeta: float = 1.0, C: float = 1.0, eta: float | None = None,
        momentum: Literal["keep", "average", "reset"] = "keep",
        inner: Strategy | None = None, group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, optimizer, team)
        self._inner = inner or Local(params, optimizer, SingleProcess())
        self._group = group or SingleProcess()
        self.staleness, self.metrics = self._inner.staleness, self._inner.metrics
        models = team.size // self._group.size
        self._eta, self._zeta = _block_momentum(models, zeta, C, eta), zeta
        _check(block_size, update, momentum)
        self._block_size, self._update, self._momentum = block_size, update, momentum
        self._group_leaders: Group | None = team
        if self._group.size > 1:
            self._group_leaders = team.split([range(0, team.size, self._group.size)])
        size = len(params) if self._group_leaders else 0
        self._W_g, self._delta = params.w[:size].clone(), torch.zeros_like(params.w[:size])
        self._steps = 0  # in the present block

    def step(self, gradient: GradientFn) -> StepResult | None:
        step_result = self._inner.step(gradient)
        if step_result is None:
            return None
        self._steps += 1
        if self._steps == self._block_size:
            self._steps = 0
            self._finish_block()
        return step_result

    def _finish_block(self) -> None:
        w = self.params.w
        if self._group_leaders is not None:
            self._group_leaders.start_all_reduce_mean(w).wait()  # (1)
            self._filter(w)
        self._group.broadcast(w)
        if self._momentum == "reset":
            self.optimizer.reset()
        elif self._momentum == "average":
            for velocity in _velocities(self.optimizer, len(w)):
                self.team.start_all_reduce_mean(velocity).wait()
        self.metrics["blocks"] += 1

    def _filter(self, w: Tensor) -> None:
        """Turns W̄(t) into W_g(t), in place.

        With W(t-1) expressed by W_g(t-1), W_g(t) is W̄ + (ζ-1) G plus ηΔ(t-1), ηΔ(t) or both, depending on `update`.
        """
        delta, eta, zeta = self._delta, self._eta, self._zeta
        G = self._W_g.neg_().add_(w)  # (2)
        w.add_(G, alpha=zeta - 1)
        delta.mul_(eta)
        if self._update != "nesterov":
            w.add_(delta)
        delta.add_(G, alpha=zeta)  # (3)
        if self._update != "classical":
            w.add_(delta, alpha=eta)
        self._W_g.copy_(w)

    def drain(self) -> None:
        self._inner.drain()

    def consensus(self) -> Tensor:
        """Returns the mean [N] of the learners' weights, also in the middle of a block."""
        self._inner.consensus()
        return self.team.average(self.params.w)

    def state_dict(self) -> dict[str, Any]:
        block = {"steps": self._steps, "W_g": self._W_g, "delta": self._delta}
        return {**self._inner.state_dict(), **block}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)
        self._steps = state["steps"]
        self._W_g.copy_(state["W_g"])
        self._delta.copy_(state["delta"])


def _block_momentum(models: int, zeta: float, C: float, eta: float | None) -> float:
    """Returns η as given or by (5). Raises InputError unless 0 <= η < 1."""
    if zeta <= 0 or C <= 0:
        raise InputError(f"strategy.zeta={zeta}, strategy.C={C}: must be above 0")
    value = 1 - zeta / (models * C) if eta is None else eta
    if not 0 <= value < 1:
        how = f"strategy.eta={eta}" if eta is not None else f"zeta={zeta} and C={C} with {models} models: eta={value:g}"
        raise InputError(f"{how}: block momentum must be from 0 to below 1")
    return value


def _check(block_size: int, update: str, momentum: str) -> None:
    if block_size < 1:
        raise InputError(f"strategy.block_size={block_size}: must be at least 1 step")
    if update not in ("classical", "nesterov", "equation4"):
        raise InputError(f"strategy.update={update}: must be classical, nesterov or equation4")
    if momentum not in ("keep", "average", "reset"):
        raise InputError(f"the learners' momentum at a block, {momentum}: must be keep, average or reset")


def _velocities(optimizer: Optimizer, length: int) -> list[Tensor]:
    """Returns the optimizer's state vectors [N]: momentum, and Adam's second moments."""
    state = optimizer.state_dict()["state"].get(0, {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.numel() == length]
