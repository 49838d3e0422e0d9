"""What the supervisor knows of a team of mail-only learners: who lives, who has which batch, who waits for whom.

A restarted learner takes part once it has opened a segment that the others have not left behind; until then it is not
alive to them. Nothing here touches a socket: messages go out through `send(rank, message)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any

from asr_am.distributed.leases import Completion, LeaseTable, Segment, Totals
from asr_am.distributed.process.meetings import START, Meetings, Place

log = logging.getLogger(__name__)

Message = dict[str, Any]


@dataclass
class Seat:
    """A learner's. address: of its mail, None before it has come. greeted: it knows the others. joined: the others know
    it, and wait for it. place, met: the segment it is at, and how many meetings it had there. asks: number of its
    request for a lease, while none is free.
    """

    incarnation: int = 0
    address: str | None = None
    greeted: bool = False
    joined: bool = False
    place: Place = START
    met: int = 0
    asks: int | None = None


class Session:
    """seats: of the living and of those that are expected, by rank. started: all that began the run have come."""

    def __init__(self, size: int, send: Callable[[int, Message], None]) -> None:
        self._size, self._send = size, send
        self.seats = {rank: Seat() for rank in range(size)}
        self.started = False
        self._tables: dict[Place, LeaseTable] = {}
        self._records: dict[Place, Message] = {}  # as all learners are told them
        self._meetings = Meetings(self._expected, self._answer)
        self._newest = START

    # who lives

    def expect(self, rank: int, incarnation: int) -> None:
        """A learner is being started again."""
        self.seats[rank] = Seat(incarnation)

    def register(self, rank: int, incarnation: int, address: str) -> None:
        """A learner has come. It is told who the others are once all that begin the run are there."""
        seat = self.seats[rank]
        seat.incarnation, seat.address = incarnation, address
        self._greet()

    def leave(self, rank: int, reason: str | None) -> None:
        """A learner died, or has finished (no reason), which its process' end tells once more."""
        seat = self.seats.pop(rank, None)
        if seat is None:
            return
        if seat.joined:
            self._tell_others(rank, {"news": "died", "incarnation": seat.incarnation, "reason": reason or "finished"})
        for table in self._tables.values():
            if back := table.release(rank):
                log.info("batches of learner %d are handed out again: %s", rank, ", ".join(map(str, back)))
        self._meetings.lose(rank)
        self._serve_leases()
        self._greet()

    def _greet(self) -> None:
        """Tell those who have come the addresses of those who live."""
        if not self.started and all(seat.address for seat in self.seats.values()):
            self.started = True
            for seat in self.seats.values():
                seat.joined = seat.incarnation == 0
        for rank, seat in self.seats.items():
            if self.started and seat.address and not seat.greeted:
                peers = {r: [s.incarnation, s.address] for r, s in self.seats.items() if s.joined and r != rank}
                self._send(rank, {"news": "peers", "peers": peers})
                seat.greeted = True

    def _tell_others(self, rank: int, news: Message) -> None:
        for other, seat in self.seats.items():
            if other != rank and seat.greeted:
                self._send(other, {**news, "rank": rank})

    def _expected(self, place: Place) -> list[int]:
        """Who is to come to a meeting; those who have gone past its place cannot."""
        return [rank for rank, seat in self.seats.items() if seat.joined and seat.place <= place]

    # requests

    def handle(self, rank: int, request: Message) -> None:
        """What a learner that has registered asks for."""
        op = request.get("op")
        if op == "open":
            self._open(rank, request)
        elif op == "lease":
            self._table(rank)
            self.seats[rank].asks = request["id"]
            self._serve_leases()
        elif op == "complete":
            self._complete(rank, request)
        elif op == "totals":
            self._answer(rank, request["id"], astuple(self._table(rank).totals))
        elif op == "record":
            self._record(rank, request["id"])
        elif op == "gather":
            seat = self.seats[rank]
            seat.met += 1
            self._meetings.come(seat.place, seat.met, request["kind"], rank, request["id"], request["values"])
        elif op == "bye":
            self.leave(rank, None)
        else:
            raise ValueError(f"no such request: {op!r}")

    def _open(self, rank: int, request: Message) -> None:
        values = request["segment"]
        segment = Segment(**{**values, "frames": tuple(values["frames"])})
        seat, place = self.seats[rank], (segment.epoch, segment.begin)
        if not seat.joined and place < self._newest:
            self._object(rank, request, "outdated", (
                f"learner {rank} asks for epoch {segment.epoch + 1} from batch {segment.begin}, which the others have "
                "left behind; read the last checkpoint again"
            ))  # fmt: skip
            return
        table = self._tables.setdefault(place, LeaseTable(segment))
        if table.segment != segment:
            raise RuntimeError(f"learner {rank} disagrees about the segment at epoch, batch {place}: {segment}")
        if not seat.joined:
            seat.joined = True
            log.info("learner %d is back", rank)
            self._tell_others(rank, {"news": "born", "incarnation": seat.incarnation, "address": seat.address})
        seat.place, seat.met = place, 0
        self._newest = max(self._newest, place)
        self._forget()
        self._answer(rank, request["id"], None)
        self._meetings.close()

    def _forget(self) -> None:
        """Drop what no learner can ask for any more."""
        oldest = min(seat.place for seat in self.seats.values() if seat.joined)
        self._tables = {place: table for place, table in self._tables.items() if place >= oldest}
        self._records = {place: record for place, record in self._records.items() if place >= oldest}
        self._meetings.forget(oldest)

    def _table(self, rank: int) -> LeaseTable:
        return self._tables[self.seats[rank].place]

    def _serve_leases(self) -> None:
        """Answer those who wait for a batch, where there is one, or will be none."""
        for rank, seat in self.seats.items():
            if seat.asks is None:
                continue
            table = self._table(rank)
            lease = table.lease(rank, seat.incarnation)
            if lease is not None or table.finished:
                self._answer(rank, seat.asks, None if lease is None else asdict(lease))
                seat.asks = None

    def _complete(self, rank: int, request: Message) -> None:
        completion = Completion(
            request["batch"], rank, self.seats[rank].incarnation, request["examples"], request["applied"]
        )  # fmt: skip
        table = self._table(rank)
        table.complete(completion, Totals(*request["totals"]))
        if table.finished:
            self._serve_leases()

    def _record(self, rank: int, number: int) -> None:
        place = self.seats[rank].place
        if place not in self._records:
            record = self._table(rank).record()
            self._records[place] = {"completions": record.completions, "released": record.released}
        self._answer(rank, number, self._records[place])

    # answers

    def _answer(self, rank: int, number: int, value: object) -> None:
        self._send(rank, {"id": number, "value": value})

    def _object(self, rank: int, request: Message, kind: str, error: str) -> None:
        self._send(rank, {"id": request["id"], "kind": kind, "error": error})
