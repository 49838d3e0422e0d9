"""A virtual cluster: many learners in this process, real arithmetic, modelled time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from asr_am.distributed.cluster_config import Cluster, Crash, Workload
from asr_am.distributed.simulator.collectives import Collectives
from asr_am.distributed.simulator.control import Control
from asr_am.distributed.simulator.messaging import FLOAT_BYTES, Mail
from asr_am.distributed.simulator.network import Network
from asr_am.distributed.simulator.scheduler import Scheduler, Task
from asr_am.distributed.simulator.sim_learner import Member, random_stream
from asr_am.distributed.simulator.team import SimTeam
from asr_am.distributed.team import LearnerLost, Usage

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
        self.members = [Member(rank, hardware.host_of(rank)) for rank in range(learners)]
        self.network = Network(hardware)
        self.collectives = Collectives(self.scheduler, self.members, self.network, hardware.overlap_speed)
        streams = [random_stream(seed, rank, 0, "mail") for rank in range(learners)]
        self.mail = Mail(self.scheduler, self.members, self.network, self.modelled_bytes, hardware.faults, streams)
        self.control = Control(self.scheduler, self.members)
        self._main: Callable[[SimTeam], Any] | None = None
        self._results: dict[int, Any] = {}
        self._running = 0  # learners
        self._restarts = 0  # to come

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.scheduler.now

    @property
    def usage(self) -> list[Usage]:
        """By rank."""
        return [member.usage for member in self.members]

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
        for member in self.members:
            self._start(member)
        for crash in self.hardware.faults.crashes:
            self.scheduler.call_at(crash.at, partial(self._crash, crash))
        try:
            self.scheduler.run(self._over)
        finally:
            self.scheduler.kill_all()
        if not self._results:
            raise LearnerLost(self.members[0].rank, "and all others crashed")
        return dict(sorted(self._results.items()))

    def spawn(self, member: Member, function: Callable[[], object], name: str) -> Task:
        """A task of a learner; an error in it is raised in the training task."""
        purpose = f"torch {len(member.tasks)} {name}"
        seed = random_stream(self.seed, member.rank, member.incarnation, purpose).integers(2**62)
        task = self.scheduler.spawn(function, f"learner {member.rank} {name!r}", int(seed))
        task.on_end = lambda task: self.scheduler.throw(member.training, task.error) if task.error else None
        member.tasks.append(task)
        return task

    def _start(self, member: Member) -> None:
        assert self._main is not None
        member.tasks.clear()
        self._running += 1
        task = self.spawn(member, partial(self._main, SimTeam(self, member)), "training")
        task.waited = member.waited
        task.on_end = partial(self._ended, member)

    def _ended(self, member: Member, task: Task) -> None:
        """A training task was killed, has failed, which ends the run, or has come to its end."""
        if task.killed:
            return
        error = task.error or task.pending
        if error is not None:
            raise error
        self._results[member.rank] = task.result
        self._remove(member, "has left the team")

    def _remove(self, member: Member, reason: str) -> None:
        """Take a learner out of everything, and end what it still does."""
        self._running -= 1
        member.alive = False
        self.control.lose(member.rank)
        self.mail.lose(member.rank)
        self.collectives.lose(member.rank, reason)
        for task in member.tasks:
            self.scheduler.kill(task)

    def _crash(self, crash: Crash) -> None:
        member = self.members[crash.learner]
        if not member.alive:
            return
        member.usage.faults["crash"] += 1
        self._remove(member, "crashed")
        if crash.restart_after is not None:
            self._restarts += 1
            self.scheduler.call_at(self.now + crash.restart_after, partial(self._restart, member))

    def _restart(self, member: Member) -> None:
        self._restarts -= 1
        member.incarnation += 1
        member.alive, member.joined = True, False
        self.mail.restart(member.rank)
        self._start(member)

    def _over(self) -> bool:
        """Nobody runs, and nobody will: who starts anew after another is done would find nothing to do."""
        return self._running == 0 and (bool(self._results) or self._restarts == 0)
