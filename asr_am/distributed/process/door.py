"""What is refused at a listening socket: strangers' connections, what is replayed, and malformed messages."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)


class Door:
    """Counts them, and logs the first and how many there were in the end: not each, which would let strangers fill the
    disk. Made before the socket is bound; used by the thread that has the socket.

    name: whose socket it is. on_refusal: called for each.

    ZeroMQ tells of a wrong key, a wrong cipher and a message that comes again, and ends the connection; of a greeting
    that is older or none it tells the end alone. It names a connection that was accepted, or has ended, by its file
    descriptor, but does not say whose handshake succeeded. So a connection that is ended while handshakes are open
    counts as refused; one of ours, too, if it breaks while another's is. Who hangs up in the handshake was not refused.
    """

    def __init__(self, zmq_socket: zmq.Socket[bytes], name: str, on_refusal: Callable[[], None] | None = None) -> None:
        self._socket, self._name, self._on_refusal = zmq_socket, name, on_refusal
        self.refused = 0
        self.monitor = zmq_socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
        )  # fmt: skip
        self._open: set[int] = set()  # accepted; of these, `_done` have shaken hands
        self._done = 0
        self._told = False  # why the connection ends that ends next

    def look(self) -> None:
        """Take note of what has happened to connections."""
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, descriptor = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._done += 1
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._told = True
                self.refuse("a connection with a wrong key or none, or with a message that came before")
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._told = True
            else:
                if descriptor in self._open and not self._told:
                    self.refuse("a connection that did not begin as this run's do")
                self._open.discard(descriptor)
                self._told = False
            if self._done >= len(self._open):
                self._open.clear()
                self._done = 0

    def refuse(self, what: str) -> None:
        self.refused += 1
        if self.refused == 1:
            log.warning("%s refused %s; more of the kind are counted only", self._name, what)
        if self._on_refusal is not None:
            self._on_refusal()

    def close(self) -> None:
        """Before the socket is closed."""
        self.look()
        if self.refused > 1:
            log.warning("%s refused %d connections and messages in all", self._name, self.refused)
        self._socket.disable_monitor()
        self.monitor.close(linger=0)
