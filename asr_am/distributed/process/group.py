"""Collectives of torch.distributed among the members of one process group: those of a gang, or of a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from asr_am.distributed.team import Usage

Complete = Callable[[dist.Work], None]
"""Wait for a collective on the CPU; LearnerLost where it never will be complete."""


class GangGroup:
    """The `Group` of learners `ranks` of a gang, the `rank`th of which this process is."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, usage: Usage, complete: Complete
    ) -> None:
        self.rank, self.size = rank, len(ranks)
        self._group, self._ranks, self._usage, self._complete = group, ranks, usage, complete

    def start_all_reduce_mean(self, x: Tensor) -> Mean:
        self._count(self.rank + 1, round(2 * (self.size - 1) / self.size * x.nbytes))
        return Mean(UnderWay(dist.all_reduce(x, group=self._group, async_op=True), x, self._complete), x, self.size)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Rows:
        """Each sends its x to each other, so that no byte of padding goes over the wire."""
        sizes = [len(x)] * self.size if lengths is None else list(lengths)
        received, sent = x.new_empty(sum(sizes)), x.repeat(self.size)
        for other in range(1, self.size):
            self._count(self.rank + other, x.nbytes)
        work = dist.all_to_all_single(received, sent, sizes, [len(x)] * self.size, group=self._group, async_op=True)
        return Rows(UnderWay(work, sent, self._complete), received, sizes)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        if (self.rank + 1) % self.size != source:
            self._count(self.rank + 1, x.nbytes)
        work = dist.broadcast(x, self._ranks[source], group=self._group, async_op=True)
        UnderWay(work, x, self._complete).wait()

    def _count(self, to: int, count: int) -> None:
        """Bytes that this member sends to another."""
        if self.size > 1:
            self._usage.bytes_sent[self._ranks[to % self.size]] += count


class UnderWay:
    """A collective that still reads or writes `x`."""

    def __init__(self, work: dist.Work, x: Tensor, complete: Complete) -> None:
        self._work, self._x, self._complete = work, x, complete

    def wait(self) -> None:
        if self._x.is_cuda:
            self._work.wait()  # the stream does, not this thread
        else:
            self._complete(self._work)


class Mean:
    """A sum under way that becomes a mean."""

    def __init__(self, sum_under_way: UnderWay, x: Tensor, size: int) -> None:
        self._sum, self._x, self._size = sum_under_way, x, size
        self._complete = False

    def wait(self) -> None:
        if self._complete:
            return
        self._sum.wait()
        self._x.div_(self._size)
        self._complete = True


class Rows:
    """An all-gather under way."""

    def __init__(self, work: UnderWay, received: Tensor, lengths: Sequence[int]) -> None:
        self._work, self._received, self._lengths = work, received, lengths

    def wait(self) -> list[Tensor]:
        self._work.wait()
        return list(torch.split(self._received, list(self._lengths)))
