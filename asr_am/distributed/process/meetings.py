"""Meetings of the living: everybody brings values, and gets everybody's.

They are matched by the segment that a learner is at and by how many it had there before. Results are kept, so that a
restarted learner, which comes later, is answered from memory what the others met about before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

Place = tuple[int, int]  # epoch and first batch of a segment
START: Place = (-1, -1)  # before the first
Rows = dict[int, list[float]]


@dataclass
class Meeting:
    """values: of those who have come; of all, once complete. waiting: numbers of their requests."""

    kind: str
    values: Rows = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    complete: bool = False


class Meetings:
    """expected: who is to come to a meeting at a place. answer: called with rank, number of its request, rows."""

    def __init__(self, expected: Callable[[Place], Collection[int]], answer: Callable[[int, int, Rows], None]) -> None:
        self._expected, self._answer = expected, answer
        self._meetings: dict[tuple[Place, int], Meeting] = {}

    def come(self, place: Place, met: int, kind: str, rank: int, number: int, values: list[float]) -> None:
        """RuntimeError where the others meet about something else."""
        meeting = self._meetings.setdefault((place, met), Meeting(kind))
        if meeting.kind != kind:
            raise RuntimeError(f"learner {rank} is out of step: it calls {kind} where others called {meeting.kind}")
        if meeting.complete:
            self._answer(rank, number, meeting.values)
            return
        meeting.values[rank], meeting.waiting[rank] = values, number
        self.close()

    def close(self) -> None:
        """Answer all who wait for nobody any more."""
        for (place, _), meeting in self._meetings.items():
            if meeting.complete or not meeting.values or set(self._expected(place)) - meeting.values.keys():
                continue
            meeting.complete = True
            meeting.values = dict(sorted(meeting.values.items()))
            for rank, number in meeting.waiting.items():
                self._answer(rank, number, meeting.values)

    def lose(self, rank: int) -> None:
        for meeting in self._meetings.values():
            if not meeting.complete:
                meeting.values.pop(rank, None)
                meeting.waiting.pop(rank, None)
        self.close()

    def forget(self, oldest: Place) -> None:
        """Nobody is at a place before `oldest` any more."""
        self._meetings = {key: meeting for key, meeting in self._meetings.items() if key[0] >= oldest}
