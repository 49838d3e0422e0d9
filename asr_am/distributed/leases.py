"""Who does which batch: every batch of an epoch handed out, and completed exactly once.

An epoch is done in segments; between two of them the team is at rest, and a checkpoint is written. Strategies that
move in step take the batches of a segment in `Rounds`; the others from a `LeaseTable`, where a fast learner takes more
than a slow one, and a dead learner's leases are handed out again (on its death, never because it is slow).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asr_am.distributed.flat_params import BucketHook
from asr_am.errors import InputError


@dataclass(frozen=True)
class Segment:
    """Batches begin..end of epoch `epoch` (from 0), of `total` in it. frames: of each batch begin..end.

    updates_before: of the whole team, in earlier epochs: rounds of a batch per learner. learners: that do batches.
    """

    epoch: int
    begin: int
    end: int
    total: int
    frames: tuple[int, ...]
    updates_before: int
    learners: int

    def __len__(self) -> int:
        return self.end - self.begin


class LearnerLost(InputError):
    """A learner that the others cannot go on without is gone. rank: which. reason: how, after "learner 3 ..."."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"learner {rank} {reason}; start the same command again to go on from the last checkpoint")
        self.rank, self.reason = rank, reason


class StaleSegment(InputError):
    """A learner that was restarted asks for a segment that the others have finished: a newer checkpoint is coming."""


@dataclass(frozen=True)
class Lease:
    """A batch to do. batch: its number in the epoch, None for an idle turn in the last round (a gradient of zero).

    progress: share of the epoch handed out before it. updates: of the whole team in the run before it (the schedule
    follows both). normaliser: frames to divide the sum of the batch's losses by: from a table, its own; in step, such
    that the plain mean over learners is the gradient of the mean loss over all frames of the round.
    """

    batch: int | None
    progress: float
    updates: float
    loss_denominator: float


class Completion(NamedTuple):
    """examples: counted by whoever computed the gradient. applied: False where the algorithm dropped it."""

    batch: int
    owner: int
    incarnation: int
    examples: int
    applied: bool = True


@dataclass(frozen=True)
class SegmentRecord:
    """A finished segment. released: (batch, owner) of leases taken back from the dead."""

    segment: Segment
    completions: tuple[Completion, ...]
    released: tuple[tuple[int, int], ...] = ()

    def audit(self, examples: Iterable[int]) -> None:
        """RuntimeError unless every batch was completed, each once, with all of its examples, counted per batch."""
        found = sorted((completion.batch, completion.examples) for completion in self.completions)
        wanted = list(zip(range(self.segment.begin, self.segment.end), examples, strict=True))
        if found != wanted:
            wrong = sorted(set(found) ^ set(wanted))[:5] or "a batch twice"
            raise RuntimeError(
                f"epoch {self.segment.epoch + 1}: batches {self.segment.begin}..{self.segment.end - 1} were not "
                f"completed exactly once each: (batch, examples) {wrong}"
            )


@dataclass(frozen=True)
class LossSums:
    """Sums over batches: cross-entropy, correct frames, frames, and the number of batches."""

    loss: float = 0.0
    correct: float = 0.0
    frames: float = 0.0
    batches: int = 0

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: LossSums) -> LossSums:
        return LossSums(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.frames, 1)

    @property
    def accuracy(self) -> float:
        return self.correct / max(self.frames, 1)


@dataclass(frozen=True)
class StepResult:
    """What one batch told. The sums are tensors, so that a GPU need not be waited for.

    weight: frames. examples: chunks that went into the gradient, counted where it was computed. lr: learning rate of
    the step. applied: False where the algorithm dropped the gradient.
    """

    lease: Lease
    num_frames: float
    examples: int
    lr: float
    loss_sum: Tensor
    correct: Tensor
    applied: bool = True


GradientFn = Callable[[BucketHook | None], StepResult | None]
"""Leases a batch, sets `optimizer.lr`, runs forward and backward, fills `params.g`; None: no data left in the segment.

In step, all learners get None at the same step, and the plain mean over learners of `params.g` is the gradient of the
mean loss over all frames of the round: a learner with fewer frames weighs less, one without data has zeros.
Otherwise it is the gradient of the mean loss of its own batch.
"""


class Leases(Protocol):
    """One learner's access to the batches of a segment. ahead: whether it may lease before it has completed."""

    @property
    def ahead(self) -> bool: ...

    def lease(self) -> Lease | None:
        """The next batch for this learner, waiting while one may still come back from the dead; None: all are done."""
        ...

    def complete(self, step_result: StepResult) -> None: ...

    def totals(self) -> LossSums:
        """Of all learners, in this segment so far. In step, all learners call it at the same step."""
        ...

    def record(self) -> SegmentRecord:
        """After the end of the segment, called by all learners."""
        ...


class RoundRobinLeases:
    """In round r learner i of λ does batch begin + rλ + i: together the batches of one learner with λ times the batch.

    Nobody need be asked. gather: the team's, for what the others did.
    """

    ahead = True

    def __init__(self, segment: Segment, rank: int, size: int, gather: Callable[[Tensor], dict[int, Tensor]]) -> None:
        if segment.begin % size:
            raise ValueError(f"a segment that begins at batch {segment.begin} does not begin a round of {size}")
        self.segment, self._rank, self._size, self._gather = segment, rank, size, gather
        self._round = 0
        self._rounds_total = -(-segment.total // size)
        self._done: list[tuple[int, int, bool]] = []
        self._loss: Tensor | float = 0.0
        self._correct: Tensor | float = 0.0
        self._frames = 0.0

    def lease(self) -> Lease | None:
        first = self._round * self._size
        if first >= len(self.segment):
            return None
        self._round += 1
        frames = self.segment.frames[first : first + self._size]
        own = self.segment.begin + first + self._rank
        updates = (self.segment.begin + first) // self._size
        return Lease(
            own if own < self.segment.end else None, updates / self._rounds_total,
            self.segment.updates_before + updates, sum(frames) / self._size,
        )  # fmt: skip

    def complete(self, step_result: StepResult) -> None:
        if step_result.lease.batch is None:
            return
        self._done.append((step_result.lease.batch, step_result.examples, step_result.applied))
        self._loss = self._loss + step_result.loss_sum.double()
        self._correct = self._correct + step_result.correct.double()
        self._frames += step_result.num_frames

    def totals(self) -> LossSums:
        own = [float(self._loss), float(self._correct), self._frames, len(self._done)]
        loss, correct, frames, batches = sum_rows(self._gather_all(torch.tensor(own, dtype=torch.float64)))
        return LossSums(loss, correct, frames, int(batches))

    def record(self) -> SegmentRecord:
        rows = self._gather_all(torch.tensor(self._done, dtype=torch.float64).reshape(-1))
        completions = [
            Completion(int(batch), rank, 0, int(examples), bool(applied))
            for rank, row in rows.items()
            for batch, examples, applied in row.reshape(-1, 3).tolist()
        ]
        return SegmentRecord(self.segment, tuple(sorted(completions)))

    def _gather_all(self, values: Tensor) -> dict[int, Tensor]:
        """What a learner that died had done cannot be known."""
        rows = self._gather(values)
        for rank in range(self._size):
            if rank not in rows:
                raise LearnerLost(rank, "died")
        return rows


def sum_rows(rows: dict[int, Tensor]) -> list[float]:
    """The sum of all learners' vectors, added in rank order."""
    return torch.stack([rows[rank] for rank in sorted(rows)]).sum(dim=0).tolist()


@dataclass
class LeaseQueue:
    """The table of a segment that all learners lease from: {batch: owner and incarnation} and what is done."""

    segment: Segment
    _free: list[int] = field(init=False)
    _held: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)
    _done: dict[int, Completion] = field(init=False, default_factory=dict)
    _released: list[tuple[int, int]] = field(init=False, default_factory=list)
    totals: LossSums = field(init=False, default_factory=LossSums)

    def __post_init__(self) -> None:
        self._free = list(range(self.segment.begin, self.segment.end))  # a heap: what came back goes out first

    @property
    def finished(self) -> bool:
        return len(self._done) == len(self.segment)

    def lease(self, owner: int, incarnation: int = 0) -> Lease | None:
        """The next batch for a learner; None when none is free: `finished` says whether one may still come back."""
        if not self._free:
            return None
        segment = self.segment
        out_before = segment.begin + len(self._held) + len(self._done)
        batch = heapq.heappop(self._free)
        self._held[batch] = (owner, incarnation)
        updates = segment.updates_before + out_before / segment.learners
        return Lease(batch, out_before / segment.total, updates, segment.frames[batch - segment.begin])

    def complete(self, completion: Completion, totals: LossSums) -> None:
        """Mark a batch as done, and add its sums.

        ValueError where this learner, or this incarnation of it, does not hold the batch.
        """
        holder = (completion.owner, completion.incarnation)
        if self._held.get(completion.batch) != holder:
            raise ValueError(f"learner {holder[0]}.{holder[1]} completes batch {completion.batch}, not held by it")
        del self._held[completion.batch]
        self._done[completion.batch] = completion
        self.totals += totals

    def release(self, owner: int) -> list[int]:
        """Take back all that a dead learner held; returns those batches."""
        back = sorted(batch for batch, (holder, _) in self._held.items() if holder == owner)
        for batch in back:
            del self._held[batch]
            heapq.heappush(self._free, batch)
            self._released.append((batch, owner))
        return back

    def record(self) -> SegmentRecord:
        """RuntimeError where batches are not done."""
        if not self.finished:
            raise RuntimeError(f"{len(self._done)} of {len(self.segment)} batches done, {len(self._held)} still held")
        return SegmentRecord(self.segment, tuple(self._done[b] for b in sorted(self._done)), tuple(self._released))


def step_loss_sums(step_result: StepResult) -> LossSums:
    """The sums of one batch as plain numbers (waits for a GPU)."""
    return LossSums(float(step_result.loss_sum), float(step_result.correct), step_result.num_frames, 1)


def record_to_json(record: SegmentRecord) -> dict[str, Any]:
    """A line of leases.jsonl: the audit trail of a segment, in columns."""
    done = record.completions
    return {
        "epoch": record.segment.epoch + 1,
        "batch": [c.batch for c in done],
        "owner": [c.owner for c in done],
        "incarnation": [c.incarnation for c in done],
        "examples": [c.examples for c in done],
        "applied": [c.applied for c in done],
        "released": [list(pair) for pair in record.released],
    }
