"""One member's end of a virtual group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from asr_am.distributed.sim.collectives import Circle, Collective, put_mean
from asr_am.distributed.sim.network import ring_share


@dataclass
class SimWork:
    """A collective under way."""

    _circle: Circle
    _collective: Collective

    def wait(self) -> None:
        self._circle.wait(self._collective)


@dataclass
class SimGather:
    """An all-gather under way."""

    _circle: Circle
    _collective: Collective

    def wait(self) -> list[Tensor]:
        self._circle.wait(self._collective)
        return self._collective.result


class SimGroup:
    """The `Group` of member `rank` of a circle. modelled: bytes that stand for so many real ones."""

    def __init__(self, circle: Circle, rank: int, modelled: Callable[[float], float]) -> None:
        self.rank, self.size = rank, len(circle.members)
        self._circle, self._modelled = circle, modelled

    def start_all_reduce_mean(self, x: Tensor) -> SimWork:
        self._count(self.rank + 1, ring_share(self.size) * x.nbytes)
        end = partial(self._circle.all_reduce_end, self._modelled(x.nbytes))
        return SimWork(self._circle, self._start("all-reduce", x, [len(x)] * self.size, end, put_mean))

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> SimGather:
        sizes = [len(x)] * self.size if lengths is None else lengths
        scale = self._modelled if lengths is not None else float
        counts = [scale(size * x.element_size()) for size in sizes]
        for other in range(1, self.size):
            self._count(self.rank + other, x.nbytes, counts[self.rank])
        end = partial(self._circle.all_gather_end, counts)
        return SimGather(self._circle, self._start("all-gather", x.clone(), sizes, end, lambda tensors: tensors))

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        def copy(tensors: list[Tensor]) -> list[Tensor]:
            for tensor in tensors:
                tensor.copy_(tensors[source])
            return []

        if (self.rank + 1) % self.size != source:  # the last of the chain
            self._count(self.rank + 1, x.nbytes)
        end = partial(self._circle.broadcast_end, self._modelled(x.nbytes))
        self._circle.wait(self._start(f"broadcast from {source}", x, [len(x)] * self.size, end, copy))

    def _start(
        self, kind: str, x: Tensor, lengths: Sequence[int], end: Callable[[float], float],
        finish: Callable[[list[Tensor]], list[Tensor]],
    ) -> Collective:  # fmt: skip
        return self._circle.start(self.rank, kind, x, lengths, end, finish)

    def _count(self, to: int, count: float, modelled: float | None = None) -> None:
        """Bytes that this member sends to another."""
        if self.size > 1:
            usage = self._circle.members[self.rank].usage
            usage.bytes_sent[self._circle.members[to % self.size].rank] += round(count)
            usage.modelled_bytes += self._modelled(round(count)) if modelled is None else modelled
