from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from asr_am.distributed.leases import (
    Completion,
    LearnerLost,
    Lease,
    LeaseQueue,
    LossSums,
    RoundRobinLeases,
    Segment,
    SegmentRecord,
    record_to_json,
)
from asr_am.distributed.team import SingleProcess

ONE = LossSums(loss=2.0, correct=1.0, frames=3.0, batches=1)


def segment(begin: int = 0, end: int = 7, total: int = 7, updates_before: int = 0, learners: int = 1) -> Segment:
    return Segment(1, begin, end, total, tuple(10 + n for n in range(begin, end)), updates_before, learners)


@dataclass
class Done:
    """A step result. Batch n has 100 + n examples."""

    lease: Lease
    num_frames: float = 3.0
    applied: bool = True
    digest: int = 0
    loss_sum: Tensor = field(default_factory=lambda: torch.tensor(2.0))
    correct: Tensor = field(default_factory=lambda: torch.tensor(1))

    @property
    def examples(self) -> int:
        return 0 if self.lease.batch is None else 100 + self.lease.batch


class SharedRounds:
    """Leases of several learners in one thread. `gather` works only in rank order and completes at the last rank."""

    def __init__(self, segment: Segment, size: int) -> None:
        self._values: list[dict[int, Tensor]] = []
        self.rounds = [RoundRobinLeases(segment, rank, size, partial(self._gather, rank)) for rank in range(size)]

    def _gather(self, rank: int, values: Tensor) -> dict[int, Tensor]:
        if rank == 0:
            self._values.append({})
        self._values[-1][rank] = values
        if rank < len(self.rounds) - 1:
            raise NotYetAll
        return self._values[-1]


class NotYetAll(Exception):
    """Some ranks have not called `gather` yet."""


# round robin


def test_rounds_divide_a_segment_and_idle_without_data() -> None:
    shared = SharedRounds(segment(begin=3, end=8, total=11, updates_before=40), 3)
    leases = [[rounds.lease() for _ in range(3)] for rounds in shared.rounds]
    batches = [[lease.batch if lease else "end" for lease in row] for row in leases]
    assert batches == [[3, 6, "end"], [4, 7, "end"], [5, None, "end"]]
    for row in leases:
        first, second = row[0], row[1]
        assert first and second
        assert (first.progress, first.updates, first.loss_denominator) == (1 / 4, 41, (13 + 14 + 15) / 3)
        assert (second.progress, second.updates, second.loss_denominator) == (2 / 4, 42, (16 + 17) / 3)


def test_rounds_of_several_learners_equal_one_learner_with_joined_batches() -> None:
    frames = tuple(range(1, 12))
    together = tuple(sum(frames[k : k + 4]) for k in range(0, 11, 4))
    alone = RoundRobinLeases(Segment(0, 0, 3, 3, together, 5, 1), 0, 1, SingleProcess().gather)
    team = [RoundRobinLeases(Segment(0, 0, 11, 11, frames, 5, 4), rank, 4, SingleProcess().gather) for rank in range(4)]
    while (joined := alone.lease()) is not None:
        for part in (rounds.lease() for rounds in team):
            assert part and (part.progress, part.updates) == (joined.progress, joined.updates)
            assert part.loss_denominator * 4 == joined.loss_denominator
    assert [rounds.lease() for rounds in team] == [None] * 4


def test_records_and_totals_cover_all_learners() -> None:
    shared = SharedRounds(segment(end=5), 2)
    for rounds in shared.rounds:
        while (lease := rounds.lease()) is not None:
            rounds.complete(Done(lease, applied=lease.batch != 2))
    with pytest.raises(NotYetAll):
        shared.rounds[0].record()
    record = shared.rounds[1].record()
    record.audit(range(100, 105))
    assert [(done.owner, done.applied) for done in record.completions] == [
        (0, True), (1, True), (0, False), (1, True), (0, True),
    ]  # fmt: skip
    with pytest.raises(NotYetAll):
        shared.rounds[0].totals()
    assert shared.rounds[1].totals() == LossSums(10.0, 5.0, 15.0, 5)


def test_round_robin_totals_are_added_in_double_precision() -> None:
    rounds = RoundRobinLeases(segment(), 0, 1, SingleProcess().gather)
    lease = rounds.lease()
    assert lease is not None
    rounds.complete(Done(lease, num_frames=2.0**24 + 1, correct=torch.tensor(2**24 + 1)))
    assert rounds.totals() == LossSums(2.0, 2.0**24 + 1, 2.0**24 + 1, 1)


def test_round_robin_needs_all_learners() -> None:
    rounds = RoundRobinLeases(segment(), 0, 3, lambda values: {0: values, 2: values})
    for call in (rounds.totals, rounds.record):
        with pytest.raises(LearnerLost, match="learner 1 died") as caught:
            call()
        assert caught.value.rank == 1


def test_a_segment_begins_with_a_round() -> None:
    with pytest.raises(ValueError, match="does not begin a round"):
        RoundRobinLeases(segment(begin=3), 0, 2, SingleProcess().gather)


def test_rounds_that_are_stopped_end_the_segment_with_the_last_one() -> None:
    rounds = RoundRobinLeases(segment(), 0, 1, SingleProcess().gather)
    leases = list(iter(rounds.lease, None))  # in advance, as a learner that reads ahead
    for lease in leases[:3]:
        rounds.complete(Done(lease))
    rounds.stop(3)
    assert rounds.lease() is None
    record = rounds.record()
    assert (record.segment.begin, record.segment.end, record.segment.frames) == (0, 3, (10, 11, 12))
    record.audit([100, 101, 102])


# queue


def test_a_queue_that_is_stopped_ends_with_the_last_batch_that_was_handed_out() -> None:
    queue = LeaseQueue(segment())
    first, second, third = (queue.lease(owner) for owner in range(3))
    assert first and second and third
    queue.complete(Completion(2, 2, 0, 102), ONE)
    queue.release(0)
    queue.stop()
    again = queue.lease(3)
    assert again and again.batch == 0 and queue.lease(3) is None, "batches 3 to 6 are not handed out any more"
    assert not queue.finished
    queue.complete(Completion(1, 1, 0, 101), ONE)
    queue.complete(Completion(0, 3, 0, 100), ONE)
    record = queue.record()
    assert queue.finished and record.segment.end == 3
    record.audit([100, 101, 102])


def test_a_queue_hands_out_each_batch_once_in_order() -> None:
    queue = LeaseQueue(segment(begin=2, end=6, total=8, updates_before=10, learners=4))
    taken = [queue.lease(owner) for owner in (0, 1, 0, 1)]
    assert [(lease.batch, lease.progress, lease.updates, lease.loss_denominator) for lease in taken if lease] == [
        (n, n / 8, 10 + n / 4, 10 + n) for n in range(2, 6)
    ]
    assert queue.lease(0) is None and not queue.finished
    for batch, owner in ((2, 0), (3, 1), (4, 0), (5, 1)):
        queue.complete(Completion(batch, owner, 0, 100, applied=batch != 4), ONE)
    assert queue.finished and queue.totals == LossSums(8.0, 4.0, 12.0, 4)
    record = queue.record()
    record.audit([100] * 4)
    assert [done.applied for done in record.completions] == [True, True, False, True]


def test_only_the_holder_completes_and_only_once() -> None:
    queue = LeaseQueue(segment(learners=2))
    queue.lease(owner=0, incarnation=1)
    for owner, incarnation, batch in ((1, 1, 0), (0, 0, 0), (0, 1, 1)):
        with pytest.raises(ValueError, match="not held by it"):
            queue.complete(Completion(batch, owner, incarnation, 1), ONE)
    queue.complete(Completion(0, 0, 1, 1), ONE)
    with pytest.raises(ValueError, match="not held by it"):
        queue.complete(Completion(0, 0, 1, 1), ONE)
    assert queue.totals == ONE


def test_released_leases_are_handed_out_first() -> None:
    queue = LeaseQueue(segment(learners=2))
    for owner in (0, 1, 0):
        queue.lease(owner)
    queue.complete(Completion(0, 0, 0, 1), ONE)
    assert queue.release(0) == [2]
    again = queue.lease(1)
    assert again is not None and (again.batch, again.progress) == (2, 2 / 7)
    with pytest.raises(RuntimeError, match="1 of 7 batches done, 2 still held"):
        queue.record()


def test_every_batch_is_completed_once_in_spite_of_deaths() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        queue, incarnation = LeaseQueue(segment(end=40, total=40, learners=5)), [0] * 5
        held: list[list[int]] = [[] for _ in range(5)]
        completed: list[int] = []
        releases = 0
        for _ in range(100_000):
            if queue.finished:
                break
            owner = rng.randrange(5)
            if rng.random() < 0.05:
                assert sorted(held[owner]) == queue.release(owner)
                releases += len(held[owner])
                held[owner], incarnation[owner] = [], incarnation[owner] + 1
            elif held[owner] and rng.random() < 0.6:
                batch = held[owner].pop()
                queue.complete(Completion(batch, owner, incarnation[owner], 100 + batch), ONE)
                completed.append(batch)
            elif (lease := queue.lease(owner, incarnation[owner])) is not None and lease.batch is not None:
                held[owner].append(lease.batch)
        record = queue.record()
        record.audit(range(100, 140))
        assert sorted(completed) == list(range(40)) and len(record.released) == releases
        assert queue.totals.batches == 40


# the audit


@pytest.mark.parametrize("fault", ["missing", "twice", "examples", "foreign"])
def test_the_audit_finds(fault: str) -> None:
    done = [Completion(n, 0, 0, 100 + n) for n in range(7)]
    wrong = {
        "missing": done[:-1], "twice": [*done, done[3]], "examples": [*done[:-1], Completion(6, 0, 0, 105)],
        "foreign": [*done, Completion(7, 0, 0, 107)],
    }[fault]  # fmt: skip
    SegmentRecord(segment(), tuple(done)).audit(range(100, 107))
    with pytest.raises(RuntimeError, match=r"epoch 2: batches 0\.\.6 were not completed exactly once"):
        SegmentRecord(segment(), tuple(wrong)).audit(range(100, 107))


def test_a_record_as_a_line_of_json() -> None:
    done = (Completion(0, 1, 2, 9), Completion(1, 0, 0, 8, applied=False))
    assert record_to_json(SegmentRecord(segment(end=2), done, ((0, 3),))) == {
        "epoch": 2, "batches": 7, "learners": 1, "batch": [0, 1], "owner": [1, 0], "incarnation": [2, 0],
        "examples": [9, 8], "applied": [True, False], "digest": [0, 0], "released": [[0, 3]], "lost": [], "servers": [],
    }  # fmt: skip


def test_totals_add_and_subtract() -> None:
    both = ONE + LossSums(4.0, 2.0, 3.0, 1)
    assert both == LossSums(6.0, 3.0, 6.0, 2) and both - ONE == LossSums(4.0, 2.0, 3.0, 1)
    assert both.mean_loss == 1.0 and both.accuracy == 0.5 and LossSums().mean_loss == 0.0
