"""Runs of a virtual cluster: learners start, crash and restart at virtual times."""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)
T = TypeVar("T")
RESTART_SECONDS = 1.0  # virtual seconds between the end of a team and its next start


class SimCluster:
    """A virtual cluster for one run. The same seed gives the same run, to the last bit.

    Attributes:
        hardware: the cluster that is simulated, with its faults.
        workload: the model whose computing time and size is simulated.
        seed: seed of all random streams.
        learners: state of each learner, by rank.
        ranks: ranks that began, or began again when the team was restarted.
        gone: ranks that crashed and are not restarted.
        scheduler, network, collectives, messaging, control: the parts of the simulator.
    """

    def __init__(
        self, hardware: Cluster, workload: Workload, learners: int, seed: int, model_elements: int | None = None
    ) -> None:
        """Builds the cluster.

        Args:
            hardware: the cluster to simulate.
            workload: the model to simulate.
            learners: number of learners.
            seed: seed of all random streams.
            model_elements: number of elements of the model that is trained. Needed if the workload has a size in bytes:
                messages are then timed as if the model had that size.

        Raises:
            InputError: the cluster has too few devices, or the workload has no figures for the cluster's device.
        """
        hardware.check(learners)
        workload.check(hardware.device)
        if workload.bytes is not None and model_elements is None:
            raise ValueError("the workload has a size in bytes: model_elements must be given")
        self.hardware, self.workload, self.seed, self._model_elements = hardware, workload, seed, model_elements
        self.scheduler = Scheduler()
        self.learners = [SimLearner(rank, hardware.host_of(rank)) for rank in range(learners)]
        self.network = SimNetwork(hardware)
        self.collectives = Collectives(self.scheduler, self.learners, self.network, hardware.overlap_speed)
        streams = [random_stream(seed, rank, 0, "mail") for rank in range(learners)]
        self.messaging = SimMessaging(
            self.scheduler, self.learners, self.network, self.modelled_bytes, hardware.faults, streams
        )
        self.control = SimControl(self.scheduler, dict.fromkeys(range(learners), 0))
        self.ranks: tuple[int, ...] = tuple(range(learners))
        self.gone: set[int] = set()
        self._main: Callable[[SimTeam], Any] | None = None
        self._results: dict[int, Any] = {}
        self._running = 0  # number of live learners
        self._restarts: set[int] = set()  # ranks whose restart is due
        self._team_restarts = 0

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.scheduler.now

    @property
    def comm_stats(self) -> list[CommStats]:
        """Communication statistics of each learner, by rank."""
        return [learner.comm_stats for learner in self.learners]

    def modelled_bytes(self, count: float) -> float:
        """Returns the bytes of the workload that `count` bytes of the trained model stand for."""
        if self.workload.bytes is None or self._model_elements is None:
            return count
        return count * self.workload.bytes / (self._model_elements * FLOAT_BYTES)

    def run(self, main: Callable[[SimTeam], T]) -> dict[int, T]:
        """Runs `main` once for each learner, and again for each restart.

        Args:
            main: the training task of one incarnation of a learner.

        Returns:
            What `main` returned, by rank, without learners that did not finish.

        Raises:
            LearnerLost: no learner was left.
            RuntimeError: all learners wait for each other.
            Exception: whatever `main` raises.
        """
        if self._main is not None:
            raise RuntimeError("a SimCluster runs once; create another one")
        self._main = main
        for learner in self.learners:
            self._start(learner)
        for crash in self.hardware.faults.crashes:
            self.scheduler.call_at(crash.at, partial(self._crash, crash))
        try:
            self.scheduler.run(self._is_over)
        finally:
            self.scheduler.kill_all()
        if not self._results:
            raise LearnerLost(self.learners[0].rank, "and all others crashed")
        return dict(sorted(self._results.items()))

    def spawn(self, learner: SimLearner, function: Callable[[], object], name: str) -> SimTask:
        """Starts a task of a learner. Its errors are raised in the training task."""
        purpose = f"torch {len(learner.tasks)} {name}"
        seed = random_stream(self.seed, learner.rank, learner.incarnation, purpose).integers(2**62)
        task = self.scheduler.spawn(function, f"learner {learner.rank} {name!r}", int(seed))
        task.on_end = lambda task: self.scheduler.throw(learner.training, task.error) if task.error else None
        learner.tasks.append(task)
        return task

    def _start(self, learner: SimLearner, rejoins: bool = False) -> None:
        assert self._main is not None
        learner.tasks.clear()
        self._running += 1
        task = self.spawn(learner, partial(self._main, SimTeam(self, learner, rejoins)), "training")
        task.waited = learner.waited
        task.on_end = partial(self._on_training_end, learner)

    def _on_training_end(self, learner: SimLearner, task: SimTask) -> None:
        """Handles the end of a training task. An error ends the run."""
        if task.killed:
            return
        error = task.error or task.pending
        if error is not None:
            raise error
        self._results[learner.rank] = task.result
        self._remove(learner, "has left the team")

    def _remove(self, learner: SimLearner, reason: str) -> None:
        """Removes a learner that crashed or finished, and kills its tasks."""
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
            self._restarts.add(learner.rank)
            restart = partial(self._restart, learner, learner.incarnation)
            self.scheduler.call_at(self.now + crash.restart_after, restart)
        else:
            self.gone.add(learner.rank)
        if self.control.weights_lost and not self._results:
            self.restart_team(f"learner {learner.rank} was the last with the updates since the last checkpoint")

    def _restart(self, learner: SimLearner, incarnation: int) -> None:
        if learner.incarnation != incarnation:
            return  # it was restarted with the team
        self._restarts.discard(learner.rank)
        learner.incarnation += 1
        learner.alive = True
        self.control.restart(learner.rank, learner.incarnation)
        self.messaging.restart(learner.rank)
        self._start(learner, rejoins=True)

    def restart_team(self, reason: str) -> None:
        """Crashes all learners now, and starts them again after `RESTART_SECONDS`."""
        self.scheduler.call_at(self.now, partial(self._restart_team, reason, self._team_restarts))

    def _restart_team(self, reason: str, before: int) -> None:
        if before != self._team_restarts:
            return  # others have asked for it, too
        self._team_restarts += 1
        log.warning("%s: all learners start again from the last checkpoint", reason)
        begin = sorted(self._restarts | {learner.rank for learner in self.learners if learner.alive})
        self._restarts = set(begin)
        for learner in self.learners:
            if learner.alive:
                self._remove(learner, "is restarted")
        for rank in begin:
            self.learners[rank].incarnation += 1
        self.scheduler.call_at(self.now + RESTART_SECONDS, partial(self._begin_again, tuple(begin)))

    def _begin_again(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self._restarts = ranks, set()
        self.control = SimControl(self.scheduler, {rank: self.learners[rank].incarnation for rank in ranks})
        for rank in ranks:
            self.learners[rank].alive = True
        for rank in ranks:
            self.messaging.restart(rank)
            self._start(self.learners[rank])

    def _is_over(self) -> bool:
        """Returns True if no learner runs. A restart that is due counts only while no learner has finished."""
        return self._running == 0 and (bool(self._results) or not self._restarts)
