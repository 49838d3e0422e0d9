"""The supervisor's socket: JSON messages from learners and from the agents on other hosts."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import zmq

from asr_am.distributed.process.door import Door
from asr_am.distributed.process.plan import LOCALHOST
from asr_am.distributed.process.sockets import open_socket, split_address
from asr_am.errors import InputError

LARGEST = 64 << 20  # bytes of a message

Message = dict[str, Any]


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
