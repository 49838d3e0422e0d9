"""The control plane of a virtual team, served to its tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from greenlet import GreenletExit
from torch import Tensor

from asr_am.distributed.control_plane import ControlPlane
from asr_am.distributed.leases import Completion, Lease, LossSums, Segment, SegmentRecord
from asr_am.distributed.simulator.scheduler import Condition, Scheduler


class SimControl:
    """Front of `ControlPlane` for virtual learners: a request that has to wait suspends the task that made it.

    Waiting tasks try again in the order in which they were suspended, after every death, every finished segment and
    every complete barrier.
    """

    def __init__(self, scheduler: Scheduler, incarnations: Mapping[int, int]) -> None:
        """Begins with these incarnations of learners, by rank."""
        self._plane: ControlPlane[Tensor] = ControlPlane()
        for rank, incarnation in incarnations.items():
            self._plane.add(rank, incarnation, joined=True)
        self._changed = Condition(scheduler)

    @property
    def weights_lost(self) -> bool:
        """See `ControlPlane.weights_lost`."""
        return self._plane.weights_lost

    # from the cluster

    def lose(self, rank: int) -> None:
        """Releases the leases of a learner that died or finished, and lets the others go on without it."""
        self._plane.lose(rank)
        self._changed.wake()

    def restart(self, rank: int, incarnation: int) -> None:
        self._plane.add(rank, incarnation)

    # from learners

    def open_segment(self, rank: int, segment: Segment) -> None:
        """Moves a learner to a segment. Raises StaleSegment if it was restarted and is behind the others."""
        self._plane.open_segment(rank, segment)

    def barrier(self, rank: int, kind: str, value: Tensor, combine: Callable[[dict[int, Tensor]], Any]) -> Any:
        """Waits for the values of all live learners.

        Args:
            rank: the learner that calls.
            kind: name of the collective, the same for all learners.
            value: its value, not to be changed before the call returns.
            combine: makes the result of the values, given by rank in ascending order. Called once for all learners.

        Returns:
            The result, one object for all learners.
        """
        if rank not in self._plane.members:
            raise GreenletExit  # the `finally` clause of a learner that is being killed
        barrier = self._plane.arrive(rank, kind, value)

        def ready() -> bool:
            values = self._plane.complete_barrier(barrier)
            if values is not None:
                barrier.result = combine(values)
                self._changed.wake()
            return barrier.complete

        self._changed.wait_for(ready, f"the others to {kind}")
        return barrier.result

    def lease(self, rank: int, incarnation: int) -> Lease | None:
        """Waits for a free batch. Returns None when all batches are done."""
        lease: Lease | None = None

        def ready() -> bool:
            nonlocal lease
            member = self._plane.members.get(rank)
            if member is None or member.incarnation != incarnation:
                raise GreenletExit  # the `finally` clause of a learner that is being killed
            answered, lease = self._plane.lease(rank)
            return answered

        self._changed.wait_for(ready, "a lease")
        return lease

    def complete(self, completion: Completion, sums: LossSums) -> None:
        if self._plane.complete(completion, sums):
            self._changed.wake()

    def totals(self, rank: int) -> LossSums:
        return self._plane.totals(rank)

    def record(self, rank: int) -> SegmentRecord:
        return self._plane.record(rank)
