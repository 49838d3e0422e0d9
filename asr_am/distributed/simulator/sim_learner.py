"""State of one virtual learner, shared by all parts of the simulator."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from asr_am.distributed.simulator.scheduler import SimTask
from asr_am.distributed.team import CommStats


@dataclass
class SimLearner:
    """One virtual learner.

    Attributes:
        rank: rank in the team.
        host: index of the host that it runs on.
        comm_stats: statistics over all its incarnations.
        incarnation: number of its restarts.
        alive: its training task is running.
        tasks: the training task, then the tasks it has spawned.
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


def live_ranks(learners: Sequence[SimLearner]) -> tuple[int, ...]:
    """Returns the ranks of live learners, ascending."""
    return tuple(learner.rank for learner in learners if learner.alive)


def random_stream(seed: int, rank: int, incarnation: int, purpose: str) -> np.random.Generator:
    """Returns a random stream that depends on these four values and on nothing that happens in the run."""
    return np.random.default_rng([seed, rank, incarnation, zlib.crc32(purpose.encode())])
