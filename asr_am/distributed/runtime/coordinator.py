"""Meetings of the living: everybody brings values, and gets everybody's.

They are matched by the segment that a learner is at and by how many it had there before. Results are kept, so that a
restarted learner, which comes later, is answered from memory what the others met about before.


What the supervisor knows of a team of mail-only learners: who lives, who has which batch, who waits for whom.

A restarted learner takes part once it has opened a segment that the others have not left behind; until then it is not
alive to them. Nothing here touches a socket: messages go out through `send(rank, message)`.


The supervisor's socket: JSON messages from learners and from the agents on other hosts."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import zmq

from asr_am.distributed.leases import Completion, LeaseTable, Segment, Totals
from asr_am.distributed.runtime.security import Door, open_socket, split_address
from asr_am.distributed.runtime.worker_process import LOCALHOST
from asr_am.errors import InputError

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


LARGEST = 64 << 20  # bytes of a message


def read_json(frames: list[bytes]) -> Message | None:
    """A message; None where the bytes are no JSON object."""
    with suppress(ValueError, RecursionError):
        message = json.loads(b"".join(frames))
        if isinstance(message, dict):
            return message
    return None


class Server:
    """At `address` (host:port), or at a free port for this host only. url: where learners connect to."""

    def __init__(self, address: str | None, key: str | None) -> None:
        self.host, port = _own(address) if address else (LOCALHOST, 0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, key)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self.door = Door(self._socket, "the supervisor")
        try:
            self._socket.bind(f"tcp://{self.host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise InputError(
                f"address={address}: cannot be listened on ({error}); is it an address of this host, and the port free?"
            ) from error
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, seconds: float) -> Iterator[tuple[bytes, Message]]:
        """Messages with the connections they came on; waits `seconds` for the first."""
        wait = int(1000 * seconds)
        while self._socket.poll(wait):
            connection, *frames = self._socket.recv_multipart()
            wait = 0
            message = read_json(frames)
            if message is not None:
                yield connection, message
            else:
                self.door.refuse("a message that is no JSON object")
        self.door.look()

    def send(self, connection: bytes, message: Message) -> None:
        self._socket.send_multipart([connection, json.dumps(message).encode()])

    def close(self) -> None:
        self.door.close()
        self._socket.close(linger=500)
        self._context.term()


def _own(address: str) -> tuple[str, int]:
    """IPv4 address and port to listen on; InputError where a host's name leads others to themselves."""
    host, port = split_address(address, "address")
    try:
        found = socket.gethostbyname(host)
    except OSError as error:
        raise InputError(f"address={address}: host {host!r} is unknown ({error})") from error
    if found.startswith("127.") and host not in (found, "localhost"):
        raise InputError(f"address={address}: here, {host!r} is {found}, which no other host reaches; give the number")
    return found, port
