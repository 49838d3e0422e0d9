"""The hybrid two-tier method (HTM): GTC inside groups of learners, BMUF across the groups.

Ladkat et al. (2019), section 2.3, figure 1. N learners form M groups of P = N/M neighbouring ranks, usually on one
host:

    (a) for block_size steps, each group trains one model by GTC (`gtc`),
    (b) the first learner of each group takes part in the BMUF step with the M models, N = M in (5) (`bmuf`),
    (c) it broadcasts the global model inside its group.

P = 1 is `bmuf`. One group is `gtc`, as (5) then gives η = 0 with ζ = C = 1. The residuals at the end of a block were
collected at the group's own model, which is replaced there. `residual` says if they are kept, so that the sum of
gradients stays complete, or reset.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.team import Team
from asr_am.errors import InputError


class Htm(Bmuf):
    """GTC inside groups, BMUF across them.

    Args:
        params: flat weights and gradient.
        optimizer: the update rule.
        team: this learner's end of the team.
        group_size: P.
        threshold: and `frames`, `density`, `momentum`, `dense_above`, `bucket`: see `Gtc`.
        block_size: and `update`, `zeta`, `C`, `eta`: see `Bmuf`.
        momentum_at_block: `momentum` of `Bmuf`.
        residual: what happens to the residuals at the end of a block, keep or reset.
    """

    name = "htm"

    def __init__(
        self, params: FlatParams, optimizer: Optimizer, team: Team, group_size: int = 8,
        threshold: float = 2.0, frames: Literal["sum", "mean"] = "sum", density: float | None = None,
        momentum: Literal["after", "before"] = "after", dense_above: float | None = None, bucket: int = 1 << 22,
        block_size: int = 50, update: Literal["classical", "nesterov", "equation4"] = "nesterov",
        zeta: float = 1.0, C: float = 1.0, eta: float | None = None,
        momentum_at_block: Literal["keep", "average", "reset"] = "keep",
        residual: Literal["keep", "reset"] = "keep",
    ) -> None:  # fmt: skip
        if residual not in ("keep", "reset"):
            raise InputError(f"strategy.residual={residual}: must be keep or reset")
        gtc = partial(
            Gtc, threshold=threshold, frames=frames, density=density, momentum=momentum, dense_above=dense_above,
            bucket=bucket,
        )  # fmt: skip
        super().__init__(params, optimizer, team, block_size, update, zeta, C, eta, momentum_at_block, gtc, group_size)
        self._reset_residual = residual == "reset"

    def _finish_block(self) -> None:
        super()._finish_block()
        if self._reset_residual:
            assert isinstance(self._inner, Gtc)
            self._inner.residual.zero_()
