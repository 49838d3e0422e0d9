"""A learner that kills itself in a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.leases import GradientFn, StepResult
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.train.run_setup import StrategyFactory

STEP = 5  # with checkpoints after every four
KILLED = "killed"  # file whose time is that of the death


def killed_in_step(factory: StrategyFactory, out: Path) -> StrategyFactory:
    """Returns a factory of the same strategies, whose last learner kills its process in `STEP` of its first life."""

    def make(params: FlatParams, optimizer: Optimizer, team: Team) -> Strategy:
        strategy = factory(params, optimizer, team)
        step, left = strategy.step, STEP

        def counted(gradient: GradientFn) -> StepResult | None:
            nonlocal left
            left -= 1
            if left == 0:
                (out / KILLED).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return step(gradient)

        if team.rank == team.size - 1 and not (out / KILLED).exists():
            strategy.step = counted  # type: ignore[method-assign]
        return strategy

    return make
