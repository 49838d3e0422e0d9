"""Collectives over MPI, for whole teams and groups.

An all-reduce is an all-to-all of parts, a sum of each part in the order of ranks, and an all-gather of the means. Its
bits are those of the virtual cluster then, whatever algorithms an MPI prefers, and it sends as many bytes as a ring.
Tensors on GPUs travel as copies on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.mpi_link import MpiLink
from asr_am.distributed.team import CommStats
from asr_am.distributed.wire_dtype import mean_in_order, rounded, travels_as


class MpiWork:
    """A collective under way. `finish` takes its result over, in the task that waits."""

    def __init__(self, wait_monitor: WaitMonitor, finish: Callable[[Tensor], Any]) -> None:
        self._wait_monitor, self._finish = wait_monitor, finish
        self._result: Tensor | None = None
        self.own: Tensor | None = None  # mean of this member's part of an all-reduce
        self._value: Any = None
        self._taken = False

    def complete(self, result: Tensor) -> None:
        """Called in a callback of the event loop."""
        with self._wait_monitor.change():
            self._result = result

    def done(self) -> bool:
        return self._result is not None

    def wait(self) -> Any:
        if not self._taken:
            self._wait_monitor.wait_for(self.done)
            assert self._result is not None
            self._value, self._taken = self._finish(self._result), True
        return self._value


class MpiGroup:
    """The `Group` of this process with the members `ranks`, which make it at the same time."""

    def __init__(
        self, link: MpiLink, event_loop: EventLoop, wait_monitor: WaitMonitor, ranks: Sequence[int],
        comm_stats: CommStats, wire: torch.dtype,
    ) -> None:  # fmt: skip
        self.rank, self.size = list(ranks).index(link.rank), len(ranks)
        self._link, self._event_loop, self._wait_monitor = link, event_loop, wait_monitor
        self._ranks, self._comm_stats, self._wire = ranks, comm_stats, wire
        self._comm = link.make_group(ranks)
        self._means = link.duplicate(self._comm)  # all-gathers of means begin while later collectives are under way
        self._summing = deque[tuple[MpiWork, Tensor]]()  # all-reduces in the order of their start, and their parts

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> MpiWork:
        self._count(self.rank + 1, round(2 * (self.size - 1) / self.size * len(x) * self._wire.itemsize))
        length = -(-len(x) // self.size)
        sent = torch.zeros(self.size * length, dtype=self._wire)
        sent[: len(x)] = x
        received = torch.empty_like(sent)

        def finish(means: Tensor) -> None:
            x.copy_(means[: len(x)])

        work = MpiWork(self._wait_monitor, finish)
        self._event_loop.call_here(partial(self._exchange_parts, work, sent, received))
        return work

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> MpiWork:
        sizes = [len(x)] * self.size if lengths is None else list(lengths)
        sent = self._sendable(x)
        for other in range(1, self.size):
            self._count(self.rank + other, sent.nbytes)
        received = sent.new_empty(sum(sizes))

        def finish(result: Tensor) -> list[Tensor]:
            return list(torch.split(rounded(result, result.dtype).to(x.device), sizes))

        work = MpiWork(self._wait_monitor, finish)
        counts = [size * sent.itemsize for size in sizes]

        def start() -> None:
            request = self._comm.Iallgatherv(_bytes(sent), [_bytes(received), counts])
            self._link.track(request, sent, partial(work.complete, received))

        self._event_loop.call_here(start)
        return work

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        sent = self._sendable(x)
        if (self.rank + 1) % self.size != source:
            self._count(self.rank + 1, sent.nbytes)
        work = MpiWork(self._wait_monitor, x.copy_)
        self._event_loop.call_here(
            lambda: self._link.track(self._comm.Ibcast(_bytes(sent), source), sent, partial(work.complete, sent))
        )
        work.wait()

    def _sendable(self, x: Tensor) -> Tensor:
        return torch.empty(len(x), dtype=travels_as(x, self._wire)).copy_(x)

    def _count(self, to: int, count: int) -> None:
        """Counts bytes that this member sends to another."""
        if self.size > 1:
            self._comm_stats.bytes_sent[self._ranks[to % self.size]] += count

    # called in callbacks of the event loop

    def _exchange_parts(self, work: MpiWork, sent: Tensor, parts: Tensor) -> None:
        self._summing.append((work, parts))
        request = self._comm.Ialltoall(_bytes(sent), _bytes(parts))
        self._link.track(request, sent, partial(self._sum, work, parts))

    def _sum(self, work: MpiWork, parts: Tensor) -> None:
        """Sums the own part, and starts the all-gathers of means whose turn it is: all members have one order."""
        work.own = mean_in_order(parts.view(self.size, -1)).to(self._wire)
        while self._summing and self._summing[0][0].own is not None:
            first, means = self._summing.popleft()
            assert first.own is not None
            request = self._means.Iallgather(_bytes(first.own), _bytes(means))
            self._link.track(request, first.own, partial(first.complete, means))


def _bytes(x: Tensor) -> np.ndarray:
    return x.view(torch.uint8).numpy()
