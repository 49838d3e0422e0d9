"""A virtual cluster: many learners in this process, real arithmetic, modelled time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from asr_am.distributed.cluster_config import Cluster, Crash, Workload
from asr_am.distributed.simulator.collectives import Collectives
from asr_am.distributed.simulator.control import SimControl
from asr_am.distributed.simulator.messaging import FLOAT_BYTES, SimMessaging
from asr_am.distributed.simulator.network import SimNetwork
from asr_am.distributed.simulator.scheduler import Scheduler, SimTask
from asr_am.distributed.simulator.sim_learner import SimLearner, random_stream
from asr_am.distributed.simulator.team import SimTeam
from asr_am.distributed.team import CommStats, LearnerLost

T = TypeVar("T")


class SimCluster:
    """`learners` learners on `hardware`, for one run. The same seed gives the same run to the last bit.

    model_elements: length of the model that is trained, where the workload has bytes of its own: all that is sent is
    timed as if the model had those.
    """

    def __init__(
        self, hardware: Cluster, workload: Workload, learners: int, seed: int, model_elements: int | None = None
    ) -> None:
        """InputError where the learners do not fit, or the workload does not know the cluster's device."""
        hardware.check(learners)
        workload.check(hardware.device)
        if workload.bytes is not None and model_elements is None:
            raise ValueError("the workload has bytes of its own: say how many elements the model has that is trained")
        self.hardware, self.workload, self.seed, self._model_elements = hardware, workload, seed, model_elements
        self.scheduler = Scheduler()
        self.learners = [SimLearner(rank, hardware.host_of(rank)) for rank in range(learners)]
        self.network = SimNetwork(hardware)
        self.collectives = Collectives(self.scheduler, self.learners, self.network, hardware.overlap_speed)
        streams = [random_stream(seed, rank, 0, "mail") for rank in range(learners)]
        self.messaging = SimMessaging(
            self.scheduler, self.learners, self.network, self.modelled_bytes, hardware.faults, streams
        )
        self.control = SimControl(self.scheduler, learners)
        self._main: Callable[[SimTeam], Any] | None = None
        self._results: dict[int, Any] = {}
        self._running = 0  # learners
        self._restarts = 0  # to come

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.scheduler.now

    @property
    def comm_stats(self) -> list[CommStats]:
        """By rank."""
        return [learner.comm_stats for learner in self.learners]

    def modelled_bytes(self, count: float) -> float:
        """What `count` bytes of the model that is trained stand for in the workload."""
        if self.workload.bytes is None or self._model_elements is None:
            return count
        return count * self.workload.bytes / (self._model_elements * FLOAT_BYTES)

    def run(self, main: Callable[[SimTeam], T]) -> dict[int, T]:
        """Have `main` live each learner's life, again for a restarted one; its results by rank, without the lost.

        Raises what a learner raised; LearnerLost where none was left; RuntimeError where all waited for each other.
        """
        if self._main is not None:
            raise RuntimeError("a virtual cluster is for one run; make another")
        self._main = main
        for learner in self.learners:
            self._start(learner)
        for crash in self.hardware.faults.crashes:
            self.scheduler.call_at(crash.at, partial(self._crash, crash))
        try:
            self.scheduler.run(self._over)
        finally:
            self.scheduler.kill_all()
        if not self._results:
            raise LearnerLost(self.learners[0].rank, "and all others crashed")
        return dict(sorted(self._results.items()))

    def spawn(self, learner: SimLearner, function: Callable[[], object], name: str) -> SimTask:
        """A task of a learner; an error in it is raised in the training task."""
        purpose = f"torch {len(learner.tasks)} {name}"
        seed = random_stream(self.seed, learner.rank, learner.incarnation, purpose).integers(2**62)
        task = self.scheduler.spawn(function, f"learner {learner.rank} {name!r}", int(seed))
        task.on_end = lambda task: self.scheduler.throw(learner.training, task.error) if task.error else None
        learner.tasks.append(task)
        return task

    def _start(self, learner: SimLearner) -> None:
        assert self._main is not None
        learner.tasks.clear()
        self._running += 1
        task = self.spawn(learner, partial(self._main, SimTeam(self, learner)), "training")
        task.waited = learner.waited
        task.on_end = partial(self._ended, learner)

    def _ended(self, learner: SimLearner, task: SimTask) -> None:
        """A training task was killed, has failed, which ends the run, or has come to its end."""
        if task.killed:
            return
        error = task.error or task.pending
        if error is not None:
            raise error
        self._results[learner.rank] = task.result
        self._remove(learner, "has left the team")

    def _remove(self, learner: SimLearner, reason: str) -> None:
        """Take a learner out of everything, and end what it still does."""
        self._running -= 1
        learner.alive = False
        self.control.lose(learner.rank)
        self.messaging.lose(learner.rank)
        self.collectives.lose(learner.rank, reason)
        for task in learner.tasks:
            self.scheduler.kill(task)

    def _crash(self, crash: Crash) -> None:
        learner = self.learners[crash.learner]
        if not learner.alive:
            return
        learner.comm_stats.faults["crash"] += 1
        self._remove(learner, "crashed")
        if crash.restart_after is not None:
            self._restarts += 1
            self.scheduler.call_at(self.now + crash.restart_after, partial(self._restart, learner))

    def _restart(self, learner: SimLearner) -> None:
        self._restarts -= 1
        learner.incarnation += 1
        learner.alive = True
        self.control.restart(learner.rank, learner.incarnation)
        self.messaging.restart(learner.rank)
        self._start(learner)

    def _over(self) -> bool:
        """Nobody runs, and nobody will: who starts anew after another is done would find nothing to do."""
        return self._running == 0 and (bool(self._results) or self._restarts == 0)
