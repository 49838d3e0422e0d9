"""One thread that waits for sockets, alarms and commands of other threads, and calls what belongs to each.

A ZeroMQ socket may be touched by one thread only; here all of a process' sockets are touched by this one.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import zmq

from asr_am.distributed.process.waiting import Waiting

Action = Callable[[], None]


class Reactor:
    """What an action raises is raised in the training task, and ends the thread."""

    def __init__(self, waiting: Waiting) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waiting = waiting
        self._poller = zmq.Poller()
        self._ready: dict[object, Action] = {}
        self._commands: deque[Action] = deque()
        self._alarms: list[tuple[float, int, Action]] = []
        self._ids = count()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._ready[self._wake_read] = self._run_commands
        self._last: list[Action] = []
        self._stopping = self._ended = False
        self._lock = threading.Lock()  # of the pipe
        self._thread = threading.Thread(target=self._run, name="mail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, command: Action) -> None:
        """Let the thread do it soon; from any thread."""
        self._commands.append(command)
        with self._lock, suppress(BlockingIOError):  # it has been woken often enough
            if not self._ended:
                os.write(self._wake_write, b"x")

    def stop(self) -> None:
        """Do the last actions, close everything, and wait for the thread's end."""
        if self._thread.ident is None:
            self._end()
        else:
            self.call(self._stop)
            self._thread.join()

    def at_stop(self, action: Action) -> None:
        """Have it done when the thread ends: it closes sockets."""
        self._last.append(action)

    # only in the thread, or before its start

    def attach(self, socket: zmq.Socket[bytes], ready: Action) -> None:
        """Call `ready` whenever something can be read from the socket."""
        self._poller.register(socket, zmq.POLLIN)
        self._ready[socket] = ready

    def want_to_send(self, socket: zmq.Socket[bytes], wanted: bool) -> None:
        """Whether to call `ready` also when the socket takes messages."""
        self._poller.modify(socket, zmq.POLLIN | zmq.POLLOUT if wanted else zmq.POLLIN)

    def detach(self, socket: zmq.Socket[bytes]) -> None:
        self._poller.unregister(socket)
        del self._ready[socket]

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._alarms, (time.monotonic() + seconds, next(self._ids), action))

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                for socket, _ in self._poller.poll(self._milliseconds()):
                    if socket in self._ready:  # one before it may have closed it
                        self._ready[socket]()
                while self._alarms and self._alarms[0][0] <= time.monotonic():
                    heapq.heappop(self._alarms)[2]()
        except Exception as error:
            self._waiting.fail(error)
        finally:
            self._end()

    def _end(self) -> None:
        for action in self._last:
            action()
        self.context.term()
        with self._lock:
            self._ended = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _milliseconds(self) -> int | None:
        """Until the next alarm, rounded up."""
        if not self._alarms:
            return None
        return max(int(1000 * (self._alarms[0][0] - time.monotonic())) + 1, 0)

    def _run_commands(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._commands:
            self._commands.popleft()()
