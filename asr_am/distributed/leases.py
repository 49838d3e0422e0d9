"""Leases: they hand out every batch of an epoch, and see to it that each is completed exactly once.

An epoch is done in segments. Between two segments the team is drained and a checkpoint is written. Synchronous
strategies take the batches of a segment in turn (`RoundRobinLeases`). The others lease from one queue (`LeaseQueue`),
where a fast learner takes more batches than a slow one. A dead learner's leases are handed out again: on its death,
never because it is slow.

Shapes: K values.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from asr_am.distributed.flat_params import BucketHook
from asr_am.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """A contiguous part of an epoch's batches.

    Attributes:
        epoch: number of the epoch, from 0.
        begin: first batch.
        end: one past the last batch.
        total: number of batches of the whole epoch.
        frames: number of frames of each batch begin..end.
        updates_before: rounds of one batch per learner in all earlier epochs.
        learners: number of learners that compute gradients (dedicated parameter servers do not).
        digests: identity of each batch begin..end, a 48-bit hash of its examples. Empty: the batches have none (0).
    """

    epoch: int
    begin: int
    end: int
    total: int
    frames: tuple[int, ...]
    updates_before: int
    learners: int
    digests: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.end - self.begin

    def until(self, end: int) -> Segment:
        """Returns the segment cut before batch `end`."""
        count = end - self.begin
        return replace(self, end=end, frames=self.frames[:count], digests=self.digests[:count])

    def digest(self, batch: int) -> int:
        """Returns the identity of a batch, 0 if it has none."""
        return self.digests[batch - self.begin] if self.digests and batch < self.end else 0


class LearnerLost(InputError):
    """Ends the run: a learner is gone that the others cannot continue without.

    Args:
        reason: completes the sentence "learner 3 ...".
        own_error: it has ended itself, by an error that would come again.
    """

    def __init__(self, rank: int, reason: str, own_error: bool = False) -> None:
        remedy = "start the same command again to continue from the last checkpoint"
        if own_error:
            remedy = "see its message above; when its cause is gone, the same command continues"
        super().__init__(f"learner {rank} {reason}; {remedy}")
        self.rank, self.reason = rank, reason


class HostLost(LearnerLost):
    """Ends a synchronous team: a host is gone for good. A smaller team can continue (`asr_am.stages.train`).

    Args:
        rank, reason: as of `LearnerLost`, for a learner of the host.
        nodes: numbers of the hosts that are left, ascending.
    """

    def __init__(self, rank: int, reason: str, nodes: Sequence[int]) -> None:
        super().__init__(rank, reason)
        self.nodes = tuple(nodes)


class ProcessLost(LearnerLost):
    """Ends a team of MPI: a process has died. The others can be the next team (`asr_am.stages.train`).

    Args:
        rank: of the process, among those that lived.
        left: number of processes that live.
    """

    def __init__(self, rank: int, left: int) -> None:
        super().__init__(rank, "has ended")
        self.left = left


class StaleSegment(InputError):
    """A restarted learner asked for a segment that the others have finished. It has to load the newer checkpoint."""


@dataclass(frozen=True)
class Lease:
    """A batch to compute.

    Attributes:
        batch: its number in the epoch, None for an idle turn in the last round (a gradient of zero).
        progress: share of the epoch that was handed out before it, for the learning rate schedule.
        updates: updates of the whole team in the run before it, for the schedule.
        loss_denominator: frames to divide the batch's summed loss by. From a `LeaseQueue` these are the batch's own.
            From `RoundRobinLeases` they are the round's frames / learners, so that the plain mean over learners is the
            gradient of the mean loss over all frames of the round.
    """

    batch: int | None
    progress: float
    updates: float
    loss_denominator: float
    digest: int = 0


class Completion(NamedTuple):
    """A completed batch.

    Attributes:
        batch: its number in the epoch.
        owner: the learner that computed it.
        incarnation: the owner's number of restarts then.
        examples: training examples, as counted by the gradient computation.
        applied: False if the algorithm dropped the gradient.
        digest: identity of the examples, as loaded for the gradient computation.
    """

    batch: int
    owner: int
    incarnation: int
    examples: int
    applied: bool = True
    digest: int = 0


@dataclass(frozen=True)
class ServerRecord:
    """Gradients that a parameter server applied in a segment.

    Attributes:
        missing: completed batches whose gradient it has not applied, in this incarnation.
    """

    shard: int
    rank: int
    incarnation: int
    missing: tuple[int, ...]


@dataclass(frozen=True)
class SegmentRecord:
    """The audit trail of a finished segment.

    Attributes:
        completions: one entry per batch, by batch.
        released: (batch, owner) of each lease that was taken back from a dead learner.
        lost: (rank, incarnation) of each learner that died in this segment.
        servers: what the parameter servers applied, where the strategy has any and counts that.
    """

    segment: Segment
    completions: tuple[Completion, ...]
    released: tuple[tuple[int, int], ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    servers: tuple[ServerRecord, ...] = ()

    def audit(self, examples: Iterable[int]) -> None:
        """Checks that every batch was completed once, with its own examples and all of them.

        Args:
            examples: number of examples of each batch of the segment, in order.

        Raises:
            RuntimeError: a batch is missing, was completed twice, or was computed from other examples than its own.
        """
        _audit(self.segment, self.completions, tuple(examples))


@lru_cache(maxsize=1)  # virtual learners audit the same record
def _audit(segment: Segment, completions: tuple[Completion, ...], examples: tuple[int, ...]) -> None:
    for done in completions:
        if segment.begin <= done.batch < segment.end and done.digest != segment.digest(done.batch):
            others = [batch for batch in range(segment.begin, segment.end) if segment.digest(batch) == done.digest]
            whose = f", those of batch {others[0]}" if others else ""
            raise RuntimeError(
                f"epoch {segment.epoch + 1}: learner {done.owner} computed batch {done.batch} from other examples "
                f"than its own{whose}: the loader is wrong, or the examples have changed"
            )
    found = sorted((completion.batch, completion.examples) for completion in completions)
    wanted = list(zip(range(segment.begin, segment.end), examples, strict=True))
    if found != wanted:
        wrong = sorted(set(found) ^ set(wanted))[:5] or "a batch twice"
        raise RuntimeError(
            f"epoch {segment.epoch + 1}: batches {segment.begin}..{segment.end - 1} were not completed exactly once "
            f"each: (batch, examples) {wrong}. A strategy's `step` must return what `gradient` returned"
        )


@dataclass(frozen=True)
class LossSums:
    """Sums over batches.

    Attributes:
        loss: summed cross-entropy in nats.
        correct: correctly classified frames.
    """

    loss: float = 0.0
    correct: float = 0.0
    frames: float = 0.0
    batches: int = 0

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss + other.loss, self.correct + other.correct, self.frames + other.frames,
            self.batches + other.batches,
        )  # fmt: skip

    def __sub__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss - other.loss, self.correct - other.correct, self.frames - other.frames,
            self.batches - other.batches,
        )  # fmt: skip

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.frames, 1)

    @property
    def accuracy(self) -> float:
        return self.correct / max(self.frames, 1)


@dataclass(frozen=True)
class StepResult:
    """Result of one step. The sums stay tensors to avoid a GPU sync.

    Attributes:
        num_frames: frames of the batch, its weight in a mean.
        examples: training examples that went into the gradient, counted where it was computed.
        loss_sum: summed loss, a scalar.
        correct: correctly classified frames, a scalar.
        applied: False if the algorithm dropped the gradient.
        digest: identity of these examples.
    """

    lease: Lease
    num_frames: float
    examples: int
    lr: float
    loss_sum: Tensor
    correct: Tensor
    applied: bool = True
    digest: int = 0


GradientFn = Callable[[BucketHook | None], StepResult | None]
"""Leases a batch, sets `optimizer.lr`, runs forward and backward, and fills `params.g`.

Its argument is called when a bucket of the gradient is ready (None: never). It returns None if the segment has no data
left. In a synchronous strategy all learners get None at the same step, and the plain mean of `params.g` over learners
is the gradient of the mean loss over all frames of the round: a learner with fewer frames weighs less, and one without
data has zeros. Otherwise `params.g` is the gradient of the mean loss of the learner's own batch.
"""


class Leases(Protocol):
    """One learner's access to the batches of a segment."""

    @property
    def ahead(self) -> bool:
        """True if the learner may lease its next batch before it has completed the present one."""
        ...

    def lease(self) -> Lease | None:
        """Leases the next batch for this learner.

        Waits while none is free but a dead learner's batch may still be handed out again. Returns None when all
        batches of the segment are done.
        """
        ...

    def complete(self, step_result: StepResult) -> None:
        """Marks the batch of a step as completed."""
        ...

    def totals(self) -> LossSums:
        """Returns the sums of all learners in this segment so far. Synchronous learners call it at the same step."""
        ...

    def stop(self, steps: int) -> None:
        """Ends the segment with the batches that were handed out.

        Args:
            steps: steps that this learner has done in the segment. Synchronous learners call it after the same step.
        """
        ...

    def record(self) -> SegmentRecord:
        """Returns the record of the segment. Called by all learners after its end."""
        ...


class RoundRobinLeases:
    """Leases of a synchronous strategy: in round r learner i of λ computes batch begin + rλ + i.

    A round is one batch of a single learner with λ times the batch size. No communication is needed to lease.

    Args:
        segment: must begin with a round.
        rank: i.
        size: λ.
        gather: `Team.gather`, to collect what the others did.

    Attributes:
        steps: completed steps of this learner.
    """

    ahead = True

    def __init__(self, segment: Segment, rank: int, size: int, gather: Callable[[Tensor], dict[int, Tensor]]) -> None:
        if segment.begin % size:
            raise ValueError(f"a segment that begins at batch {segment.begin} does not begin a round of {size}")
        self.segment, self._rank, self._size, self._gather = segment, rank, size, gather
        self.steps = 0
        self._round = 0
        self._rounds_total = -(-segment.total // size)
        self._done: list[tuple[int, int, bool, int]] = []
        self._loss: Tensor | float = 0.0
        self._correct: Tensor | float = 0.0
        self._frames = 0.0

    def lease(self) -> Lease | None:
        first = self._round * self._size
        if first >= len(self.segment):
            return None
        self._round += 1
        frames = self.segment.frames[first : first + self._size]
        batch = self.segment.begin + first + self._rank
        updates = (self.segment.begin + first) // self._size
        return Lease(
            batch if batch < self.segment.end else None, updates / self._rounds_total,
            self.segment.updates_before + updates, sum(frames) / self._size, self.segment.digest(batch),
        )  # fmt: skip

    def complete(self, step_result: StepResult) -> None:
        self.steps += 1
        if step_result.lease.batch is None:
            return
        self._done.append((step_result.lease.batch, step_result.examples, step_result.applied, step_result.digest))
        self._loss = self._loss + step_result.loss_sum.double()
        self._correct = self._correct + step_result.correct.double()
        self._frames += step_result.num_frames

    def own_totals(self) -> LossSums:
        """Returns the sums of this learner's batches so far."""
        return LossSums(float(self._loss), float(self._correct), self._frames, len(self._done))

    def own_rows(self) -> Tensor:
        """Returns (batch, examples, applied, digest) of each batch that this learner has completed, [4 x batches]."""
        return torch.tensor(self._done, dtype=torch.float64).reshape(-1)

    def totals(self) -> LossSums:
        sums = torch.tensor(astuple(self.own_totals()), dtype=torch.float64)
        loss, correct, frames, batches = sum_rows(self._gather_all(sums))
        return LossSums(loss, correct, frames, int(batches))

    def stop(self, steps: int) -> None:
        self.segment = self.segment.until(min(self.segment.begin + steps * self._size, self.segment.end))

    def record(self) -> SegmentRecord:
        return SegmentRecord(self.segment, completions_of(self._gather_all(self.own_rows())))

    def _gather_all(self, values: Tensor) -> dict[int, Tensor]:
        """Gathers from all learners. Raises LearnerLost if one died, as its part cannot be known."""
        rows = self._gather(values)
        for rank in range(self._size):
            if rank not in rows:
                raise LearnerLost(rank, "died")
        return rows


class _OfLastRows(Generic[T]):
    """A function of gathered rows that keeps its last result, as all virtual learners gather the same tensors."""

    def __init__(self, function: Callable[[dict[int, Tensor]], T]) -> None:
        self._function = function
        self._last: tuple[list[int], dict[int, Tensor], T] | None = None  # ids, and rows so that no others get these

    def __call__(self, rows: dict[int, Tensor]) -> T:
        ids, last = list(map(id, rows.values())), self._last
        if last is None or last[0] != ids:
            last = self._last = ids, rows, self._function(rows)
        return last[2]


@_OfLastRows
def completions_of(rows: dict[int, Tensor]) -> tuple[Completion, ...]:
    """Returns the completions in gathered rows of (batch, examples, applied, digest), by rank."""
    completions = [
        Completion(int(batch), rank, 0, int(examples), bool(applied), int(digest))
        for rank, row in rows.items()
        for batch, examples, applied, digest in row.reshape(-1, 4).tolist()
    ]
    return tuple(sorted(completions))


@_OfLastRows
def sum_rows(rows: dict[int, Tensor]) -> list[float]:
    """Returns the sum of all learners' vectors [K], added in rank order."""
    return torch.stack([rows[rank] for rank in sorted(rows)]).sum(dim=0).tolist()


@dataclass
class LeaseQueue:
    """The queue of a segment's batches that all learners lease from.

    Attributes:
        end: one past the last batch, that of the segment unless it is stopped.
        totals: sums over the completed batches.
        lost: (rank, incarnation) of each learner that died in this segment.
    """

    segment: Segment
    end: int = field(init=False)
    _free: list[int] = field(init=False)  # a heap: batches taken back go out first
    _held: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)  # batch: (owner, incarnation)
    _done: dict[int, Completion] = field(init=False, default_factory=dict)
    _released: list[tuple[int, int]] = field(init=False, default_factory=list)  # (batch, owner)
    _completions: tuple[Completion, ...] = field(init=False, default=())  # all, in order, once the segment is finished
    totals: LossSums = field(init=False, default_factory=LossSums)
    lost: list[tuple[int, int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(range(self.segment.begin, self.segment.end))
        self.end = self.segment.end

    @property
    def finished(self) -> bool:
        return len(self._done) == self.end - self.segment.begin

    def stop(self) -> None:
        """Ends the segment after the round of the last batch that was handed out. There is at least one.

        Whole rounds allow a team of another size to continue (`asr_am.train.resume`).
        """
        segment = self.segment
        last = max(segment.begin, *self._held, *self._done)
        rounds = 1 + (last - segment.begin) // segment.learners
        self.end = min(segment.begin + rounds * segment.learners, segment.end)
        self._free = sorted(batch for batch in self._free if batch < self.end)

    @property
    def any_done(self) -> bool:
        return bool(self._done)

    def lease(self, owner: int, incarnation: int = 0) -> Lease | None:
        """Leases the next batch, None if none is free. One may still be taken back unless the segment is `finished`."""
        if not self._free:
            return None
        segment = self.segment
        handed_out = segment.begin + len(self._held) + len(self._done)
        batch = heapq.heappop(self._free)
        self._held[batch] = (owner, incarnation)
        updates = segment.updates_before + handed_out / segment.learners
        frames = segment.frames[batch - segment.begin]
        return Lease(batch, handed_out / segment.total, updates, frames, segment.digest(batch))

    def complete(self, completion: Completion, totals: LossSums) -> None:
        """Marks a batch as done. Raises ValueError if this incarnation of the learner does not hold it."""
        holder = (completion.owner, completion.incarnation)
        if self._held.get(completion.batch) != holder:
            raise ValueError(f"learner {holder[0]}.{holder[1]} completes batch {completion.batch}, not held by it")
        del self._held[completion.batch]
        self._done[completion.batch] = completion
        self.totals += totals

    def release(self, owner: int) -> list[int]:
        """Takes back all batches that a dead learner held, and returns them."""
        released = sorted(batch for batch, (holder, _) in self._held.items() if holder == owner)
        for batch in released:
            del self._held[batch]
            heapq.heappush(self._free, batch)
            self._released.append((batch, owner))
        return released

    def record(self) -> SegmentRecord:
        """Returns the record of the finished segment. Raises RuntimeError if batches are not done."""
        if not self.finished:
            raise RuntimeError(
                f"{len(self._done)} of {self.end - self.segment.begin} batches done, {len(self._held)} still held"
            )
        if not self._completions:  # for all learners that ask
            self._completions = tuple(self._done[b] for b in sorted(self._done))
        segment = self.segment if self.end == self.segment.end else self.segment.until(self.end)
        return SegmentRecord(segment, self._completions, tuple(self._released), tuple(self.lost))


def record_to_json(record: SegmentRecord) -> dict[str, Any]:
    """Returns a line of leases.jsonl: the audit trail of a segment, in columns."""
    done = record.completions
    return {
        "epoch": record.segment.epoch + 1,
        "batches": record.segment.total,
        "learners": record.segment.learners,
        "batch": [c.batch for c in done],
        "owner": [c.owner for c in done],
        "incarnation": [c.incarnation for c in done],
        "examples": [c.examples for c in done],
        "applied": [c.applied for c in done],
        "digest": [c.digest for c in done],
        "released": [list(pair) for pair in record.released],
        "lost": [list(pair) for pair in record.lost],
        "servers": [{**asdict(server), "missing": list(server.missing)} for server in record.servers],
    }
