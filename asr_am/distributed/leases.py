"""Who does which batch of an epoch: every batch handed out, and completed exactly once.

A fast learner leases more batches than a slow one. A dead learner's leases are handed out again (on its death, never
because it is slow).
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Lease:
    """A batch to do. leased: batches of the epoch handed out before this one (the learning rate follows it)."""

    batch: int
    leased: int
    total: int


@dataclass
class _Entry:
    owner: int
    incarnation: int


class Leases:
    """The table of one epoch of `total` batches, handed out in the order of their numbers."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))  # a heap: what was handed back comes first
        self._held: dict[int, _Entry] = {}
        self._done: dict[int, bool] = {}  # batch -> whether its gradient was applied
        self._done_by: Counter[int] = Counter()

    @property
    def leased(self) -> int:
        """Batches handed out by now, done ones included."""
        return len(self._held) + len(self._done)

    @property
    def finished(self) -> bool:
        return len(self._done) == self.total

    def lease(self, owner: int = 0, incarnation: int = 0) -> Lease | None:
        """The next batch for a learner, or None when none is left to hand out."""
        if not self._free:
            return None
        lease = Lease(heapq.heappop(self._free), self.leased, self.total)
        self._held[lease.batch] = _Entry(owner, incarnation)
        return lease

    def complete(self, batch: int, owner: int = 0, incarnation: int = 0, applied: bool = True) -> None:
        """Mark a batch as done. applied: False where the algorithm dropped its gradient.

        ValueError where this learner, or this incarnation of it, does not hold the batch.
        """
        if self._held.get(batch) != _Entry(owner, incarnation):
            raise ValueError(f"learner {owner}.{incarnation} completes batch {batch}, which it does not hold")
        del self._held[batch]
        self._done[batch] = applied
        self._done_by[owner] += 1

    def release(self, owner: int) -> list[int]:
        """Take back all that a dead learner held; returns those batches."""
        back = sorted(batch for batch, entry in self._held.items() if entry.owner == owner)
        for batch in back:
            del self._held[batch]
            heapq.heappush(self._free, batch)
        return back

    def done_by(self) -> dict[int, int]:
        """Batches completed by each learner."""
        return dict(self._done_by)

    def dropped(self) -> int:
        """Batches that are done but whose gradients were not applied."""
        return sum(not applied for applied in self._done.values())

    def audit(self) -> None:
        """RuntimeError unless every batch was completed, each once."""
        if self._held or self._free or set(self._done) != set(range(self.total)):
            raise RuntimeError(f"{len(self._done)} of {self.total} batches done, {len(self._held)} still held")
        if sum(self._done_by.values()) != self.total:
            raise RuntimeError(f"{sum(self._done_by.values())} completions of {self.total} batches")

    def state_dict(self) -> dict[str, Any]:
        """What is done. What is held is not part of it: whoever resumes hands it out again."""
        done = sorted(self._done)
        return {
            "total": self.total,
            "done": torch.tensor(done, dtype=torch.int64),
            "applied": torch.tensor([self._done[batch] for batch in done], dtype=torch.bool),
            "done_by": dict(self._done_by),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError where the state is of an epoch of another length."""
        if state["total"] != self.total:
            raise ValueError(f"leases of {state['total']} batches do not fit an epoch of {self.total}")
        self._done = dict(zip(state["done"].tolist(), state["applied"].tolist(), strict=True))
        self._done_by = Counter(state["done_by"])
        self._held = {}
        self._free = [batch for batch in range(self.total) if batch not in self._done]
