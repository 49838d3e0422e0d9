"""Transports of several learners in one process, and clients that are not of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import zmq

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.membership import Membership
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.fault_injection import MessageFaults
from asr_am.distributed.runtime.messaging import Transport
from asr_am.distributed.runtime.security import open_socket
from asr_am.distributed.runtime.wire import Kind, WireHeader, encode
from asr_am.distributed.team import CommStats, Message

RUN = bytes(range(16))
TIMEOUT = 30.0  # seconds after which a test fails


class TransportHarness:
    """The transport of one learner, with its threads and statistics."""

    def __init__(
        self, rank: int, size: int, incarnation: int = 0, key: str | None = None, faults: Faults | None = None,
        neighbours: Sequence[int] = (), wire: torch.dtype = torch.float32,
    ):  # fmt: skip
        self.rank, self.incarnation, self.comm_stats = rank, incarnation, CommStats()
        self.wait_monitor, self.membership = WaitMonitor(self.comm_stats), Membership(rank, size)
        self.event_loop = EventLoop(self.wait_monitor)
        self.lost: list[int] = []
        self.transport = Transport(
            self.event_loop, WireHeader(Kind.HELLO, RUN, rank, incarnation), "tcp://127.0.0.1", self.membership,
            self.wait_monitor, self.comm_stats, MessageFaults(faults or Faults(), rank, incarnation), key,
            neighbours=neighbours, wire=wire,
        )  # fmt: skip

    def recv(self, tag: str, source: int | None = None, timeout: float = TIMEOUT) -> Message:
        message = self.transport.recv(tag, source, timeout)
        assert message is not None, f"no message {tag!r} has arrived at {self.rank}"
        return message

    def until(self, what: str) -> None:
        """Waits until a count of `CommStats` has a value, such as `rejected == 3`."""
        name, _, value = what.split()
        for _ in range(int(TIMEOUT / 0.01)):
            if getattr(self.comm_stats, name) == int(value):
                return
            time.sleep(0.01)
        raise AssertionError(f"{what} never came true: {getattr(self.comm_stats, name)}")


@contextmanager
def transports(
    size: int,
    key: str | None = None,
    faults: Faults | None = None,
    one_host: bool = False,
    wire: torch.dtype = torch.float32,
) -> Iterator[list[TransportHarness]]:
    """Starts transports that know each other's addresses, and share memory if they are of one host."""
    neighbours = range(size) if one_host else ()
    team = [
        TransportHarness(rank, size, key=key, faults=faults, neighbours=neighbours, wire=wire) for rank in range(size)
    ]
    try:
        for peer in team:
            peer.membership.fill({other.rank: (0, other.transport.address) for other in team if other is not peer})
            peer.event_loop.start()
        yield team
    finally:
        for peer in team:
            peer.event_loop.stop()


class UnauthenticatedClient:
    """Raw ZeroMQ connection to a transport's port."""

    def __init__(self, peer: TransportHarness, key: str | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, key)
        self._socket.sndtimeo = 1000  # milliseconds
        self._socket.connect(peer.transport.address)

    def send(self, *frames: bytes | WireHeader) -> None:
        with suppress(zmq.Again):  # the other side has refused the connection already
            self._socket.send_multipart([encode(f) if isinstance(f, WireHeader) else f for f in frames])

    def close(self) -> None:
        self._context.destroy(linger=0)
