"""State of one virtual learner, shared by all parts of the simulator."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from asr_am.distributed.membership import Membership
from asr_am.distributed.simulator.control import SimControlClient
from asr_am.distributed.simulator.scheduler import SimProcess, SimTask
from asr_am.distributed.team import CommStats


@dataclass
class SimLearner(SimProcess):
    """One virtual learner.

    Attributes:
        membership: the other learners, as it knows them.
        comm_stats: statistics over all its incarnations.
        run: identity of its team. Teams of another identity reject its messages.
        alive: its training task is running.
        tasks: the training task, then the tasks it has spawned.
        control: its connection to the supervisor.
    """

    rank: int = 0
    host: int = 0
    membership: Membership = field(default_factory=lambda: Membership(0, 1))
    comm_stats: CommStats = field(default_factory=CommStats)
    incarnation: int = 0
    run: str = ""
    alive: bool = False
    tasks: list[SimTask] = field(default_factory=list)
    control: SimControlClient = field(init=False)

    @property
    def training(self) -> SimTask:
        return self.tasks[0]

    def waited(self, seconds: float) -> None:
        self.comm_stats.waiting_seconds += seconds


def random_stream(seed: int, rank: int, incarnation: int, purpose: str) -> np.random.Generator:
    """Returns a random stream that depends on these four values and on nothing that happens in the run."""
    return np.random.default_rng([seed, rank, incarnation, zlib.crc32(purpose.encode())])
