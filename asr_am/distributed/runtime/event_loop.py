"""What the threads of a learner wait for each other with: one lock for everything that can happen.

A learner has a training task, communication tasks, and the mail thread. Each wait ends when it is ready, but also when
the team is closed, or when something went wrong that the training task must hear of; so no call can be left hanging.
Who makes a change looks who is ready after it, and wakes nobody else.


One thread that waits for sockets, alarms and commands of other threads, and calls what belongs to each.

A ZeroMQ socket may be touched by one thread only; here all of a process' sockets are touched by this one.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

import zmq

from asr_am.distributed.team import CommStats


class CommClosed(Exception):
    """Ends a communication task when its team is closed."""


@dataclass(eq=False)
class PendingWait:
    """A thread that waits. done: `ready` said so, and is not to be asked again."""

    ready: Callable[[], bool]
    condition: threading.Condition
    done: bool = False


class WaitMonitor:
    """Made in the training task, whose waits count in `usage`."""

    def __init__(self, comm_stats: CommStats) -> None:
        self._comm_stats = comm_stats
        self._lock = threading.RLock()
        self._waiters: list[PendingWait] = []
        self._training = threading.get_ident()
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around every change of what a thread may wait for."""
        with self._lock:
            yield
            for waiter in self._waiters:
                if not waiter.done and waiter.ready():
                    waiter.done = True
                    waiter.condition.notify()

    def fail(self, failure: BaseException) -> None:
        """Let the training task's next or present call raise `failure`; the first one counts."""
        with self._lock:
            self._failure = self._failure or failure
            self._wake_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wake_all()

    def check(self) -> None:
        """Raise what the calling thread must hear of."""
        if threading.get_ident() == self._training and self._failure is not None:
            raise self._failure
        if self._closed:
            raise CommClosed("the team is closed")

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until `ready()`, which is called by whoever makes a change; False after `timeout` seconds."""
        begin = time.monotonic()
        try:
            return self._wait(ready, timeout)
        finally:
            self.count(time.monotonic() - begin)

    def pause(self, seconds: float) -> None:
        """Wait for nobody."""
        self._wait(lambda: False, seconds)

    def count(self, seconds: float) -> None:
        """Add to the training task's waiting time, if it is the caller."""
        if threading.get_ident() == self._training:
            self._comm_stats.idle_seconds += seconds

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self.check()
            if ready():
                return True
            waiter = PendingWait(ready, threading.Condition(self._lock))
            self._waiters.append(waiter)
            try:
                while not waiter.done:
                    left = None if end is None else end - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    waiter.condition.wait(left)
                    self.check()
                return True
            finally:
                self._waiters.remove(waiter)

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            waiter.condition.notify()


class TeamLock:
    """A lock of this learner's tasks."""

    def __init__(self, wait_monitor: WaitMonitor) -> None:
        self._wait_monitor, self._lock = wait_monitor, threading.Lock()

    def __enter__(self) -> None:
        self._wait_monitor.check()
        if not self._lock.acquire(blocking=False):
            begin = time.monotonic()
            self._lock.acquire()
            self._wait_monitor.count(time.monotonic() - begin)

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class TeamEvent:
    """`threading.Event` whose `wait` also ends with the team."""

    def __init__(self, wait_monitor: WaitMonitor) -> None:
        self._wait_monitor, self._set = wait_monitor, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._wait_monitor.change():
            self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._wait_monitor.wait_for(self.is_set, timeout)


Action = Callable[[], None]


class EventLoop:
    """What an action raises is raised in the training task, and ends the thread."""

    def __init__(self, wait_monitor: WaitMonitor) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wait_monitor = wait_monitor
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
            self._wait_monitor.fail(error)
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
