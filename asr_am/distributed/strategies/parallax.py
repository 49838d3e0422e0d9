"""Parallax (Kim et al., 2018) as a strategy of the acoustic models' training loop: plain `sync`.

Acoustic models have no sparse parameters. Programs that train models with sparse parameters call
`asr_am.parallax.get_runner` instead.
"""

from __future__ import annotations

import logging

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import Team

log = logging.getLogger(__name__)


class Parallax(Sync):
    """Synchronous SGD, as all of `params` is dense."""

    name = "parallax"

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        super().__init__(params, optimizer, team)
        if team.rank == 0:
            log.info("strategy=parallax: no sparse parameters, so this is strategy=sync")
