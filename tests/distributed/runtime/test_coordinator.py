"""What `Coordinator` sends: announcements and the JSON of answers. test_control_plane.py tests who can go on when."""

from __future__ import annotations

from typing import Any

import pytest

from asr_am.distributed.coordinator import Coordinator
from asr_am.distributed.leases import Segment

COMPLETE = {"op": "complete", "batch": 0, "examples": 2, "applied": True, "digest": 7, "totals": [1.0, 2.0, 10.0, 1]}


class Recorder:
    """A coordinator, and what it has sent to each learner."""

    def __init__(self, size: int, *, start: bool = True) -> None:
        self.sent: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(size)}
        self.coordinator = Coordinator(size, lambda rank, message: self.sent[rank].append(message))
        self._number = 0
        for rank in range(size if start else 0):
            self.register(rank)

    def register(self, rank: int, incarnation: int = 0) -> None:
        self.coordinator.register(rank, incarnation, f"tcp://{rank}.{incarnation}")

    def restart(self, rank: int) -> None:
        self.coordinator.leave(rank, "died")
        self.sent[rank].clear()
        self.coordinator.expect(rank, 1)
        self.register(rank, 1)

    def request(self, rank: int, op: str, **fields: Any) -> dict[str, Any] | None:
        """The answer, None while there is none."""
        self._number += 1
        self.coordinator.handle(rank, {"op": op, "id": self._number, **fields})
        found = [message for message in self.sent[rank] if message.get("id") == self._number]
        assert len(found) <= 1
        return found[0] if found else None

    def open(self, rank: int, segment: Segment) -> dict[str, Any] | None:
        return self.request(rank, "open", segment=vars(segment))

    def news(self, rank: int) -> list[tuple[Any, ...]]:
        return [(m["news"], m.get("rank")) for m in self.sent[rank] if "news" in m]


def segment(epoch: int = 0, batches: int = 4) -> Segment:
    return Segment(epoch, 0, batches, batches, (10,) * batches, 0, 2)


def test_addresses_are_sent_once_all_have_registered() -> None:
    team = Recorder(3, start=False)
    team.register(2)
    team.register(0)
    assert team.news(0) == team.news(2) == []
    team.register(1)
    peers = {0: [0, "tcp://0.0"], 1: [0, "tcp://1.0"], 2: [0, "tcp://2.0"]}
    assert team.sent[2] == [{"news": "peers", "peers": peers, "ranks": [0, 1, 2], "gone": [], "rejoins": False}]
    assert len(team.sent[0]) == len(team.sent[1]) == 1


def test_a_learner_that_dies_before_the_start_is_not_waited_for() -> None:
    team = Recorder(3, start=False)
    team.register(0)
    team.register(1)
    team.coordinator.leave(2, "died")
    assert team.sent[0][0]["peers"].keys() == {0, 1} and team.sent[0][0]["ranks"] == [0, 1]


def test_all_learners_that_die_before_the_start_begin_as_a_new_team() -> None:
    team = Recorder(2, start=False)
    team.register(0)
    for rank in (0, 1):
        team.coordinator.leave(rank, "died")
    for rank in (0, 1):
        team.coordinator.expect(rank, 1)
    for rank in (0, 1):
        team.register(rank, 1)
    assert team.sent[1][-1]["ranks"] == [0, 1] and not team.sent[1][-1]["rejoins"]


def test_a_death_is_announced() -> None:
    team = Recorder(3)
    team.coordinator.leave(2, "was killed")
    died = {"news": "died", "rank": 2, "incarnation": 0, "reason": "was killed", "gone": False}
    assert team.sent[0][1:] == team.sent[1][1:] == [died]


def test_a_learner_that_is_gone_is_announced_also_while_its_restart_was_due() -> None:
    team = Recorder(3)
    team.coordinator.leave(2, "was killed")
    team.coordinator.leave(2, "its host is lost", gone=True)
    assert [message["gone"] for message in team.sent[0][1:]] == [False, True]
    team.restart(1)
    assert team.sent[1][0]["gone"] == [2] and team.sent[1][0]["ranks"] == [0, 1, 2]


def test_a_team_begins_again_together() -> None:
    sent: dict[int, list[dict[str, Any]]] = {0: [], 2: []}
    coordinator = Coordinator(3, lambda rank, message: sent[rank].append(message), {0: 1, 2: 4})
    coordinator.register(0, 1, "tcp://0.1")
    coordinator.register(2, 4, "tcp://2.4")
    peers = {0: [1, "tcp://0.1"], 2: [4, "tcp://2.4"]}
    assert sent[0] == [{"news": "peers", "peers": peers, "ranks": [0, 2], "gone": [], "rejoins": False}]
    assert all(member.joined for member in coordinator.members.values())


def test_a_learner_that_finishes_is_not_waited_for() -> None:
    team = Recorder(2)
    assert team.request(0, "gather", kind="gather", values=[1.0]) is None
    team.coordinator.handle(1, {"op": "bye"})
    assert team.sent[0][1:] == [
        {"news": "died", "rank": 1, "incarnation": 0, "reason": "finished", "gone": False},
        {"id": 1, "value": {0: [1.0]}},
    ]
    team.coordinator.leave(1, None)  # its process has ended, too
    assert len(team.sent[0]) == 3


def test_a_restarted_learner_is_announced_when_it_opens_a_segment() -> None:
    team = Recorder(3)
    for rank in range(3):
        team.open(rank, segment(0))
    team.restart(1)
    peers = {0: [0, "tcp://0.0"], 2: [0, "tcp://2.0"]}
    assert team.sent[1] == [{"news": "peers", "peers": peers, "ranks": [0, 1, 2], "gone": [], "rejoins": True}]
    assert ("born", 1) not in team.news(0)
    team.open(1, segment(0))
    born = {"news": "born", "rank": 1, "incarnation": 1, "address": "tcp://1.1"}
    assert team.sent[0][-1] == team.sent[2][-1] == born


def test_a_restarted_learner_that_is_behind_is_not_announced() -> None:
    team = Recorder(2)
    team.open(0, segment(0))
    team.restart(1)
    team.open(0, segment(1))
    answer = team.open(1, segment(0))
    assert answer is not None and answer["kind"] == "outdated" and "read the last checkpoint again" in answer["error"]
    assert ("born", 1) not in team.news(0)
    answer = team.open(1, segment(1))
    assert answer is not None and "error" not in answer and ("born", 1) in team.news(0)


def test_answers_about_leases() -> None:
    team = Recorder(1)
    team.open(0, segment(0, 1))
    lease = {"batch": 0, "progress": 0.0, "updates": 0.0, "loss_denominator": 10, "digest": 0}
    assert team.request(0, "lease") == {"id": 2, "value": lease}
    team.coordinator.handle(0, COMPLETE)
    assert team.request(0, "lease") == {"id": 3, "value": None}
    assert team.request(0, "totals") == {"id": 4, "value": (1.0, 2.0, 10.0, 1)}
    record = {"end": 1, "completions": ((0, 0, 0, 2, True, 7),), "released": (), "lost": ()}
    assert team.request(0, "record") == {"id": 5, "value": record}


def test_an_unknown_request_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown request: 'dance'"):
        Recorder(2).request(1, "dance")
