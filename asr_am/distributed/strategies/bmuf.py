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

from torch import Tensor

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.blocks import AtBlock, BlockStrategy, MakeInner
from asr_am.distributed.team import Team
from asr_am.errors import InputError


class Bmuf(BlockStrategy):
    """Block momentum SGD.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule inside a block.
        team: this learner's end of the team.
        block_size: and `momentum`, `inner`, `group_size`: see `BlockStrategy`. N of (5) is the number of groups.
        update: classical, nesterov or equation4, see above.
        zeta: ζ.
        C: C of (5).
        eta: η, None to compute it by (5).
    """

    name = "bmuf"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, block_size: int = 50,
        update: Literal["classical", "nesterov", "equation4"] = "nesterov",
        zeta: float = 1.0, C: float = 1.0, eta: float | None = None,
        momentum: AtBlock = "keep", inner: MakeInner | None = None, group_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(params, optimizer, team, block_size, momentum, inner, group_size)
        if update not in ("classical", "nesterov", "equation4"):
            raise InputError(f"strategy.update={update}: must be classical, nesterov or equation4")
        self._eta, self._zeta = _block_momentum(self.num_models, zeta, C, eta), zeta
        self._update = update
        self._delta = self._zeros()

    def combine(self, w: Tensor, W_g: Tensor, part: slice) -> None:
        """Turns W̄(t) of (1) into W_g(t).

        With W(t-1) expressed by W_g(t-1), W_g(t) is W̄ + (ζ-1) G plus ηΔ(t-1), ηΔ(t) or both, depending on `update`.
        """
        delta, eta, zeta = self._delta[part], self._eta, self._zeta
        G = w - W_g  # (2)
        w.add_(G, alpha=zeta - 1)
        delta.mul_(eta)
        if self._update != "nesterov":
            w.add_(delta)
        delta.add_(G, alpha=zeta)  # (3)
        if self._update != "classical":
            w.add_(delta, alpha=eta)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "delta": self._delta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
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
