"""The control plane of a team: the same cases over `ControlPlane` itself, and over `Coordinator`, its front for
learners (messages).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import pytest

from asr_am.distributed.control_plane import ControlPlane
from asr_am.distributed.coordinator import Coordinator
from asr_am.distributed.leases import Completion, Lease, LossSums, Segment, SegmentRecord, StaleSegment

ONE_BATCH = LossSums(1.0, 2.0, 10.0, 1)


@dataclass
class Request:
    """A request of a learner. `answer` finds out whether it is answered, and raises what the request raises."""

    rank: int
    poll: Callable[[], tuple[bool, Any]]
    result: list[Any] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        if not self.result:
            answered, value = self.poll()
            self.result = [value] if answered else []
        return bool(self.result)

    @property
    def value(self) -> Any:
        assert self.answered, f"learner {self.rank} is still waiting"
        return self.result[0]


class Harness(Protocol):
    """A control plane and its learners, which all have started."""

    def lose(self, rank: int) -> None: ...
    def restart(self, rank: int, incarnation: int) -> None: ...
    def open(self, rank: int, segment: Segment) -> None: ...
    def lease(self, rank: int) -> Request: ...
    def complete(self, rank: int, lease: Lease) -> None: ...
    def totals(self, rank: int) -> LossSums: ...
    def record(self, rank: int) -> SegmentRecord: ...

    def gather(self, rank: int, *values: float, kind: str = "gather") -> Request:
        """The answer is {rank: values}."""
        ...

    @property
    def plane(self) -> ControlPlane: ...


class Core:
    """`ControlPlane` without a front."""

    def __init__(self, size: int) -> None:
        self.plane = ControlPlane()
        for rank in range(size):
            self.plane.add(rank, joined=True)

    def lose(self, rank: int) -> None:
        self.plane.lose(rank)

    def restart(self, rank: int, incarnation: int) -> None:
        self.plane.add(rank, incarnation)

    def open(self, rank: int, segment: Segment) -> None:
        self.plane.open_segment(rank, segment)

    def lease(self, rank: int) -> Request:
        request = Request(rank, lambda: self.plane.lease(rank))
        request.answered  # noqa: B018 (asks at once)
        return request

    def complete(self, rank: int, lease: Lease) -> None:
        assert lease.batch is not None
        incarnation = self.plane.members[rank].incarnation
        self.plane.complete(Completion(lease.batch, rank, incarnation, 2), ONE_BATCH)

    def totals(self, rank: int) -> LossSums:
        return self.plane.totals(rank)

    def record(self, rank: int) -> SegmentRecord:
        return self.plane.record(rank)

    def gather(self, rank: int, *values: float, kind: str = "gather") -> Request:
        barrier = self.plane.arrive(rank, kind, list(values))

        def poll() -> tuple[bool, Any]:
            self.plane.complete_barrier(barrier)
            return barrier.result is not None, barrier.result

        request = Request(rank, poll)
        request.answered  # noqa: B018 (asks at once)
        return request


class Processes:
    """`Coordinator`, with messages that go through JSON."""

    def __init__(self, size: int) -> None:
        self._sent: dict[int, dict[int, Any]] = {rank: {} for rank in range(size)}
        self._ids = count(1)
        self._segments: dict[int, Segment] = {}
        self.coordinator = Coordinator(size, self._send)
        for rank in range(size):
            self.coordinator.register(rank, 0, f"tcp://{rank}")

    @property
    def plane(self) -> ControlPlane:
        return self.coordinator._plane

    def lose(self, rank: int) -> None:
        self.coordinator.leave(rank, "died")

    def restart(self, rank: int, incarnation: int) -> None:
        self.coordinator.expect(rank, incarnation)
        self.coordinator.register(rank, incarnation, f"tcp://{rank}")

    def open(self, rank: int, segment: Segment) -> None:
        answer = self._request(rank, "open", segment=vars(segment))()
        if "error" in answer:
            assert answer["kind"] == "outdated"
            raise StaleSegment(answer["error"])
        self._segments[rank] = segment

    def lease(self, rank: int) -> Request:
        def read(value: Any) -> Any:
            return None if value is None else Lease(**value)

        return self._waiting(rank, "lease", read)

    def complete(self, rank: int, lease: Lease) -> None:
        self._handle(
            rank, op="complete", batch=lease.batch, examples=2, applied=True, digest=0, totals=[1.0, 2.0, 10.0, 1]
        )

    def totals(self, rank: int) -> LossSums:
        return LossSums(*self._request(rank, "totals")()["value"])

    def record(self, rank: int) -> SegmentRecord:
        value = self._request(rank, "record")()["value"]
        completions = tuple(Completion(*row) for row in value["completions"])
        released, lost = (tuple((a, b) for a, b in value[key]) for key in ("released", "lost"))
        return SegmentRecord(self._segments[rank], completions, released, lost)

    def gather(self, rank: int, *values: float, kind: str = "gather") -> Request:
        def read(rows: Any) -> Any:
            return {int(other): row for other, row in rows.items()}

        return self._waiting(rank, "gather", read, kind=kind, values=list(values))

    def _waiting(self, rank: int, op: str, read: Callable[[Any], Any], **fields: Any) -> Request:
        answer = self._request(rank, op, **fields)
        return Request(rank, lambda: (True, read(answer()["value"])) if answer() else (False, None))

    def _request(self, rank: int, op: str, **fields: Any) -> Callable[[], dict[str, Any]]:
        number = next(self._ids)
        self._handle(rank, op=op, id=number, **fields)
        return lambda: self._sent[rank].get(number, {})

    def _handle(self, rank: int, **request: Any) -> None:
        self.coordinator.handle(rank, json.loads(json.dumps(request)))

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        if "id" in message:
            assert message["id"] not in self._sent[rank], "answered twice"
            self._sent[rank][message["id"]] = json.loads(json.dumps(message))


MakeHarness = Callable[[int], Harness]


@pytest.fixture(params=[Core, Processes], ids=["core", "coordinator"])
def make(request: pytest.FixtureRequest) -> MakeHarness:
    return request.param


def segment(epoch: int = 0, batches: int = 4) -> Segment:
    return Segment(epoch, 0, batches, batches, (10,) * batches, 0, 2)


def open_all(team: Harness, segment: Segment, *ranks: int) -> None:
    for rank in ranks:
        team.open(rank, segment)


def test_every_batch_is_leased_once(make: MakeHarness) -> None:
    team = make(2)
    open_all(team, segment(0, 4), 0, 1)
    leases = {rank: [team.lease(rank).value, team.lease(rank).value] for rank in (0, 1)}
    assert [lease.batch for rank in (0, 1) for lease in leases[rank]] == [0, 1, 2, 3]
    assert [lease.progress for rank in (0, 1) for lease in leases[rank]] == [0.0, 0.25, 0.5, 0.75]
    for rank in (0, 1):
        for lease in leases[rank]:
            team.complete(rank, lease)
    for rank in (0, 1):
        assert team.lease(rank).value is None
        assert team.totals(rank).batches == 4 and team.totals(rank).frames == 40.0
        record = team.record(rank)
        record.audit([2] * 4)
        assert [completion.owner for completion in record.completions] == [0, 0, 1, 1] and record.released == ()


def test_a_lease_is_waited_for_until_all_batches_are_done(make: MakeHarness) -> None:
    team = make(2)
    open_all(team, segment(0, 1), 0, 1)
    lease = team.lease(0).value
    waiting = team.lease(1)
    assert not waiting.answered
    team.complete(0, lease)
    assert waiting.value is None


def test_batches_of_a_dead_learner_are_leased_again(make: MakeHarness) -> None:
    team = make(2)
    open_all(team, segment(0, 1), 0, 1)
    assert team.lease(0).value.batch == 0
    waiting = team.lease(1)
    assert not waiting.answered
    team.lose(0)
    assert waiting.value == Lease(batch=0, progress=0.0, updates=0.0, loss_denominator=10)
    team.complete(1, waiting.value)
    assert team.lease(1).value is None
    done = (Completion(0, 1, 0, 2),)
    assert team.record(1) == SegmentRecord(segment(0, 1), done, released=((0, 0),), lost=((0, 0),))


def test_a_record_has_the_deaths_since_the_segment_was_finished(make: MakeHarness) -> None:
    team = make(2)
    open_all(team, segment(0, 1), 0, 1)
    team.complete(0, team.lease(0).value)
    assert team.record(0).lost == ()
    team.lose(1)
    assert team.record(0).lost == ((1, 0),)


def test_a_batch_can_only_be_completed_by_the_incarnation_that_holds_it(make: MakeHarness) -> None:
    team = make(2)
    open_all(team, segment(), 0, 1)
    old, others = team.lease(0).value, team.lease(1).value
    with pytest.raises(ValueError, match=r"learner 0.0 completes batch 1, not held by it"):
        team.complete(0, others)
    team.lose(0)
    team.restart(0, 1)
    team.open(0, segment())
    with pytest.raises(ValueError, match=r"learner 0.1 completes batch 0, not held by it"):
        team.complete(0, old)
    again = team.lease(0).value
    assert again.batch == 0
    team.complete(0, again)
    with pytest.raises(ValueError, match="not held"):
        team.complete(0, again)


def test_a_segment_has_no_record_before_it_is_finished(make: MakeHarness) -> None:
    team = make(1)
    with pytest.raises(ValueError, match="learner 0 has no open segment"):
        team.totals(0)
    team.open(0, segment())
    with pytest.raises(RuntimeError, match="0 of 4 batches done"):
        team.record(0)


def test_a_barrier_gives_all_values_by_rank(make: MakeHarness) -> None:
    team = make(3)
    requests = {rank: team.gather(rank, *range(rank)) for rank in (2, 0)}
    assert not requests[2].answered and not requests[0].answered
    requests[1] = team.gather(1, 0.0)
    for request in requests.values():
        assert list(request.value.items()) == [(0, []), (1, [0.0]), (2, [0.0, 1.0])]


def test_a_barrier_does_not_wait_for_the_dead(make: MakeHarness) -> None:
    team = make(3)
    first, other = team.gather(0, 1.5), team.gather(1)
    assert not first.answered
    team.lose(2)
    assert first.value == other.value == {0: [1.5], 1: []}


def test_values_of_a_learner_that_dies_at_a_barrier_are_left_out(make: MakeHarness) -> None:
    team = make(3)
    team.gather(2, 9.0)
    team.lose(2)
    first = team.gather(0, 1.0)
    assert not first.answered
    team.gather(1, 2.0)
    assert first.value == {0: [1.0], 1: [2.0]}


def test_learners_out_of_step_are_an_error(make: MakeHarness) -> None:
    team = make(2)
    team.gather(0)
    with pytest.raises(RuntimeError, match="learner 1 is out of step: it calls average where others called gather"):
        team.gather(1, kind="average")


def test_learners_must_agree_about_the_segment(make: MakeHarness) -> None:
    team = make(2)
    team.open(0, segment())
    with pytest.raises(RuntimeError, match="learner 1 disagrees about the segment at epoch 1, batch 0: check"):
        team.open(1, segment(batches=5))


def test_a_barrier_waits_for_a_slow_learner_in_an_earlier_segment(make: MakeHarness) -> None:
    team = make(2)
    open_all(team, segment(0), 0, 1)
    rows = [team.gather(rank, float(rank)) for rank in (0, 1)]
    team.open(1, segment(1))
    later = team.gather(1, 5.0)
    assert not later.answered
    assert rows[0].value == {0: [0.0], 1: [1.0]}
    team.open(0, segment(1))
    team.gather(0, 4.0)
    assert later.value == {0: [4.0], 1: [5.0]}


def test_a_restarted_learner_is_waited_for_from_the_segment_that_it_opens(make: MakeHarness) -> None:
    team = make(3)
    open_all(team, segment(0), 0, 1, 2)
    team.lose(1)
    team.restart(1, 1)
    before = [team.gather(0, 7.0), team.gather(2, 8.0)]
    assert before[0].value == before[1].value == {0: [7.0], 2: [8.0]}
    team.open(1, segment(0))
    assert team.gather(1, 9.0).value == {0: [7.0], 2: [8.0]}, "answered from memory"
    now = [team.gather(0, 0.0), team.gather(2, 2.0)]
    assert not now[0].answered
    team.gather(1, 1.0)
    assert now[0].value == now[1].value == {0: [0.0], 1: [1.0], 2: [2.0]}


def test_nobody_joins_a_segment_that_all_have_finished(make: MakeHarness) -> None:
    team = make(3)
    open_all(team, segment(0, 1), 0, 1, 2)
    team.complete(0, team.lease(0).value)
    team.lose(2)
    team.restart(2, 1)
    team.open(2, segment(0, 1))  # others may need its server to finish
    team.lose(2)
    team.restart(2, 2)
    team.record(0)
    half = team.gather(0, 1.0)
    assert not half.answered, "learner 1 has not finished"
    team.record(1)
    assert team.gather(1, 2.0).value == half.value == {0: [1.0], 1: [2.0]}
    with pytest.raises(StaleSegment):
        team.open(2, segment(0, 1))
    open_all(team, segment(1), 0, 2)


def test_weights_are_lost_with_the_last_learner_that_has_done_a_batch_since_the_checkpoint(make: MakeHarness) -> None:
    team = make(2)
    open_all(team, segment(0, 2), 0, 1)
    lease = team.lease(0).value
    team.lose(1)
    team.restart(1, 1)
    team.complete(0, lease)
    assert not team.plane.weights_lost
    team.lose(0)
    assert team.plane.weights_lost, "learner 1 has not joined yet"


def test_barriers_before_the_first_segment_are_kept_for_restarted_learners(make: MakeHarness) -> None:
    team = make(2)
    for rank in (0, 1):
        team.gather(rank, float(rank))
    for epoch in range(2):
        open_all(team, segment(epoch), 0, 1)
    team.lose(1)
    team.restart(1, 1)
    assert team.gather(1, 9.0).value == {0: [0.0], 1: [1.0]}


def test_a_restarted_learner_ahead_of_the_others_is_not_waited_for_in_their_segment(make: MakeHarness) -> None:
    team = make(3)
    open_all(team, segment(0), 0, 1, 2)
    open_all(team, segment(1), 2)
    team.lose(1)
    team.restart(1, 1)
    team.open(1, segment(1))
    team.lose(2)
    assert team.gather(0, 1.0).value == {0: [1.0]}


def test_a_restarted_learner_that_is_behind_is_told_so(make: MakeHarness) -> None:
    team = make(2)
    team.open(0, segment(0))
    team.lose(1)
    team.restart(1, 1)
    team.open(0, segment(1))
    with pytest.raises(StaleSegment, match="learner 1 asks for epoch 1 from batch 0, which the others have finished"):
        team.open(1, segment(0))
    team.open(1, segment(1))
    assert team.lease(1).value.batch == 0


def test_segments_that_all_have_left_are_dropped(make: MakeHarness) -> None:
    team = make(2)
    for epoch in range(10):
        open_all(team, segment(epoch, 1), 0, 1)
        team.complete(0, team.lease(0).value)
        team.record(0)
        for rank in (0, 1):
            team.gather(rank)
    plane = team.plane
    assert (len(plane._queues), len(plane._barriers)) == (1, 1)


class Learner:
    """Makes the requests of the training loop, one at a time: an epoch's batches, two barriers, the next epoch."""

    def __init__(
        self, team: Harness, rank: int, incarnation: int, epochs: int, compute: Callable[[tuple[int, int]], None]
    ) -> None:
        self.team, self.rank, self.incarnation, self.epochs, self.compute = team, rank, incarnation, epochs, compute
        self.epoch, self.step, self.done = 0, "open", False
        self.request: Request | None = None
        self.records: dict[int, SegmentRecord] = {}

    def advance(self) -> None:
        if self.step == "open":
            self._open()
        elif self.request is None:
            self.request = self.team.lease(self.rank) if self.step == "lease" else self.team.gather(self.rank)
        elif self.request.answered:
            self._on_answer(self.request.value)

    def _open(self) -> None:
        try:
            self.team.open(self.rank, segment(self.epoch, 12))
            self.step = "lease"
        except StaleSegment:
            self.epoch += 1
        self.done = self.epoch == self.epochs

    def _on_answer(self, value: Any) -> None:
        self.request = None
        if self.step == "lease" and value is not None:
            self.compute((self.epoch, value.batch))
            self.team.complete(self.rank, value)
        elif self.step == "lease":
            self.step = "first barrier"
        elif self.step == "first barrier":
            self.records[self.epoch] = self.team.record(self.rank)
            self.step = "second barrier"
        else:
            self.epoch, self.step = self.epoch + 1, "open"
            self.done = self.epoch == self.epochs


def test_every_batch_is_done_once_and_nobody_waits_forever_under_random_deaths(make: MakeHarness) -> None:
    deaths = rejoined = 0
    for seed in range(60):
        rng, size, epochs = random.Random(seed), 4, 3
        team = make(size)
        computed: list[tuple[int, int]] = []
        alive = {rank: Learner(team, rank, 0, epochs, computed.append) for rank in range(size)}
        finished: list[Learner] = []
        for _ in range(20_000):
            if not alive:
                break
            rank = rng.choice(list(alive))
            learner = alive[rank]
            if rng.random() < 0.004 and len(alive) > 1 and learner.incarnation < 3:
                deaths += 1
                team.lose(rank)
                team.restart(rank, learner.incarnation + 1)
                alive[rank] = Learner(team, rank, learner.incarnation + 1, epochs, computed.append)
                continue
            learner.advance()
            if learner.done:
                finished.append(alive.pop(rank))
                team.lose(rank)
        assert not alive, f"seed {seed}: {[(w.rank, w.epoch, w.step) for w in alive.values()]} wait forever"
        rejoined += sum(learner.incarnation > 0 and bool(learner.records) for learner in finished)
        for epoch in range(epochs):
            records = [learner.records[epoch] for learner in finished if epoch in learner.records]
            assert records and len({(record.completions, record.released) for record in records}) == 1
            records[0].audit([2] * 12)
            assert sorted(batch for e, batch in computed if e == epoch) == list(range(12))
    assert deaths > 30 and rejoined > 10, (deaths, rejoined)
