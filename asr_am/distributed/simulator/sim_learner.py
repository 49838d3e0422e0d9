"""What the parts of a virtual cluster know of one learner."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from asr_am.distributed.simulator.scheduler import SimTask
from asr_am.distributed.team import CommStats


@dataclass
class SimLearner:
    """alive: its training task runs. joined: meetings wait for it; a restarted learner's, once it has opened a segment.

    usage: of all its incarnations. tasks: the training task, then those it spawned.
    """

    rank: int
    host: int
    comm_stats: CommStats = field(default_factory=CommStats)
    incarnation: int = 0
    alive: bool = True
    tasks: list[SimTask] = field(default_factory=list)

    @property
    def training(self) -> SimTask:
        return self.tasks[0]

    def waited(self, seconds: float) -> None:
        self.comm_stats.idle_seconds += seconds


def living(members: Sequence[SimLearner]) -> tuple[int, ...]:
    """Ranks of the living, ascending."""
    return tuple(learner.rank for learner in members if learner.alive)


def random_stream(seed: int, rank: int, incarnation: int, purpose: str) -> np.random.Generator:
    """Random numbers that depend on these four and on nothing that happens in the run."""
    return np.random.default_rng([seed, rank, incarnation, zlib.crc32(purpose.encode())])
