"""A learner's connection to the supervisor: requests and events, as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq

from asr_am.distributed.coordinated_backend import answer_value
from asr_am.distributed.launch_spec import HEARTBEAT_TIMEOUT
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.security import FRAME_BYTES, next_event, open_socket, watch
from asr_am.errors import ConnectionLost, InputError

log = logging.getLogger(__name__)

OnEvent = Callable[[dict[str, Any]], None]


class Requests:
    """Requests with answers, notifications and events, whatever carries them. Subclasses define `_send`.

    Args:
        on_event: called in a callback of the event loop with each event, in the order in which they were sent.
    """

    def __init__(self, wait_monitor: WaitMonitor, on_event: OnEvent, address: str) -> None:
        self._wait_monitor, self._on_event, self._address = wait_monitor, on_event, address
        self._request_ids = count(1)
        self._answers: dict[int, dict[str, Any]] = {}

    def _send(self, message: dict[str, object]) -> None:
        raise NotImplementedError

    def request(self, op: str, timeout: float | None = None, **fields: object) -> Any:
        """Sends a request, and waits for the answer.

        Args:
            timeout: seconds, None to wait forever.
            fields: arguments of the request, as JSON values.

        Raises:
            StaleSegment: the supervisor says that this learner is behind the others.
            InputError: the supervisor does not answer within `timeout` seconds, or is gone.
            RuntimeError: the supervisor rejects the request.
        """
        request_id = next(self._request_ids)
        self._send({"op": op, "id": request_id, **fields})
        if not self._wait_monitor.wait_for(lambda: request_id in self._answers, timeout):
            raise InputError(
                f"the supervisor at {self._address} has not answered within {timeout:g} s: check that it is running"
            )
        return answer_value(self._answers.pop(request_id))

    def notify(self, op: str, **fields: object) -> None:
        """Sends a message without an answer. If the supervisor rejects it, the training task's next call raises."""
        self._send({"op": op, **fields})

    def handle(self, message: dict[str, Any]) -> None:
        """Handles an answer or an event. Called in a callback of the event loop."""
        if "id" in message:
            with self._wait_monitor.change():
                self._answers[message["id"]] = message
        elif "error" in message:
            self._wait_monitor.fail(RuntimeError(message["error"]))
        else:
            self._on_event(message)


class ControlClient(Requests):
    """Connection to the supervisor.

    Args:
        address: address of the supervisor, tcp://host:port or ipc://path.
        wait_monitor, on_event: as of `Requests`.
    """

    def __init__(
        self, event_loop: EventLoop, address: str, wait_monitor: WaitMonitor, key: str | None, on_event: OnEvent
    ) -> None:
        super().__init__(wait_monitor, on_event, address)
        self._event_loop = event_loop
        self._socket = open_socket(event_loop.context, zmq.DEALER, key, heartbeats=False)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a supervisor that is stopped reads everything later
        self._monitor = watch(self._socket)
        self._socket.connect(address)
        event_loop.attach(self._socket, self._receive)
        event_loop.attach(self._monitor, self._watch)
        event_loop.at_stop(self._close)

    def start_heartbeats(self) -> None:
        """Tells the supervisor again and again that this process runs."""
        self._send({"op": "live"})
        self._event_loop.call(lambda: self._event_loop.after(HEARTBEAT_TIMEOUT / 5, self.start_heartbeats))

    def _send(self, message: dict[str, object]) -> None:
        data = json.dumps(message).encode()
        frames = [data[begin : begin + FRAME_BYTES] for begin in range(0, len(data), FRAME_BYTES)]

        def send() -> None:
            self._socket.send_multipart(frames, zmq.NOBLOCK)

        self._event_loop.call(send)

    def _receive(self) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.handle(message)

    def _watch(self) -> None:
        while (event := next_event(self._monitor)) is not None:
            if event == zmq.EVENT_DISCONNECTED:
                self._wait_monitor.fail(
                    ConnectionLost(f"lost the connection to the supervisor at {self._address}: see its log")
                )

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=500)
