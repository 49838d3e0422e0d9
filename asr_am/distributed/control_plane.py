"""Membership, lease queues and barriers of a team, without I/O.

`coordinator.Coordinator` serves it to learners, real or virtual. It calls the control plane whenever something happens,
and then asks it which of the waiting requests can be answered. `coordinated_backend` is the learner's side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asr_am.distributed.leases import Completion, Lease, LeaseQueue, LossSums, Segment, SegmentRecord, StaleSegment

SegmentId = tuple[int, int]  # epoch and first batch of a segment
START: SegmentId = (-1, -1)  # the position of a learner that has not opened a segment


@dataclass
class MemberState:
    """One learner that is alive, or is being started.

    Attributes:
        incarnation: number of its restarts.
        joined: the others wait for it. A restarted learner joins when it opens a segment.
        segment_id: the segment it is in.
        barrier_no: number of barriers it has reached in that segment.
        drained: it has read the record of that segment.
    """

    incarnation: int = 0
    joined: bool = False
    segment_id: SegmentId = START
    barrier_no: int = 0
    drained: bool = False


@dataclass
class Barrier:
    """One barrier, matched by segment and by its number within the segment.

    Attributes:
        kind: the collective that this barrier belongs to, the same for all learners.
        values: values of the learners that have arrived, by rank. Empty once complete.
        awaited: ranks that were missing at the last look. Some may have arrived or died since, others may have joined.
        result: all values by rank, once complete: all learners that were waited for have arrived. Kept for restarted
            learners, which arrive later.
    """

    kind: str
    segment_id: SegmentId
    values: dict[int, list[float]] = field(default_factory=dict)
    awaited: list[int] = field(default_factory=list)
    result: dict[int, list[float]] | None = None


class ControlPlane:
    """State of one team: who is alive, who holds which batch, and who has reached which barrier.

    Attributes:
        members: state of each learner that is alive or being started, by rank.
    """

    def __init__(self) -> None:
        self.members: dict[int, MemberState] = {}
        self._queues: dict[SegmentId, LeaseQueue] = {}
        self._barriers: dict[tuple[SegmentId, int], Barrier] = {}
        self._newest = START
        self._closed = START

    # membership

    def add(self, rank: int, incarnation: int = 0, *, joined: bool = False) -> None:
        """Adds a learner that starts or restarts. Without `joined`, it joins when it opens a segment."""
        self.members[rank] = MemberState(incarnation, joined)

    def lose(self, rank: int) -> list[int]:
        """Removes a learner that died or finished, and returns the batches that can be leased again."""
        member = self.members.pop(rank, None)
        if member is not None and member.joined and member.segment_id in self._queues:
            self._queues[member.segment_id].lost.append((rank, member.incarnation))
        for barrier in self._barriers.values():
            barrier.values.pop(rank, None)
        return [batch for queue in self._queues.values() for batch in queue.release(rank)]

    @property
    def weights_lost(self) -> bool:
        """True if batches are done since the last checkpoint, and no learner that knows their updates is alive."""
        joined = any(member.joined for member in self.members.values())
        return not joined and any(queue.any_done for queue in self._queues.values())

    def open_segment(self, rank: int, segment: Segment) -> bool:
        """Moves a learner to a segment, and drops what no learner can ask for any more.

        Returns:
            True if the learner joins the team with this call (again).

        Raises:
            StaleSegment: a restarted learner asks for a segment that the others have finished. It would repeat their
                barriers, and could overwrite what they have written since.
            RuntimeError: the others have another segment at this position.
        """
        member, segment_id = self.members[rank], (segment.epoch, segment.begin)
        if not member.joined and (segment_id < self._newest or segment_id <= self._closed):
            raise StaleSegment(
                f"learner {rank} asks for epoch {segment.epoch + 1} from batch {segment.begin}, which the others have "
                "finished; read the last checkpoint again"
            )
        queue = self._queues.setdefault(segment_id, LeaseQueue(segment))
        if queue.segment != segment:
            raise RuntimeError(
                f"learner {rank} disagrees about the segment at epoch {segment.epoch + 1}, batch {segment.begin}: "
                "check that all learners have the same examples and options"
            )
        joins, member.joined = not member.joined, True
        member.segment_id, member.barrier_no, member.drained = segment_id, 0, False
        self._newest = max(self._newest, segment_id)
        self._drop_old()
        return joins

    def _drop_old(self) -> None:
        if len(self._queues) == 1 and all(key[0] in (START, self._newest) for key in self._barriers):
            return  # nothing is older than the newest segment
        oldest = min(member.segment_id for member in self.members.values() if member.joined)
        self._queues = {key: queue for key, queue in self._queues.items() if key >= oldest}
        # a restarted learner may repeat the barriers before the first segment
        self._barriers = {key: b for key, b in self._barriers.items() if key[0] == START or key[0] >= oldest}

    # leases

    def lease(self, rank: int) -> tuple[bool, Lease | None]:
        """Returns (True, next batch), (True, None) if all are done, or (False, None) if the learner has to wait.

        A learner has to wait while all batches are leased and some are not done: their owners may die.
        """
        queue = self._queue(rank)
        lease = queue.lease(rank, self.members[rank].incarnation)
        return lease is not None or queue.finished, lease

    def complete(self, completion: Completion, sums: LossSums) -> bool:
        """Marks a batch as done. Returns True if the segment is finished now. Raises as `LeaseQueue.complete`."""
        queue = self._queue(completion.owner)
        queue.complete(completion, sums)
        return queue.finished

    def totals(self, rank: int) -> LossSums:
        """Returns the sums over all batches done so far in the segment that the learner is in."""
        return self._queue(rank).totals

    def stop(self, rank: int) -> None:
        """Ends the segment that a learner is in with the batches that were handed out."""
        self._queue(rank).stop()

    def record(self, rank: int) -> SegmentRecord:
        """Returns the record of the finished segment that the learner is in. Later deaths are in later records only."""
        self.members[rank].drained = True
        return self._queue(rank).record()

    def _queue(self, rank: int) -> LeaseQueue:
        member = self.members.get(rank)
        if member is None or member.segment_id not in self._queues:
            raise ValueError(f"learner {rank} has no open segment")
        return self._queues[member.segment_id]

    # barriers

    def arrive(self, rank: int, kind: str, values: list[float]) -> Barrier:
        """Returns the barrier that a learner has reached, with its values added unless the barrier is complete.

        Raises:
            RuntimeError: other learners have reached this barrier with another kind of collective.
        """
        member = self.members[rank]
        member.barrier_no += 1
        key = (member.segment_id, member.barrier_no)
        barrier = self._barriers.setdefault(key, Barrier(kind, member.segment_id))
        if barrier.kind != kind:
            raise RuntimeError(f"learner {rank} is out of step: it calls {kind} where others called {barrier.kind}")
        if barrier.result is None:
            barrier.values[rank] = values
        return barrier

    def complete_barrier(self, barrier: Barrier) -> None:
        """Completes a barrier if all learners that can reach it have arrived.

        The first barrier that only drained learners reach closes their segment: nobody joins it any more.
        """
        if not barrier.values or self._waits(barrier):
            return
        barrier.result, barrier.values = dict(sorted(barrier.values.items())), {}
        if all(self.members[rank].drained for rank in barrier.result):
            self._closed = max(self._closed, barrier.segment_id)

    def _waits(self, barrier: Barrier) -> bool:
        """Returns whether a learner is missing at a barrier. Looks first at those that were missing before."""
        while barrier.awaited:
            if self._is_awaited(barrier.awaited[-1], barrier):
                return True
            barrier.awaited.pop()
        barrier.awaited = [rank for rank in self.members if self._is_awaited(rank, barrier)]
        return bool(barrier.awaited)

    def _is_awaited(self, rank: int, barrier: Barrier) -> bool:
        if rank in barrier.values or rank not in self.members:
            return False
        member = self.members[rank]  # a learner in a later segment does not come back to this barrier
        return member.joined and member.segment_id <= barrier.segment_id
