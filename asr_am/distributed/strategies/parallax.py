"""Parallax as a strategy of the acoustic models' training loop, whose models have no sparse parameters: plain `sync`.

Models that have are trained by programs of their own, with `parallax.get_runner`.
"""

from __future__ import annotations

import logging

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import Team

log = logging.getLogger(__name__)


class Parallax(Sync):
    """All that is in `params` is dense."""

    name = "parallax"

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        super().__init__(params, optimizer, team)
        if team.rank == 0:
            log.info("strategy=parallax: no sparse parameters, so this is strategy=sync")
