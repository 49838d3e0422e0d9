"""A line that listens, and may change what passes; and strangers that send bytes to a port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


def place(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


PACE = 0.03  # seconds from one part of a recorded conversation to the next


def send_raw(address: str, *parts: bytes) -> None:
    """Send bytes, and wait a moment to be thrown out."""
    with suppress(OSError), socket.create_connection(place(address), timeout=0.2) as stranger:
        for part in parts:
            stranger.sendall(part)
            time.sleep(PACE)
        while stranger.recv(1 << 16):
            pass


def cut_once(after: int) -> Callable[[bytes], bytes]:
    """A change that breaks the connection once, when more than so many bytes have come."""
    left = after

    def change(data: bytes) -> bytes:
        nonlocal left
        before, left = left, left - len(data)
        if before >= 0 > left:
            raise ConnectionResetError
        return data

    return change


class TcpProxy:
    """At `address`; passes to `target` what comes. tape: what clients sent on the first connection, part by part."""

    def __init__(self, target: str, change: Callable[[bytes], bytes] = bytes, port: int = 0) -> None:
        self._target, self._change = place(target), change
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
