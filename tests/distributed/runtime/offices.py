"""Post offices of several learners in one process, and strangers between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.runtime.event_loop import Reactor, Waiting
from asr_am.distributed.runtime.fault_injection import Fates
from asr_am.distributed.runtime.membership import Roster
from asr_am.distributed.runtime.messaging import PostOffice
from asr_am.distributed.runtime.security import open_socket
from asr_am.distributed.runtime.wire import Header, Kind, encode
from asr_am.distributed.team import Letter, Usage

RUN = bytes(range(16))
PATIENCE = 30.0  # seconds after which a test has failed


class Office:
    """A learner's mail without the learner."""

    def __init__(
        self, rank: int, size: int, incarnation: int = 0, key: str | None = None, faults: Faults | None = None
    ):
        self.rank, self.incarnation, self.usage = rank, incarnation, Usage()
        self.waiting, self.roster = Waiting(self.usage), Roster(rank, size)
        self.reactor = Reactor(self.waiting)
        self.lost: list[int] = []
        self.mail = PostOffice(
            self.reactor, Header(Kind.HELLO, RUN, rank, incarnation), "127.0.0.1", self.roster, self.waiting,
            self.usage, Fates(faults or Faults(), rank, incarnation), key,
        )  # fmt: skip

    def collect(self, tag: str, source: int | None = None, timeout: float = PATIENCE) -> Letter:
        letter = self.mail.collect(tag, source, timeout)
        assert letter is not None, f"no letter {tag!r} has come to {self.rank}"
        return letter

    def until(self, what: str) -> None:
        """Wait for a usage count, such as `refused == 3`."""
        name, _, value = what.split()
        for _ in range(int(PATIENCE / 0.01)):
            if getattr(self.usage, name) == int(value):
                return
            time.sleep(0.01)
        raise AssertionError(f"{what} never came true: {getattr(self.usage, name)}")


@contextmanager
def offices(size: int, key: str | None = None, faults: Faults | None = None) -> Iterator[list[Office]]:
    """They know each other's addresses."""
    team = [Office(rank, size, key=key, faults=faults) for rank in range(size)]
    try:
        for office in team:
            office.roster.fill({other.rank: (0, other.mail.address) for other in team if other is not office})
            office.reactor.start()
        yield team
    finally:
        for office in team:
            office.reactor.stop()


class Stranger:
    """Raw ZeroMQ to an office's port."""

    def __init__(self, office: Office, key: str | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, key)
        self._socket.connect(office.mail.address)

    def send(self, *frames: bytes | Header) -> None:
        self._socket.send_multipart([encode(f) if isinstance(f, Header) else f for f in frames])

    def hears(self, milliseconds: int) -> bool:
        return bool(self._socket.poll(milliseconds))

    def close(self) -> None:
        self._context.destroy(linger=0)
