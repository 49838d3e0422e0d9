"""Collectives of a virtual team and its groups: real values, modelled durations, and their effect on computing speed.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from asr_am.distributed.simulator.network import SimNetwork, ring_share
from asr_am.distributed.simulator.scheduler import Condition, Scheduler
from asr_am.distributed.simulator.sim_learner import SimLearner
from asr_am.distributed.team import LearnerLost
from asr_am.distributed.wire_dtype import mean_in_order, rounded, travels_as


@dataclass
class Collective:
    """One collective of a group.

    Attributes:
        number: number of the collective in the group, counted from 0.
        lengths: length of each member's tensor. All members must give the same.
        end: called when its transfer begins. Returns the time at which it is complete.
        finish: computes the result from all tensors. May change them in place.
        tensors: tensors of the members that have started it, by rank in the group.
    """

    number: int
    kind: str
    lengths: tuple[int, ...]
    end: Callable[[], float]
    finish: Callable[[list[Tensor]], list[Tensor]]
    tensors: dict[int, Tensor] = field(default_factory=dict)
    result: list[Tensor] = field(default_factory=list)
    complete: bool = False


class Collectives:
    """Collectives of the team and of all its groups. No collective completes any more once a learner is lost.

    Args:
        overlap_speed: relative speed of computing during a learner's own transfer.
    """

    def __init__(
        self, scheduler: Scheduler, learners: Sequence[SimLearner], network: SimNetwork, overlap_speed: float
    ) -> None:
        self.scheduler, self.network = scheduler, network
        self.changed = Condition(scheduler)  # a collective is complete, or a learner is lost
        self.lost: tuple[int, str] | None = None
        self._overlap_speed = overlap_speed
        self._learners = learners
        self._transfers = [0] * len(learners)
        self._computing: set[int] = set()  # learners that compute
        self._speed_changed = [Condition(scheduler) for _ in learners]
        self._groups: dict[tuple[int, tuple[int, ...]], CollectiveGroup] = {}
        self.world = CollectiveGroup(self, learners)

    def group(self, split: int, ranks: tuple[int, ...]) -> CollectiveGroup:
        """Returns the group of these ranks made by the `split`th call of `Team.split`, one object for all members."""
        return self._groups.setdefault((split, ranks), CollectiveGroup(self, [self._learners[rank] for rank in ranks]))

    def compute(self, rank: int, seconds: float) -> None:
        """Waits for the time that computing takes which takes `seconds` without transfers."""
        scheduler, left = self.scheduler, seconds
        self._computing.add(rank)
        try:
            while left > 0:
                begin, speed = scheduler.now, self._overlap_speed if self._transfers[rank] else 1.0
                if not self._speed_changed[rank].suspend("computing", left / speed):
                    return
                left -= (scheduler.now - begin) * speed
        finally:
            self._computing.discard(rank)

    def lose(self, rank: int, reason: str) -> None:
        """Fails all collectives in progress and all later ones."""
        if self.lost is None:
            self.lost = (rank, reason)
        self._transfers = [0] * len(self._transfers)
        for rank in sorted(self._computing):
            self._speed_changed[rank].wake()
        self.changed.wake()

    def check(self) -> None:
        if self.lost is not None:
            raise LearnerLost(*self.lost)

    def transfer(self, members: Sequence[SimLearner], change: int) -> None:
        """Notes that a transfer of these members begins (+1) or ends (-1)."""
        if self.lost is None:
            for member in members:
                self._transfers[member.rank] += change
                self._speed_changed[member.rank].wake()


class CollectiveGroup:
    """Collectives of one group, transferred one after the other, each from when its last member starts it."""

    def __init__(self, collectives: Collectives, members: Sequence[SimLearner]) -> None:
        self._all, self.members, self.network = collectives, members, collectives.network
        self.hosts = [member.host for member in members]
        self._started = [0] * len(members)
        self._pending: dict[int, Collective] = {}
        self._ready: deque[Collective] = deque()  # started by all members. The first is transferred

    def start(
        self, rank: int, kind: str, x: Tensor, lengths: Sequence[int], end: Callable[[], float],
        finish: Callable[[list[Tensor]], list[Tensor]],
    ) -> Collective:  # fmt: skip
        """Adds a member's tensor to its next collective.

        Args:
            rank: rank in the group.
            x: the member's tensor [N].
            end: called when the transfer begins. Returns the time at which it ends.

        Raises:
            LearnerLost: a learner was lost.
            RuntimeError: members have started different operations.
        """
        self._all.check()
        number = self._started[rank]
        self._started[rank] += 1
        fresh = Collective(number, kind, tuple(lengths), end, finish)
        collective = self._pending.setdefault(number, fresh)
        who = f"{kind} {number}: learner {self.members[rank].rank}"
        if kind != collective.kind:
            raise RuntimeError(f"{who} starts it where others start {collective.kind}")
        if len(x) != collective.lengths[rank] or fresh.lengths != collective.lengths:
            raise RuntimeError(f"{who} has {len(x)} elements, others {collective.lengths[rank]}")
        collective.tensors[rank] = x
        if len(collective.tensors) == len(self.members):
            self._ready.append(collective)
            if len(self._ready) == 1:
                self._transfer(collective)
        return collective

    def done(self, collective: Collective) -> bool:
        return collective.complete or self._all.lost is not None

    def wait(self, collective: Collective) -> None:
        self._all.changed.wait_for(
            lambda: self.done(collective),
            f"{collective.kind} {collective.number}, started by {len(collective.tensors)} of {len(self.members)}",
        )
        if not collective.complete:
            self._all.check()

    def _transfer(self, collective: Collective) -> None:
        self._all.transfer(self.members, 1)
        self._all.scheduler.call_at(collective.end(), lambda: self._finish(collective))

    def _finish(self, collective: Collective) -> None:
        if self._all.lost is not None:
            return
        del self._pending[collective.number]
        self._ready.popleft()
        self._all.transfer(self.members, -1)
        with torch.no_grad():
            collective.result = collective.finish([collective.tensors[rank] for rank in range(len(self.members))])
        collective.tensors.clear()
        collective.complete = True
        self._all.changed.wake()
        if self._ready:
            self._transfer(self._ready[0])


def replace_by_mean(tensors: list[Tensor], wire: torch.dtype) -> list[Tensor]:
    mean = rounded(mean_in_order(rounded(x, wire) for x in tensors), wire)
    for x in tensors:
        x.copy_(mean)
    return []


@dataclass
class SimWork:
    """A collective in progress."""

    _group: CollectiveGroup
    _collective: Collective

    def done(self) -> bool:
        return self._group.done(self._collective)

    def wait(self) -> None:
        self._group.wait(self._collective)


@dataclass
class SimGather:
    """An all-gather in progress."""

    _group: CollectiveGroup
    _collective: Collective

    def wait(self) -> list[Tensor]:
        self._group.wait(self._collective)
        return self._collective.result


class SimGroup:
    """The `Group` of one member of a collective group.

    Args:
        rank: rank in the group.
        modelled: maps bytes of the trained model to bytes of the workload.
        wire: type in which float32 tensors are sent.
    """

    def __init__(
        self, group: CollectiveGroup, rank: int, modelled: Callable[[float], float], wire: torch.dtype
    ) -> None:
        self.rank, self.size = rank, len(group.members)
        self._group, self._modelled, self._wire = group, modelled, wire

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> SimWork:
        nbytes, itemsize = self._nbytes(x), self._wire.itemsize
        count = self._modelled(nbytes) if modelled is None else modelled * itemsize
        self._count(self.rank + 1, ring_share(self.size) * nbytes, ring_share(self.size) * count)
        end = partial(self._group.network.all_reduce, self._group.hosts, count)
        finish = partial(replace_by_mean, wire=self._wire)
        return SimWork(self._group, self._group.start(self.rank, "all-reduce", x, [len(x)] * self.size, end, finish))

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> SimGather:
        sizes = [len(x)] * self.size if lengths is None else lengths
        scale = self._modelled if lengths is not None else float
        counts = [scale(size * travels_as(x, self._wire).itemsize) for size in sizes]
        for other in range(1, self.size):
            self._count(self.rank + other, self._nbytes(x), counts[self.rank])
        end = partial(self._group.network.exchange, self._group.hosts, counts)
        sent = rounded(x.clone(), self._wire)
        return SimGather(
            self._group, self._group.start(self.rank, "all-gather", sent, sizes, end, lambda tensors: tensors)
        )

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        def copy(tensors: list[Tensor]) -> list[Tensor]:
            sent = rounded(tensors[source], self._wire)
            for tensor in tensors:
                tensor.copy_(sent)
            return []

        if (self.rank + 1) % self.size != source:  # the last of the chain sends nothing
            self._count(self.rank + 1, self._nbytes(x))
        end = partial(self._group.network.broadcast, self._group.hosts, self._modelled(self._nbytes(x)))
        started = self._group.start(self.rank, f"broadcast from {source}", x, [len(x)] * self.size, end, copy)
        self._group.wait(started)

    def _nbytes(self, x: Tensor) -> int:
        return len(x) * travels_as(x, self._wire).itemsize

    def _count(self, to: int, count: float, modelled: float | None = None) -> None:
        """Counts bytes that this member sends to another."""
        if self.size > 1:
            comm_stats = self._group.members[self.rank].comm_stats
            comm_stats.bytes_sent[self._group.members[to % self.size].rank] += round(count)
            comm_stats.modelled_bytes += self._modelled(round(count)) if modelled is None else modelled
