"""The supervisor's socket for the control plane's messages, as JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import zmq

from asr_am.distributed.coordinator import ControlMessage
from asr_am.distributed.launch_spec import SUPERVISOR_SOCKET
from asr_am.distributed.runtime.fork_server import ForkServer
from asr_am.distributed.runtime.security import MAX_FRAME_BYTES, ConnectionMonitor, open_socket, split_address
from asr_am.distributed.runtime.worker_process import LOCALHOST
from asr_am.errors import InputError

MAX_QUEUED_FRAMES = 64  # of one client, before TCP blocks it
MAX_MESSAGES_PER_TURN = 1000  # read before the supervisor does its other work


def read_json(frames: list[bytes]) -> ControlMessage | None:
    """Returns the message in these frames, or None if it is not a JSON object."""
    with suppress(ValueError, RecursionError):
        message = json.loads(b"".join(frames))
        if isinstance(message, dict):
            return message
    return None


def wait_for_message(zmq_socket: zmq.Socket[bytes], seconds: float, fork_server: ForkServer | None) -> bool:
    """Returns whether a message has come within `seconds`. Does not wait on when the fork server reports something."""
    if seconds <= 0:
        return bool(zmq_socket.poll(0))
    poller = zmq.Poller()
    poller.register(zmq_socket, zmq.POLLIN)
    if fork_server is not None and (descriptor := fork_server.descriptor()) is not None:
        poller.register(descriptor, zmq.POLLIN)
    return zmq_socket in dict(poller.poll(int(1000 * seconds)))


class ControlServer:
    """The supervisor's socket for JSON messages from learners and from the agents on other hosts.

    Attributes:
        host: the address that it listens on.
        url: tcp://host:port or ipc://path, where learners connect.
        connection_monitor: counts rejected connections and messages.
    """

    def __init__(
        self, address: str | None, key: str | None, private_dir: Path | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:  # fmt: skip
        """Listens in a private directory, or on `address`, or without both on a free port that only this host reaches.

        Args:
            address: host:port, or None.
            fork_server: its reports end a wait for messages.

        Raises:
            InputError: the address cannot be bound.
        """
        self.host, port = _bind_address(address) if address else (LOCALHOST, 0)
        self._fork_server = fork_server
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, key, heartbeats=False)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.connection_monitor = ConnectionMonitor(self._socket, "the supervisor")
        try:
            self._socket.bind(
                f"ipc://{private_dir}/{SUPERVISOR_SOCKET}" if private_dir else f"tcp://{self.host}:{port or '*'}"
            )
        except zmq.ZMQError as error:
            self.close()
            raise InputError(
                f"cannot bind address={address} ({error}): check that it is this host and the port is free"
            ) from error
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, seconds: float) -> Iterator[tuple[bytes, ControlMessage]]:
        """Yields messages with the connections they came on, up to a limit. Waits `seconds` for the first."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not wait_for_message(self._socket, seconds, self._fork_server):
                break
            connection, *frames = self._socket.recv_multipart()
            seconds = 0.0
            message = read_json(frames)
            if message is not None:
                yield connection, message
            else:
                self.connection_monitor.reject("a message that is not a JSON object")
        self.connection_monitor.poll()

    def send(self, connection: bytes, message: ControlMessage) -> None:
        self._socket.send_multipart([connection, json.dumps(message).encode()])

    @property
    def rejected(self) -> int:
        """Number of messages and connections that were refused."""
        return self.connection_monitor.rejected

    def reject(self, what: str) -> None:
        self.connection_monitor.reject(what)

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
