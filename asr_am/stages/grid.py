"""LM weights and insertion penalties that dev chooses from, checked before any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig, ListConfig

from asr_am.errors import InputError

if TYPE_CHECKING:
    from asr_am.decode.paths import Weights


def grid_of(cfg: DictConfig) -> list[list[float]]:
    """[LM weights, insertion penalties]; InputError where a list is empty or has what is not a number in range."""
    grid = []
    for name, above in (("lm_weights", 0.0), ("insertion_penalties", -math.inf)):
        given = cfg.decode[name]
        values = list(given) if isinstance(given, ListConfig) else []
        if not values or not all(isinstance(value, int | float) and above < value < math.inf for value in values):
            limit = " above 0" if above == 0 else ""
            raise InputError(f"decode.{name}={given}: must be a list of one or more numbers{limit}")
        grid.append(values)
    return grid


def weightings(grid: Sequence[Sequence[float]]) -> list[Weights]:
    """Each LM weight with each penalty."""
    from asr_am.decode.paths import Weights

    lm_weights, penalties = grid
    return [Weights(lm, penalty) for lm in lm_weights for penalty in penalties]
