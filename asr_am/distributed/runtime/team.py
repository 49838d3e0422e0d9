"""`ProcessTeam`: one process' end of a team of real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from asr_am.distributed.leases import Gradient, LearnerLost, Leases, Segment
from asr_am.distributed.runtime.event_loop import Closed, Reactor, TeamEvent, TeamLock, Waiting
from asr_am.distributed.runtime.fault_injection import Pace
from asr_am.distributed.runtime.membership import Roster
from asr_am.distributed.runtime.messaging import PostOffice
from asr_am.distributed.team import Charge, Gather, Group, Letter, Usage, Work

CLOSING = 5.0  # seconds for communication tasks to end


class Together(Protocol):
    """What learners do all together: a `Gang` or `Supervised`. everybody: the collectives of all."""

    @property
    def everybody(self) -> Group: ...
    def split(self, groups: Sequence[Sequence[int]]) -> Group | None: ...
    def leases(self, segment: Segment, in_step: bool) -> Leases: ...
    def gather(self, values: Tensor) -> dict[int, Tensor]: ...
    def average(self, x: Tensor) -> Tensor: ...
    def close(self) -> None: ...


class ProcessTeam:
    """Made by `connect`, in the thread of the training task."""

    clock: Literal["wall", "virtual"] = "wall"

    def __init__(
        self, incarnation: int, hosts: Sequence[int], usage: Usage, roster: Roster, waiting: Waiting, reactor: Reactor,
        office: PostOffice, together: Together, pace: Pace,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.incarnation, self.usage = roster.rank, roster.size, incarnation, usage
        self.hosts = tuple(hosts)
        self._roster, self._waiting, self._reactor, self._office = roster, waiting, reactor, office
        self._together, self._pace = together, pace
        self._tasks: list[threading.Thread] = []
        self._closed = False

    def alive(self) -> Sequence[int]:
        self._waiting.check()
        return self._roster.alive()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Ends early where the team does."""
        self._waiting.pause(seconds)

    def charge(self, kind: Charge, elements: int) -> None:
        pass

    def computing(self, gradient: Gradient) -> Gradient:
        return self._pace.apply(gradient, self.sleep)

    def start_all_reduce_mean(self, x: Tensor) -> Work:
        self._waiting.check()
        return self._together.everybody.start_all_reduce_mean(x)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        self._waiting.check()
        return self._together.everybody.start_all_gather(x, lengths)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        self._waiting.check()
        self._together.everybody.broadcast(x, source)

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        self._waiting.check()
        return self._together.split(groups)

    def accept(self, tag: str, *lengths: int) -> None:
        self._office.accept(tag, lengths)

    def post(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        if to == self.rank or not 0 <= to < self.size:
            raise ValueError(f"learner {self.rank} of {self.size} writes to {to}")
        self._office.post(to, tag, clock, tensors)

    def collect(self, tag: str, source: int | None = None, timeout: float | None = None) -> Letter | None:
        return self._office.collect(tag, source, timeout)

    def spawn(self, task: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                task()
            except Closed:
                pass
            except BaseException as error:
                self._waiting.fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._tasks.append(thread)
        thread.start()
        return thread

    def lock(self) -> TeamLock:
        return TeamLock(self._waiting)

    def event(self) -> TeamEvent:
        return TeamEvent(self._waiting)

    def leases(self, segment: Segment, in_step: bool) -> Leases:
        self._waiting.check()
        self._pace.full = max(segment.frames, default=0)
        return self._together.leases(segment, in_step)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        self._waiting.check()
        return self._together.gather(values)

    def average(self, x: Tensor) -> Tensor:
        self._waiting.check()
        return self._together.average(x)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        failure = self._waiting.failure
        self._together.close()
        self._office.leave(failure.rank if isinstance(failure, LearnerLost) else None)
        self._waiting.close()
        for task in self._tasks:
            task.join(CLOSING)
        self._reactor.stop()
