"""The control plane of a virtual team: who is at which segment, shared lease tables, and meetings of the living."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit
from torch import Tensor

from asr_am.distributed.leases import (
    Completion,
    Lease,
    LeaseQueue,
    LossSums,
    Segment,
    SegmentRecord,
    StaleSegment,
    StepResult,
    step_loss_sums,
)
from asr_am.distributed.simulator.scheduler import Condition, Scheduler
from asr_am.distributed.simulator.sim_learner import SimLearner

SegmentId = tuple[int, int]  # epoch and first batch of a segment
START: SegmentId = (-1, -1)  # before the first


@dataclass
class SimBarrier:
    """Values of the living, by rank, until all are there; then the result for everybody, late ones too."""

    kind: str
    values: dict[int, Tensor] = field(default_factory=dict)
    result: Any = None
    complete: bool = False


class SimControl:
    """Meetings are matched by segment and by how many a learner had in it. A restarted learner is waited for once it
    has opened a segment; what the others met about before is answered to it from memory.
    """

    def __init__(self, scheduler: Scheduler, members: Sequence[SimLearner]) -> None:
        self._scheduler, self._learners = scheduler, members
        self._places: list[SegmentId] = [START] * len(members)
        self._met = [0] * len(members)
        self._newest = START
        self._tables: dict[SegmentId, LeaseQueue] = {}
        self._meetings: dict[tuple[SegmentId, int], SimBarrier] = {}
        self._changed = Condition(scheduler)

    def open(self, rank: int, segment: Segment) -> None:
        """Learner `rank` goes on to a segment."""
        learner, place = self._learners[rank], (segment.epoch, segment.begin)
        if not learner.joined and place < self._newest:
            raise StaleSegment(
                f"learner {rank} asks for epoch {segment.epoch + 1} from batch {segment.begin}, which the others have "
                "finished; read the last checkpoint again"
            )
        learner.joined = True
        self._newest = max(self._newest, place)
        self._places[rank], self._met[rank] = place, 0
        self._forget()

    def table(self, segment: Segment) -> LeaseQueue:
        """The one table of a segment."""
        place = (segment.epoch, segment.begin)
        if place not in self._tables:
            self._tables[place] = LeaseQueue(segment)
        if self._tables[place].segment != segment:
            raise RuntimeError(f"learners disagree about the segment at {place}")
        return self._tables[place]

    def meet(self, rank: int, kind: str, value: Tensor, combine: Callable[[dict[int, Tensor]], Any]) -> Any:
        """Wait for all living learners' values; what `combine` makes of them, ordered by rank."""
        key = (self._places[rank], self._met[rank])
        self._met[rank] += 1
        meeting = self._meetings.setdefault(key, SimBarrier(kind))
        if meeting.kind != kind:
            raise RuntimeError(f"learner {rank} is out of step: it calls {kind} where others called {meeting.kind}")
        if not meeting.complete:
            meeting.values[rank] = value

        def ready() -> bool:
            if not meeting.complete and not self._missing(meeting):
                meeting.result = combine({r: meeting.values[r] for r in sorted(meeting.values)})
                meeting.complete = True
                meeting.values.clear()
                self._changed.wake()
            return meeting.complete

        self._changed.wait_for(ready, f"the others to {kind}")
        return meeting.result

    def wait_for_lease(self, rank: int, incarnation: int, table: LeaseQueue) -> Lease | None:
        """A lease, once one is free; None when all batches are done."""
        lease: Lease | None = None

        def ready() -> bool:
            nonlocal lease
            learner = self._learners[rank]
            if not learner.alive or learner.incarnation != incarnation:
                raise GreenletExit
            lease = table.lease(rank, incarnation)
            return lease is not None or table.finished

        self._changed.wait_for(ready, "a lease")
        return lease

    def complete(self, table: LeaseQueue, completion: Completion, totals: LossSums) -> None:
        table.complete(completion, totals)
        if table.finished:
            self._changed.wake()

    def lose(self, rank: int) -> None:
        """Hand out a dead learner's leases again, and let nobody wait for it."""
        for table in self._tables.values():
            table.release(rank)
        for meeting in self._meetings.values():
            meeting.values.pop(rank, None)
        self._places[rank], self._met[rank] = START, 0
        self._changed.wake()

    def _missing(self, meeting: SimBarrier) -> list[int]:
        expected = (m.rank for m in self._learners if m.alive and m.joined)
        return [rank for rank in expected if rank not in meeting.values]

    def _forget(self) -> None:
        """Drop what no learner can ask for any more."""
        oldest = min(self._places[m.rank] for m in self._learners if m.alive and m.joined)
        for key in [key for key in self._meetings if START < key[0] < oldest]:
            del self._meetings[key]
        for place in [place for place in self._tables if place < oldest]:
            del self._tables[place]


class SimQueueLeases:
    """One learner's view of a table (`leases.Leases`)."""

    ahead = False

    def __init__(self, control: SimControl, table: LeaseQueue, rank: int, incarnation: int) -> None:
        self._control, self._table, self._rank, self._incarnation = control, table, rank, incarnation

    def lease(self) -> Lease | None:
        return self._control.wait_for_lease(self._rank, self._incarnation, self._table)

    def complete(self, step_result: StepResult) -> None:
        assert step_result.lease.batch is not None, "a table has no idle turns"
        completion = Completion(
            step_result.lease.batch, self._rank, self._incarnation, step_result.examples, step_result.applied
        )
        self._control.complete(self._table, completion, step_loss_sums(step_result))

    def totals(self) -> LossSums:
        return self._table.totals

    def record(self) -> SegmentRecord:
        return self._table.record()
