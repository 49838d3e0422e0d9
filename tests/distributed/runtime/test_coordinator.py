from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from asr_am.distributed.leases import Completion, Segment, SegmentRecord
from asr_am.distributed.runtime.control_client import segment_to_json
from asr_am.distributed.runtime.coordinator import Coordinator


class Table:
    """A session and what it has sent to each learner. `got` takes the answer to a request, None while there is none."""

    def __init__(self, size: int, *, start: bool = True) -> None:
        self.sent: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(size)}
        self.session = Coordinator(size, lambda rank, message: self.sent[rank].append(message))
        self._number = 0
        for rank in range(size if start else 0):
            self.come(rank)

    def come(self, rank: int, incarnation: int = 0) -> None:
        self.session.register(rank, incarnation, f"tcp://{rank}.{incarnation}")

    def die(self, rank: int) -> None:
        self.session.leave(rank, "died")
        self.sent[rank].clear()

    def ask(self, rank: int, op: str, **fields: Any) -> int:
        self._number += 1
        self.session.handle(rank, {"op": op, "id": self._number, **fields})
        return self._number

    def open(self, rank: int, segment: Segment) -> dict[str, Any]:
        return self.answer(rank, self.ask(rank, "open", segment=segment_to_json(segment)))

    def gather(self, rank: int, *values: float, kind: str = "gather") -> int:
        return self.ask(rank, "gather", kind=kind, values=list(values))

    def got(self, rank: int, number: int) -> dict[str, Any] | None:
        found = [message for message in self.sent[rank] if message.get("id") == number]
        assert len(found) <= 1
        return found[0] if found else None

    def answer(self, rank: int, number: int) -> Any:
        message = self.got(rank, number)
        assert message is not None, f"request {number} of learner {rank} is not answered"
        return message

    def value(self, rank: int, number: int) -> Any:
        return self.answer(rank, number)["value"]

    def news(self, rank: int) -> list[tuple[Any, ...]]:
        return [(m["news"], m.get("rank")) for m in self.sent[rank] if "news" in m]


def segment(epoch: int = 0, batches: int = 4) -> Segment:
    return Segment(epoch, 0, batches, batches, (10,) * batches, 0, 2)


def test_all_are_told_of_all_once_all_have_come() -> None:
    table = Table(3, start=False)
    table.come(2)
    table.come(0)
    assert table.news(0) == table.news(2) == []
    table.come(1)
    assert table.sent[2] == [{"news": "peers", "peers": {0: [0, "tcp://0.0"], 1: [0, "tcp://1.0"]}}]
    assert len(table.sent[0]) == len(table.sent[1]) == 1


def test_one_that_dies_before_the_start_is_not_waited_for() -> None:
    table = Table(3, start=False)
    table.come(0)
    table.come(1)
    table.die(2)
    assert table.sent[0][0]["peers"] == {1: [0, "tcp://1.0"]}


def test_a_gather_waits_for_the_living() -> None:
    table = Table(3)
    first = table.gather(0, 1.5)
    other = table.gather(1)
    assert table.got(0, first) is None
    table.die(2)
    assert table.value(0, first) == table.value(1, other) == {0: [1.5], 1: []}
    assert ("died", 2) in table.news(0)


def test_what_the_dead_had_brought_is_left_out() -> None:
    table = Table(3)
    table.gather(2, 9.0)
    table.die(2)
    mine = table.gather(0, 1.0)
    table.gather(1, 2.0)
    assert table.value(0, mine) == {0: [1.0], 1: [2.0]}


def test_nobody_waits_for_one_that_has_finished() -> None:
    table = Table(2)
    mine = table.gather(0, 1.0)
    table.session.handle(1, {"op": "bye"})
    assert table.value(0, mine) == {0: [1.0]}
    table.session.leave(1, None)  # its process has ended, too


def test_learners_that_do_different_things_are_told() -> None:
    table = Table(2)
    table.gather(0)
    with pytest.raises(RuntimeError, match="learner 1 is out of step: it calls average where others called gather"):
        table.gather(1, kind="average")
    table.open(0, segment())
    with pytest.raises(RuntimeError, match="learner 1 disagrees about the segment"):
        table.open(1, segment(batches=5))
    with pytest.raises(ValueError, match="no such request: 'dance'"):
        table.ask(1, "dance")


def test_a_slow_one_is_waited_for_though_others_have_gone_on() -> None:
    table = Table(2)
    for rank in (0, 1):
        table.open(rank, segment(0))
    rows = [table.gather(rank, float(rank)) for rank in (0, 1)]
    assert table.value(1, rows[1]) == {0: [0.0], 1: [1.0]}
    table.open(1, segment(1))
    later = table.gather(1, 5.0)
    assert table.got(1, later) is None, "learner 0 will come to this segment"
    table.open(0, segment(1))
    table.gather(0, 4.0)
    assert table.value(1, later) == {0: [4.0], 1: [5.0]}


def test_a_restarted_learner_takes_part_from_the_segment_that_it_opens() -> None:
    table = Table(3)
    for rank in range(3):
        table.open(rank, segment(0))
    table.die(1)
    table.session.expect(1, 1)
    table.come(1, incarnation=1)
    assert table.sent[1] == [{"news": "peers", "peers": {0: [0, "tcp://0.0"], 2: [0, "tcp://2.0"]}}]
    before = table.gather(0, 7.0)
    table.gather(2, 8.0)
    assert table.value(0, before) == {0: [7.0], 2: [8.0]}, "it is not waited for yet"
    assert ("born", 1) not in table.news(0)
    table.open(1, segment(0))
    assert ("born", 1) in table.news(0) and ("born", 1) in table.news(2)
    remembered = table.gather(1, 9.0)
    assert table.value(1, remembered) == {0: [7.0], 2: [8.0]}, "it hears what the others met about"
    now = [table.gather(rank, float(rank)) for rank in (0, 2)]
    assert table.got(0, now[0]) is None, "it is waited for now"
    table.gather(1, 1.0)
    assert table.value(0, now[0]) == {0: [0.0], 1: [1.0], 2: [2.0]}


def test_a_restarted_learner_that_is_behind_is_outdated() -> None:
    table = Table(2)
    table.open(0, segment(0))
    table.die(1)
    table.session.expect(1, 1)
    table.come(1, incarnation=1)
    table.open(0, segment(1))
    assert table.open(1, segment(0))["kind"] == "outdated"
    assert ("born", 1) not in table.news(0)
    assert "error" not in table.open(1, segment(1))


def test_a_lease_is_waited_for_while_one_may_come_back() -> None:
    table = Table(2)
    for rank in (0, 1):
        table.open(rank, segment(0, 1))
    held = table.ask(0, "lease")
    assert table.value(0, held)["batch"] == 0
    waits = table.ask(1, "lease")
    assert table.got(1, waits) is None
    table.die(0)
    assert table.value(1, waits) == {"batch": 0, "progress": 0.0, "updates": 0.0, "normaliser": 10}
    table.ask(1, "complete", batch=0, examples=2, applied=True, totals=[1.0, 2.0, 10.0, 1])
    assert table.value(1, table.ask(1, "lease")) is None
    assert table.value(1, table.ask(1, "totals")) == (1.0, 2.0, 10.0, 1)
    record = table.value(1, table.ask(1, "record"))
    assert record == {"completions": ((0, 1, 0, 2, True),), "released": ((0, 0),)}
    with pytest.raises(ValueError, match="not held"):
        table.ask(1, "complete", batch=0, examples=2, applied=True, totals=[1.0, 2.0, 10.0, 1])


def test_who_waits_for_a_lease_hears_that_all_are_done() -> None:
    table = Table(2)
    for rank in (0, 1):
        table.open(rank, segment(0, 1))
    table.ask(0, "lease")
    waits = table.ask(1, "lease")
    table.ask(0, "complete", batch=0, examples=2, applied=True, totals=[0, 0, 0, 1])
    assert table.value(1, waits) is None


class Learner:
    """Does what the training loop asks of a session, one request at a time."""

    def __init__(
        self, table: Table, rank: int, incarnation: int, epochs: int, do: Callable[[tuple[int, int]], None]
    ) -> None:
        self.table, self.rank, self.incarnation, self.epochs, self.do = table, rank, incarnation, epochs, do
        self.epoch, self.on_pull, self.step, self.done = 0, 0, "open", False
        self.records: dict[int, Any] = {}

    def turn(self) -> bool:
        """False where it has to wait."""
        if self.step == "open":
            outdated = self.table.open(self.rank, segment(self.epoch, 12)).get("kind") == "outdated"
            self.epoch, self.step = (self.epoch + 1, "open") if outdated else (self.epoch, "lease")
            self.done = self.epoch == self.epochs
            self.on_pull = 0
        elif not self.on_pull:
            self.on_pull = self.table.ask(self.rank, "lease") if self.step == "lease" else self.table.gather(self.rank)
        elif (answer := self.table.got(self.rank, self.on_pull)) is None:
            return False
        else:
            self.take(answer["value"])
        return True

    def take(self, value: Any) -> None:
        self.on_pull = 0
        if self.step == "lease" and value is not None:
            self.do((self.epoch, value["batch"]))
            self.table.ask(self.rank, "complete", batch=value["batch"], examples=1, applied=True, totals=[0, 0, 1, 1])
        elif self.step == "lease":
            self.step = "first"
        elif self.step == "first":
            self.records[self.epoch] = self.table.value(self.rank, self.table.ask(self.rank, "record"))
            self.step = "second"
        else:
            self.epoch, self.step = self.epoch + 1, "open"
            self.done = self.epoch == self.epochs
            if self.done:
                self.table.session.handle(self.rank, {"op": "bye"})


def test_every_batch_once_and_nobody_stuck_whoever_dies() -> None:
    deaths = joined = 0
    for seed in range(60):
        rng, size, epochs = random.Random(seed), 4, 3
        table = Table(size)
        computed: list[tuple[int, int]] = []
        do = computed.append
        living = {rank: Learner(table, rank, 0, epochs, do) for rank in range(size)}
        finished: list[Learner] = []
        for _ in range(20_000):
            if not living:
                break
            rank = rng.choice(list(living))
            learner = living[rank]
            if rng.random() < 0.004 and len(living) > 1 and learner.incarnation < 3:
                deaths += 1
                table.die(rank)
                table.session.expect(rank, learner.incarnation + 1)
                table.come(rank, learner.incarnation + 1)
                living[rank] = Learner(table, rank, learner.incarnation + 1, epochs, do)
                continue
            learner.turn()
            if learner.done:
                finished.append(living.pop(rank))
        assert not living, f"seed {seed}: {[(w.rank, w.epoch, w.step) for w in living.values()]} wait for ever"
        joined += sum(learner.incarnation > 0 and bool(learner.records) for learner in finished)
        for epoch in range(epochs):
            records = [learner.records[epoch] for learner in finished if epoch in learner.records]
            assert records and all(record == records[0] for record in records)
            rows = tuple(Completion(*row) for row in records[0]["completions"])
            SegmentRecord(segment(epoch, 12), rows).audit([1] * 12)
            assert sorted(batch for e, batch in computed if e == epoch) == list(range(12))
    assert deaths > 30 and joined > 10, (deaths, joined)
