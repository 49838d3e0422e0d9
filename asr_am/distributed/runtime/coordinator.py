"""The supervisor's side of the control plane: `ControlPlane` behind JSON messages, and the socket they come through."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import zmq

from asr_am.distributed.control_plane import Barrier, ControlPlane, MemberState
from asr_am.distributed.leases import Completion, LossSums, Segment, StaleSegment
from asr_am.distributed.runtime.security import MAX_FRAME_BYTES, ConnectionMonitor, open_socket, split_address
from asr_am.distributed.runtime.worker_process import LOCALHOST
from asr_am.errors import InputError

log = logging.getLogger(__name__)

ControlMessage = dict[str, Any]


@dataclass
class Registration:
    """Connection state of one learner.

    Attributes:
        address: where its transport listens, None before it has registered.
        peers_sent: it has been sent the addresses of the others.
        pending_lease: id of its request for a lease that has not been answered.
        pending_barrier: the barrier that it waits at, and the id of that request.
    """

    address: str | None = None
    peers_sent: bool = False
    pending_lease: int | None = None
    pending_barrier: tuple[Barrier[list[float]], int] | None = None


class Coordinator:
    """Front of `ControlPlane` for processes: answers requests when they can be, and announces deaths and joins.

    Free of sockets: messages leave through `send(rank, message)`.

    Attributes:
        started: all learners that begin the run have registered.
    """

    def __init__(
        self, size: int, send: Callable[[int, ControlMessage], None], incarnations: Mapping[int, int] | None = None
    ) -> None:
        """Expects the learners that begin.

        Args:
            size: number of ranks of the team.
            send: sends a message to a rank.
            incarnations: number of restarts of each learner that begins, by rank. None: all ranks begin anew.
        """
        self._send = send
        self._plane: ControlPlane[list[float]] = ControlPlane()
        self._registrations: dict[int, Registration] = {}
        self._gone: list[int] = []  # ranks that died and are not restarted
        self._ranks: list[int] = []  # ranks that began
        for rank, incarnation in (incarnations or dict.fromkeys(range(size), 0)).items():
            self.expect(rank, incarnation)
        self.started = False

    @property
    def members(self) -> dict[int, MemberState]:
        """Learners that are alive or being started, by rank."""
        return self._plane.members

    @property
    def weights_lost(self) -> bool:
        """See `ControlPlane.weights_lost`."""
        return self.started and self._plane.weights_lost

    # membership

    def expect(self, rank: int, incarnation: int) -> None:
        """Notes that a learner is being started."""
        self._plane.add(rank, incarnation)
        self._registrations[rank] = Registration()

    def register(self, rank: int, incarnation: int, address: str) -> None:
        """Registers a learner. It is sent the addresses of the others once all that begin the run have registered."""
        self.members[rank].incarnation, self._registrations[rank].address = incarnation, address
        self._send_peers()

    def leave(self, rank: int, reason: str | None, gone: bool = False) -> None:
        """Removes a learner that died, or that has finished (no reason). The second call for a learner does nothing.

        Args:
            rank: the learner.
            reason: how it died.
            gone: it will not be restarted.
        """
        member = self.members.get(rank)
        if gone:
            self._gone.append(rank)
        if gone or (member is not None and member.joined):
            incarnation = 0 if member is None else member.incarnation
            news = {"news": "died", "incarnation": incarnation, "reason": reason or "finished", "gone": gone}
            self._tell_others(rank, news)
        if member is None:
            return
        released = self._plane.lose(rank)
        del self._registrations[rank]
        if released:
            log.info("batches of learner %d are leased again: %s", rank, ", ".join(map(str, released)))
        self._answer_waiting()
        self._send_peers()

    def _send_peers(self) -> None:
        """Sends the addresses of live learners to those that have registered and do not know them yet."""
        begin = False
        if not self.started and all(registration.address for registration in self._registrations.values()):
            self.started, self._ranks = True, sorted(self.members)
            begin = True
            for member in self.members.values():
                member.joined = True
        for rank, registration in self._registrations.items():
            if self.started and registration.address and not registration.peers_sent:
                peers = {
                    other: [member.incarnation, self._registrations[other].address]
                    for other, member in self.members.items()
                    if member.joined and other != rank
                }
                news = {
                    "news": "peers", "peers": peers, "ranks": self._ranks, "gone": self._gone, "rejoins": not begin,
                }  # fmt: skip
                self._send(rank, news)
                registration.peers_sent = True

    def _tell_others(self, rank: int, news: ControlMessage) -> None:
        for other, registration in self._registrations.items():
            if other != rank and registration.peers_sent:
                self._send(other, {**news, "rank": rank})

    # requests

    def handle(self, rank: int, request: ControlMessage) -> None:
        """Serves a request of a registered learner. What it raises is that learner's error."""
        op = request.get("op")
        if op == "open":
            self._open_segment(rank, request)
        elif op == "lease":
            self._registrations[rank].pending_lease = request["id"]
            self._answer_leases()
        elif op == "complete":
            self._complete(rank, request)
        elif op == "totals":
            self._answer(rank, request["id"], astuple(self._plane.totals(rank)))
        elif op == "record":
            record = self._plane.record(rank)
            values = {"completions": record.completions, "released": record.released, "lost": record.lost}
            self._answer(rank, request["id"], values)
        elif op == "gather":
            barrier = self._plane.arrive(rank, request["kind"], request["values"])
            self._registrations[rank].pending_barrier = barrier, request["id"]
            self._answer_barriers()
        elif op == "bye":
            self.leave(rank, None)
        else:
            raise ValueError(f"unknown request: {op!r}")

    def _open_segment(self, rank: int, request: ControlMessage) -> None:
        values = request["segment"]
        try:
            joins = self._plane.open_segment(rank, segment_from_json(values))
        except StaleSegment as error:
            self._send(rank, {"id": request["id"], "kind": "outdated", "error": str(error)})
            return
        if joins:
            log.info("learner %d is back", rank)
            news = {
                "news": "born",
                "incarnation": self.members[rank].incarnation,
                "address": self._registrations[rank].address,
            }
            self._tell_others(rank, news)
        self._answer(rank, request["id"], None)
        self._answer_barriers()

    def _complete(self, rank: int, request: ControlMessage) -> None:
        completion = Completion(
            request["batch"], rank, self.members[rank].incarnation, request["examples"], request["applied"],
            request["digest"],
        )  # fmt: skip
        if self._plane.complete(completion, LossSums(*request["totals"])):
            self._answer_leases()

    # answers

    def _answer_waiting(self) -> None:
        self._answer_barriers()
        self._answer_leases()

    def _answer_barriers(self) -> None:
        for rank, registration in self._registrations.items():
            if registration.pending_barrier is None:
                continue
            barrier, request_id = registration.pending_barrier
            values = self._plane.complete_barrier(barrier)
            if values is not None:
                barrier.result = values
            if barrier.complete:
                registration.pending_barrier = None
                self._answer(rank, request_id, barrier.result)

    def _answer_leases(self) -> None:
        for rank, registration in self._registrations.items():
            if registration.pending_lease is None:
                continue
            answered, lease = self._plane.lease(rank)
            if answered:
                self._answer(rank, registration.pending_lease, None if lease is None else asdict(lease))
                registration.pending_lease = None

    def _answer(self, rank: int, request_id: int, value: object) -> None:
        self._send(rank, {"id": request_id, "value": value})


def segment_from_json(values: dict[str, Any]) -> Segment:
    return Segment(**{**values, "frames": tuple(values["frames"]), "digests": tuple(values["digests"])})


MAX_QUEUED_FRAMES = 64  # of one client, before TCP blocks it
MAX_MESSAGES_PER_TURN = 1000  # read before the supervisor does its other work


def read_json(frames: list[bytes]) -> ControlMessage | None:
    """Returns the message in these frames, or None if it is not a JSON object."""
    with suppress(ValueError, RecursionError):
        message = json.loads(b"".join(frames))
        if isinstance(message, dict):
            return message
    return None


class ControlServer:
    """The supervisor's socket for JSON messages from learners and from the agents on other hosts.

    Attributes:
        host: the address that it listens on.
        url: tcp://host:port or ipc://path, where learners connect.
        connection_monitor: counts rejected connections and messages.
    """

    def __init__(self, address: str | None, key: str | None, private_dir: Path | None = None) -> None:
        """Listens in a private directory, or on `address`, or without both on a free port that only this host reaches.

        Args:
            address: host:port, or None.
            key: secret for encryption, or None for plain connections.
            private_dir: directory for the socket, or None.

        Raises:
            InputError: the address cannot be bound.
        """
        self.host, port = _bind_address(address) if address else (LOCALHOST, 0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, key, heartbeats=False)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.connection_monitor = ConnectionMonitor(self._socket, "the supervisor")
        try:
            self._socket.bind(f"ipc://{private_dir}/supervisor" if private_dir else f"tcp://{self.host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise InputError(
                f"cannot bind address={address} ({error}): check that it is this host and the port is free"
            ) from error
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, seconds: float) -> Iterator[tuple[bytes, ControlMessage]]:
        """Yields messages with the connections they came on, up to a limit. Waits `seconds` for the first."""
        wait = int(1000 * seconds)
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not self._socket.poll(wait):
                break
            connection, *frames = self._socket.recv_multipart()
            wait = 0
            message = read_json(frames)
            if message is not None:
                yield connection, message
            else:
                self.connection_monitor.reject("a message that is not a JSON object")
        self.connection_monitor.poll()

    def send(self, connection: bytes, message: ControlMessage) -> None:
        self._socket.send_multipart([connection, json.dumps(message).encode()])

    def close(self) -> None:
        self.connection_monitor.close()
        self._socket.close(linger=500)
        self._context.term()


def _bind_address(address: str) -> tuple[str, int]:
    """Returns the IPv4 address and port to listen on.

    Raises:
        InputError: the host is unknown, or its name is a loopback address, which other hosts cannot reach.
    """
    host, port = split_address(address, "address")
    try:
        found = socket.gethostbyname(host)
    except OSError as error:
        raise InputError(f"address={address}: host {host!r} is unknown ({error})") from error
    if found.startswith("127.") and host not in (found, "localhost"):
        raise InputError(
            f"address={address}: on this host {host!r} is {found}, which other hosts cannot reach; give the IP address"
        )
    return found, port
