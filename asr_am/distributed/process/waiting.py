"""What the threads of a learner wait for each other with: one lock for everything that can happen.

A learner has a training task, communication tasks, and the mail thread. Each wait ends when it is ready, but also when
the team is closed, or when something went wrong that the training task must hear of; so no call can be left hanging.
Who makes a change looks who is ready after it, and wakes nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asr_am.distributed.team import Usage


class Closed(Exception):
    """Ends a communication task when its team is closed."""


@dataclass(eq=False)
class Waiter:
    """A thread that waits. done: `ready` said so, and is not to be asked again."""

    ready: Callable[[], bool]
    condition: threading.Condition
    done: bool = False


class Waiting:
    """Made in the training task, whose waits count in `usage`."""

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self._lock = threading.RLock()
        self._waiters: list[Waiter] = []
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
            raise Closed("the team is closed")

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
            self._usage.waiting_seconds += seconds

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self.check()
            if ready():
                return True
            waiter = Waiter(ready, threading.Condition(self._lock))
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

    def __init__(self, waiting: Waiting) -> None:
        self._waiting, self._lock = waiting, threading.Lock()

    def __enter__(self) -> None:
        self._waiting.check()
        if not self._lock.acquire(blocking=False):
            begin = time.monotonic()
            self._lock.acquire()
            self._waiting.count(time.monotonic() - begin)

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class TeamEvent:
    """`threading.Event` whose `wait` also ends with the team."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting, self._set = waiting, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._waiting.change():
            self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._waiting.wait_for(self.is_set, timeout)
