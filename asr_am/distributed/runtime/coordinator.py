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

from asr_am.distributed.leases import Completion, LeaseQueue, LossSums, Segment
from asr_am.distributed.runtime.security import ConnectionMonitor, open_socket, split_address
from asr_am.distributed.runtime.worker_process import LOCALHOST
from asr_am.errors import InputError

SegmentId = tuple[int, int]  # epoch and first batch of a segment
START: SegmentId = (-1, -1)  # before the first
BarrierRows = dict[int, list[float]]


@dataclass
class Barrier:
    """values: of those who have come; of all, once complete. waiting: numbers of their requests."""

    kind: str
    values: BarrierRows = field(default_factory=dict)
    wait_monitor: dict[int, int] = field(default_factory=dict)
    complete: bool = False


class Barriers:
    """expected: who is to come to a meeting at a place. answer: called with rank, number of its request, rows."""

    def __init__(
        self, expected: Callable[[SegmentId], Collection[int]], answer: Callable[[int, int, BarrierRows], None]
    ) -> None:
        self._expected, self._answer = expected, answer
        self._barriers: dict[tuple[SegmentId, int], Barrier] = {}

    def arrive(
        self, segment_id: SegmentId, barrier_no: int, kind: str, rank: int, number: int, values: list[float]
    ) -> None:
        """RuntimeError where the others meet about something else."""
        barrier = self._barriers.setdefault((segment_id, barrier_no), Barrier(kind))
        if barrier.kind != kind:
            raise RuntimeError(f"learner {rank} is out of step: it calls {kind} where others called {barrier.kind}")
        if barrier.complete:
            self._answer(rank, number, barrier.values)
            return
        barrier.values[rank], barrier.wait_monitor[rank] = values, number
        self.close()

    def close(self) -> None:
        """Answer all who wait for nobody any more."""
        for (segment_id, _), barrier in self._barriers.items():
            if barrier.complete or not barrier.values or set(self._expected(segment_id)) - barrier.values.keys():
                continue
            barrier.complete = True
            barrier.values = dict(sorted(barrier.values.items()))
            for rank, number in barrier.wait_monitor.items():
                self._answer(rank, number, barrier.values)

    def lose(self, rank: int) -> None:
        for barrier in self._barriers.values():
            if not barrier.complete:
                barrier.values.pop(rank, None)
                barrier.wait_monitor.pop(rank, None)
        self.close()

    def forget(self, oldest: SegmentId) -> None:
        """Nobody is at a place before `oldest` any more."""
        self._barriers = {key: barrier for key, barrier in self._barriers.items() if key[0] >= oldest}


log = logging.getLogger(__name__)

ControlMessage = dict[str, Any]


@dataclass
class MemberState:
    """A learner's. address: of its mail, None before it has come. greeted: it knows the others. joined: the others know
    it, and wait for it. place, met: the segment it is at, and how many meetings it had there. asks: number of its
    request for a lease, while none is free.
    """

    incarnation: int = 0
    address: str | None = None
    greeted: bool = False
    joined: bool = False
    segment_id: SegmentId = START
    barrier_no: int = 0
    pending_lease: int | None = None


class Coordinator:
    """seats: of the living and of those that are expected, by rank. started: all that began the run have come."""

    def __init__(self, size: int, send: Callable[[int, ControlMessage], None]) -> None:
        self._size, self._send = size, send
        self.members = {rank: MemberState() for rank in range(size)}
        self.started = False
        self._tables: dict[SegmentId, LeaseQueue] = {}
        self._records: dict[SegmentId, ControlMessage] = {}  # as all learners are told them
        self._barriers = Barriers(self._expected, self._answer)
        self._newest = START

    # who lives

    def expect(self, rank: int, incarnation: int) -> None:
        """A learner is being started again."""
        self.members[rank] = MemberState(incarnation)

    def register(self, rank: int, incarnation: int, address: str) -> None:
        """A learner has come. It is told who the others are once all that begin the run are there."""
        member = self.members[rank]
        member.incarnation, member.address = incarnation, address
        self._greet()

    def leave(self, rank: int, reason: str | None) -> None:
        """A learner died, or has finished (no reason), which its process' end tells once more."""
        member = self.members.pop(rank, None)
        if member is None:
            return
        if member.joined:
            self._tell_others(rank, {"news": "died", "incarnation": member.incarnation, "reason": reason or "finished"})
        for table in self._tables.values():
            if back := table.release(rank):
                log.info("batches of learner %d are handed out again: %s", rank, ", ".join(map(str, back)))
        self._barriers.lose(rank)
        self._serve_leases()
        self._greet()

    def _greet(self) -> None:
        """Tell those who have come the addresses of those who live."""
        if not self.started and all(member.address for member in self.members.values()):
            self.started = True
            for member in self.members.values():
                member.joined = member.incarnation == 0
        for rank, member in self.members.items():
            if self.started and member.address and not member.greeted:
                peers = {r: [s.incarnation, s.address] for r, s in self.members.items() if s.joined and r != rank}
                self._send(rank, {"news": "peers", "peers": peers})
                member.greeted = True

    def _tell_others(self, rank: int, news: ControlMessage) -> None:
        for other, member in self.members.items():
            if other != rank and member.greeted:
                self._send(other, {**news, "rank": rank})

    def _expected(self, segment_id: SegmentId) -> list[int]:
        """Who is to come to a meeting; those who have gone past its place cannot."""
        return [rank for rank, member in self.members.items() if member.joined and member.segment_id <= segment_id]

    # requests

    def handle(self, rank: int, request: ControlMessage) -> None:
        """What a learner that has registered asks for."""
        op = request.get("op")
        if op == "open":
            self._open(rank, request)
        elif op == "lease":
            self._table(rank)
            self.members[rank].pending_lease = request["id"]
            self._serve_leases()
        elif op == "complete":
            self._complete(rank, request)
        elif op == "totals":
            self._answer(rank, request["id"], astuple(self._table(rank).totals))
        elif op == "record":
            self._record(rank, request["id"])
        elif op == "gather":
            member = self.members[rank]
            member.barrier_no += 1
            self._barriers.arrive(
                member.segment_id, member.barrier_no, request["kind"], rank, request["id"], request["values"]
            )
        elif op == "bye":
            self.leave(rank, None)
        else:
            raise ValueError(f"no such request: {op!r}")

    def _open(self, rank: int, request: ControlMessage) -> None:
        values = request["segment"]
        segment = Segment(**{**values, "frames": tuple(values["frames"])})
        member, segment_id = self.members[rank], (segment.epoch, segment.begin)
        if not member.joined and segment_id < self._newest:
            self._object(rank, request, "outdated", (
                f"learner {rank} asks for epoch {segment.epoch + 1} from batch {segment.begin}, which the others have "
                "left behind; read the last checkpoint again"
            ))  # fmt: skip
            return
        table = self._tables.setdefault(segment_id, LeaseQueue(segment))
        if table.segment != segment:
            raise RuntimeError(f"learner {rank} disagrees about the segment at epoch, batch {segment_id}: {segment}")
        if not member.joined:
            member.joined = True
            log.info("learner %d is back", rank)
            self._tell_others(rank, {"news": "born", "incarnation": member.incarnation, "address": member.address})
        member.segment_id, member.barrier_no = segment_id, 0
        self._newest = max(self._newest, segment_id)
        self._forget()
        self._answer(rank, request["id"], None)
        self._barriers.close()

    def _forget(self) -> None:
        """Drop what no learner can ask for any more."""
        oldest = min(member.segment_id for member in self.members.values() if member.joined)
        self._tables = {segment_id: table for segment_id, table in self._tables.items() if segment_id >= oldest}
        self._records = {segment_id: record for segment_id, record in self._records.items() if segment_id >= oldest}
        self._barriers.forget(oldest)

    def _table(self, rank: int) -> LeaseQueue:
        return self._tables[self.members[rank].segment_id]

    def _serve_leases(self) -> None:
        """Answer those who wait for a batch, where there is one, or will be none."""
        for rank, member in self.members.items():
            if member.pending_lease is None:
                continue
            table = self._table(rank)
            lease = table.lease(rank, member.incarnation)
            if lease is not None or table.finished:
                self._answer(rank, member.pending_lease, None if lease is None else asdict(lease))
                member.pending_lease = None

    def _complete(self, rank: int, request: ControlMessage) -> None:
        completion = Completion(
            request["batch"], rank, self.members[rank].incarnation, request["examples"], request["applied"]
        )  # fmt: skip
        table = self._table(rank)
        table.complete(completion, LossSums(*request["totals"]))
        if table.finished:
            self._serve_leases()

    def _record(self, rank: int, number: int) -> None:
        segment_id = self.members[rank].segment_id
        if segment_id not in self._records:
            record = self._table(rank).record()
            self._records[segment_id] = {"completions": record.completions, "released": record.released}
        self._answer(rank, number, self._records[segment_id])

    # answers

    def _answer(self, rank: int, number: int, value: object) -> None:
        self._send(rank, {"id": number, "value": value})

    def _object(self, rank: int, request: ControlMessage, kind: str, error: str) -> None:
        self._send(rank, {"id": request["id"], "kind": kind, "error": error})


MAX_MESSAGE_BYTES = 64 << 20  # bytes of a message


def read_json(frames: list[bytes]) -> ControlMessage | None:
    """A message; None where the bytes are no JSON object."""
    with suppress(ValueError, RecursionError):
        message = json.loads(b"".join(frames))
        if isinstance(message, dict):
            return message
    return None


class ControlServer:
    """At `address` (host:port), or at a free port for this host only. url: where learners connect to."""

    def __init__(self, address: str | None, key: str | None) -> None:
        self.host, port = _own(address) if address else (LOCALHOST, 0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, key)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.connection_monitor = ConnectionMonitor(self._socket, "the supervisor")
        try:
            self._socket.bind(f"tcp://{self.host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise InputError(
                f"address={address}: cannot be listened on ({error}); is it an address of this host, and the port free?"
            ) from error
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, seconds: float) -> Iterator[tuple[bytes, ControlMessage]]:
        """Messages with the connections they came on; waits `seconds` for the first."""
        wait = int(1000 * seconds)
        while self._socket.poll(wait):
            connection, *frames = self._socket.recv_multipart()
            wait = 0
            message = read_json(frames)
            if message is not None:
                yield connection, message
            else:
                self.connection_monitor.reject("a message that is no JSON object")
        self.connection_monitor.poll()

    def send(self, connection: bytes, message: ControlMessage) -> None:
        self._socket.send_multipart([connection, json.dumps(message).encode()])

    def close(self) -> None:
        self.connection_monitor.close()
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
