"""Threads of a learner: the event loop that owns its sockets, and the monitor that its tasks wait on.

A learner has a training task, communication tasks, and the communication thread that runs the event loop. A ZeroMQ
socket may be used by one thread only, so the event loop uses all of a process' sockets.

All waits use one lock (`WaitMonitor`). A wait ends when its condition is true, when the team is closed, or when
something fails that the training task must raise, so no call hangs. Whoever changes something evaluates the conditions
of all waiting threads and wakes only those that can go on.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

import zmq

from asr_am.distributed.awake_clock import AwakeClock
from asr_am.distributed.team import CommStats

log = logging.getLogger(__name__)

SPIN = 1e-3  # seconds for which a waiting thread calls `WaitMonitor.progress` before it sleeps


class CommClosed(Exception):
    """Ends a communication task when its team is closed."""


@dataclass(eq=False)
class PendingWait:
    """A thread that waits.

    Attributes:
        ready: the condition it waits for.
        condition: wakes the thread.
        done: `ready` has returned True, and must not be called again.
    """

    ready: Callable[[], bool]
    condition: threading.Condition
    done: bool = False


class WaitMonitor:
    """Lock and conditions of one learner. Created in the training task, whose waits are counted.

    Args:
        comm_stats: statistics with the seconds waited by the training task.

    Attributes:
        clock: clock of all timeouts.
        progress: called by a thread that waits, again and again before it sleeps. None: it sleeps at once.
    """

    def __init__(self, comm_stats: CommStats) -> None:
        self._comm_stats = comm_stats
        self.clock = AwakeClock()
        self.progress: Callable[[], object] | None = None
        self._training_waits = False
        self._wait_end = 0.0  # end of the last wait of the training task
        self._lock = threading.RLock()
        self._waiters: list[PendingWait] = []
        self._training = threading.get_ident()
        self._failure: BaseException | None = None
        self._ignored: tuple[type[BaseException], ...] = ()
        self._closed = False

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @contextmanager
    def change(self) -> Iterator[None]:
        """Context of every change that a thread may wait for."""
        with self._lock:
            yield
            for waiter in self._waiters:
                if not waiter.done and waiter.ready():
                    waiter.done = True
                    waiter.condition.notify()

    def fail(self, failure: BaseException) -> None:
        """Raises `failure` in the training task, from its present or next call. Only the first failure counts."""
        with self._lock:
            if not isinstance(failure, self._ignored):
                self._failure = self._failure or failure
            self._wake_all()

    def ignore(self, kind: type[BaseException]) -> None:
        """Lets the training task wait again after a failure of this kind, also if other tasks find more of them."""
        with self._lock:
            self._ignored = (kind,)
            if isinstance(self._failure, kind):
                self._failure = None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wake_all()

    def check(self) -> None:
        """Raises the failure (in the training task), or CommClosed if the team is closed."""
        if threading.get_ident() == self._training and self._failure is not None:
            raise self._failure
        if self._closed:
            raise CommClosed("the team is closed")

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `ready()` is true. Returns False after `timeout` seconds.

        `ready` is called by every thread that changes something, under the lock.
        """
        begin = time.monotonic()
        try:
            return self._spin(ready, timeout) or self._wait(ready, timeout)
        finally:
            self.count(time.monotonic() - begin)

    def pause(self, seconds: float) -> None:
        """Sleeps. Ends early if the team is closed or has failed."""
        self._wait(lambda: False, seconds)

    def count(self, seconds: float) -> None:
        """Counts the wait if the caller is the training task."""
        if threading.get_ident() == self._training:
            self._comm_stats.waiting_seconds += seconds

    @property
    def waiting_seconds(self) -> float:
        """Seconds that the training task has waited for others."""
        return self._comm_stats.waiting_seconds

    def busy_since(self) -> float | None:
        """Returns when the training task ended its last wait. None while it waits. By `clock`."""
        return None if self._training_waits else self._wait_end

    def _spin(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Waits for a moment without a change of threads. Returns whether `ready()` was true."""
        end = time.monotonic() + (SPIN if timeout is None else min(SPIN, timeout))
        while self.progress is not None and time.monotonic() < end:
            self.progress()
            with self._lock:
                self.check()
                if ready():
                    return True
            os.sched_yield()  # others may need this core
        return False

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        end = None if timeout is None else self.clock.now() + timeout
        is_training = threading.get_ident() == self._training
        with self._lock:
            self.check()
            if ready():
                return True
            waiter = PendingWait(ready, threading.Condition(self._lock))
            self._waiters.append(waiter)
            self._training_waits = self._training_waits or is_training
            try:
                while not waiter.done:
                    left = None if end is None else end - self.clock.now()
                    if left is not None and left <= 0:
                        return False
                    waiter.condition.wait(left)
                    self.check()
                return True
            finally:
                self._waiters.remove(waiter)
                if is_training:
                    self._training_waits, self._wait_end = False, self.clock.now()

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            waiter.condition.notify()


class TeamLock:
    """A lock for the tasks of this learner."""

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
    """An event whose `wait` also ends when the team is closed or has failed."""

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
MAX_POLL = 0.5  # seconds between two ticks of the clock
SHORT_WAIT = 0.4e-3  # seconds up to which the loop sleeps and then polls, as a poll takes whole milliseconds


class EventLoop:
    """Thread that polls sockets, timers and commands of other threads.

    What a callback raises is raised in the training task, and ends the thread. Another thread may execute a callback
    itself, between two of the thread (`try_here`).

    Attributes:
        context: the ZeroMQ context of all sockets.
    """

    def __init__(self, wait_monitor: WaitMonitor) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wait_monitor, self._clock = wait_monitor, wait_monitor.clock
        self._poller = zmq.Poller()
        self._ready: dict[object, Action] = {}
        self._commands: deque[Action] = deque()
        self._timers: list[tuple[float, int, Action]] = []
        self._ids = count()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._ready[self._wake_read] = self._run_commands
        self._at_stop: list[Action] = []
        self._stopping = self._ended = False
        self._lock = threading.Lock()  # guards the pipe
        self._turn = threading.Lock()  # held by the thread that executes callbacks
        self._thread = threading.Thread(target=self._run, name="communication", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, command: Action) -> None:
        """Executes `command` in the thread soon. May be called from any thread."""
        self._commands.append(command)
        with self._lock, suppress(BlockingIOError):  # the pipe is full: the thread wakes anyway
            if not self._ended:
                os.write(self._wake_write, b"x")

    def call_here(self, command: Action) -> None:
        """As `call`, but at once in this thread if it can be (`try_here`)."""
        if not self.try_here(command):
            self.call(command)

    def try_here(self, command: Action) -> bool:
        """Executes `command` in this thread, after those before it. Not for commands that use sockets.

        Returns:
            False if a callback is executed now, and so `command` is not.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if not self._ended:
                self._run_commands()
                command()
        except Exception as error:
            self._wait_monitor.fail(error)
        finally:
            self._turn.release()
        return True

    def stop(self) -> None:
        """Stops the thread, and waits for its end."""
        if self._thread.ident is None:
            self._end()
        else:
            self.call(self._stop)
            self._thread.join()

    def at_stop(self, action: Action) -> None:
        """Executes `action`, which closes sockets, when the thread ends."""
        self._at_stop.append(action)

    # called in the thread, or before its start

    def attach(self, socket: zmq.Socket[bytes], ready: Action) -> None:
        """Calls `ready` whenever the socket can be read."""
        self._poller.register(socket, zmq.POLLIN)
        self._ready[socket] = ready

    def want_to_send(self, socket: zmq.Socket[bytes], wanted: bool) -> None:
        """Sets whether `ready` is also called when the socket can be written."""
        self._poller.modify(socket, zmq.POLLIN | zmq.POLLOUT if wanted else zmq.POLLIN)

    def detach(self, socket: zmq.Socket[bytes]) -> None:
        self._poller.unregister(socket)
        del self._ready[socket]

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._timers, (self._clock.now() + seconds, next(self._ids), action))

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                events = self._poll()
                if (stopped := self._clock.tick()) > 1:
                    log.warning("this process was stopped for %.1f s", stopped)
                with self._turn:
                    for socket, _ in events:
                        if socket in self._ready:  # an earlier callback may have closed it
                            self._ready[socket]()
                    for action in self._due():
                        action()
        except Exception as error:
            self._wait_monitor.fail(error)
        finally:
            with self._turn:
                self._end()

    def _due(self) -> list[Action]:
        """Removes the timers that are due. One that they set again, due at once, waits until sockets were polled."""
        now, due = self._clock.now(), list[Action]()
        while self._timers and self._timers[0][0] <= now:
            due.append(heapq.heappop(self._timers)[2])
        return due

    def _end(self) -> None:
        for action in self._at_stop:
            action()
        self.context.term()
        with self._lock:
            self._ended = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _poll(self) -> list[tuple[object, int]]:
        """Waits for sockets until the next timer, or until the clock must tick."""
        left = min([MAX_POLL, *(timer[0] - self._clock.now() for timer in self._timers[:1])])
        if left > SHORT_WAIT:
            return self._poller.poll(int(1000 * left) + 1)  # whole milliseconds, rounded up
        if left > 0:
            time.sleep(left)
        return self._poller.poll(0)

    def _run_commands(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._commands:
            self._commands.popleft()()
