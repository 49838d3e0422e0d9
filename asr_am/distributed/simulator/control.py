"""Connections of the virtual supervisor: to the learners, and to the agents on other hosts.

They keep messages in order, and lose none while both ends live. With a latency, messages travel as JSON and wait while
their hosts are cut off from each other. Without one, the supervisor answers at once, so that the control plane takes no
virtual time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from greenlet import GreenletExit

from asr_am.distributed.coordinated_backend import answer_value
from asr_am.distributed.coordinator import ControlMessage
from asr_am.distributed.simulator.scheduler import Condition, Scheduler
from asr_am.errors import ConnectionLost, InputError

SIM_POLL_INTERVAL = 0.5  # least seconds between two checks of processes: each is an event

Delay = Callable[[float, int], float]
"""Returns the arrival time of a control message between host 0 and another host, given the time and that host."""


class SimConnection:
    """One connection to the supervisor.

    Args:
        host: the host at its other end.
        receive: called with each message of the supervisor.
        on_loss: called when the supervisor has gone.
    """

    def __init__(
        self, scheduler: Scheduler, name: bytes, host: int, receive: Callable[[ControlMessage], None],
        on_loss: Callable[[], None],
    ) -> None:  # fmt: skip
        self.scheduler, self.name, self.host, self.receive, self.on_loss = scheduler, name, host, receive, on_loss
        self.closed = False
        self._arrivals = [0.0, 0.0]  # of the last message in each direction

    def travel(self, direction: int, delay: Delay, deliver: Callable[[], None]) -> None:
        """Calls `deliver` when a message has arrived, after those before it in the same direction."""
        arrival = max(self._arrivals[direction], delay(self.scheduler.now, self.host))
        self._arrivals[direction] = arrival
        self.scheduler.call_at(arrival, deliver)


class SimServer:
    """The supervisor's end (`supervisor.Server`).

    Args:
        delay: see `Delay`. None: `handle` serves requests at once.

    Attributes:
        handle: serves a message (`Supervisor.handle`).
    """

    def __init__(self, scheduler: Scheduler, delay: Delay | None) -> None:
        self._delay = delay
        self.handle: Callable[[bytes, ControlMessage], None] = lambda connection, message: None
        self.rejected = 0
        self._connections: dict[bytes, SimConnection] = {}
        self._queue: deque[tuple[bytes, ControlMessage]] = deque()
        self._changed = Condition(scheduler)
        self._open = True

    # called by the supervisor

    def receive(self, seconds: float) -> Iterator[tuple[bytes, ControlMessage]]:
        if not self._queue:
            self._changed.suspend("a message", None if seconds == float("inf") else seconds)
        for _ in range(len(self._queue)):
            yield self._queue.popleft()

    def send(self, connection: bytes, message: ControlMessage) -> None:
        to = self._connections.get(connection)
        if to is None or to.closed:
            return
        if self._delay is None:
            to.receive(message)
        else:
            data = json.dumps(message)
            to.travel(0, self._delay, lambda: None if to.closed else to.receive(json.loads(data)))

    def reject(self, what: str) -> None:
        self.rejected += 1

    def close(self) -> None:
        """Ends all connections. The other ends notice it, unless they are cut off."""
        self._open = False
        for to in self._connections.values():
            if self._delay is not None and not to.closed:
                to.travel(0, self._delay, to.on_loss)

    def crash(self) -> None:
        """Ends all connections, and sends nothing more: the supervisor's process was killed."""
        self.close()
        self._connections.clear()

    # called by the other ends

    def wake(self) -> None:
        """Ends the supervisor's wait for messages: one of its processes has ended."""
        self._changed.wake()

    def connect(self, connection: SimConnection) -> None:
        self._connections[connection.name] = connection
        if not self._open and self._delay is not None:
            connection.travel(0, self._delay, connection.on_loss)

    def submit(self, connection: SimConnection, message: ControlMessage) -> None:
        """Sends a message to the supervisor."""
        if self._delay is None and message["op"] != "restart":  # which ends the task that asks for it
            self.handle(connection.name, message)
        elif self._delay is None:
            self._arrive(connection.name, message)
        else:
            data = json.dumps(message)
            connection.travel(1, self._delay, lambda: self._arrive(connection.name, json.loads(data)))

    def _arrive(self, connection: bytes, message: ControlMessage) -> None:
        self._queue.append((connection, message))
        self._changed.wake()


class SimControlClient:
    """A learner's end (`coordinated_backend.ControlClient`).

    Args:
        on_loss: called when the supervisor has gone, or rejects a notification.
    """

    def __init__(
        self, scheduler: Scheduler, server: SimServer, name: bytes, host: int,
        on_event: Callable[[ControlMessage], None], on_loss: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._server, self._on_event, self._on_loss = server, on_event, on_loss
        self._request_ids = count(1)
        self._answers: dict[int, ControlMessage] = {}
        self._answered = Condition(scheduler)
        self.connection = SimConnection(
            scheduler, name, host, self._receive,
            lambda: on_loss(ConnectionLost("lost the connection to the supervisor: see its log")),
        )  # fmt: skip
        server.connect(self.connection)

    def request(self, op: str, timeout: float | None = None, **fields: object) -> Any:
        request_id = next(self._request_ids)
        self._submit({"op": op, "id": request_id, **fields})
        if not self._answered.wait_for(lambda: request_id in self._answers, f"the answer to {op}", timeout):
            raise InputError(f"the supervisor has not answered within {timeout:g} s: check that it is running")
        return answer_value(self._answers.pop(request_id))

    def notify(self, op: str, **fields: object) -> None:
        self._submit({"op": op, **fields})

    def _submit(self, message: ControlMessage) -> None:
        if self.connection.closed:
            raise GreenletExit  # the `finally` clause of a learner that is being killed
        self._server.submit(self.connection, message)

    def _receive(self, message: ControlMessage) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            self._answered.wake()
        elif "error" in message:
            self._on_loss(RuntimeError(message["error"]))
        else:
            self._on_event(message)


class SimAgentConnection:
    """An agent's end (`node_agent.AgentConnection`)."""

    def __init__(self, scheduler: Scheduler, server: SimServer, name: bytes, host: int) -> None:
        self._server = server
        self._queue: deque[ControlMessage] = deque()
        self._arrived = Condition(scheduler)
        self._connection = SimConnection(scheduler, name, host, self._receive, lambda: None)
        server.connect(self._connection)

    def receive(self, seconds: float) -> Iterator[ControlMessage]:
        if not self._queue:
            self._arrived.suspend("a message", max(seconds, SIM_POLL_INTERVAL))
        for _ in range(len(self._queue)):
            yield self._queue.popleft()

    def send(self, message: ControlMessage) -> None:
        self._server.submit(self._connection, message)

    def close(self) -> None:
        self._connection.closed = True

    def _receive(self, message: ControlMessage) -> None:
        self._queue.append(message)
        self._arrived.wake()
