"""A TCP proxy that records and may change what passes, and raw bytes sent to a port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


def split(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


PACE = 0.03  # seconds between two parts of a recorded conversation


def send_raw(address: str, *parts: bytes) -> None:
    """Sends bytes, and waits until the other end closes the connection, or a moment."""
    with suppress(OSError), socket.create_connection(split(address), timeout=0.2) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(PACE)
        while client.recv(1 << 16):
            pass


def cut_once(after: int) -> Callable[[bytes], bytes]:
    """Returns a change that breaks the connection once, after `after` bytes."""
    left = after

    def change(data: bytes) -> bytes:
        nonlocal left
        before, left = left, left - len(data)
        if before >= 0 > left:
            raise ConnectionResetError
        return data

    return change


class TcpProxy:
    """Proxy that passes connections to `target`, and applies `change` to what clients send.

    Attributes:
        address: address that it listens on, tcp://host:port.
        tape: what the client sent on the first connection, in parts.
        connections: number of connections so far.
    """

    def __init__(self, target: str, change: Callable[[bytes], bytes] = bytes, port: int = 0) -> None:
        self._target, self._change = split(target), change
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.tape: list[bytes] = []
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(self._target)
            for source, target in ((near, far), (far, near)):
                arguments = (source, target, source is near, self.connections == 1)
                threading.Thread(target=self._pass, args=arguments, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, out: bool, first: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if out and first:
                    self.tape.append(data)
                target.sendall(self._change(data) if out else data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
