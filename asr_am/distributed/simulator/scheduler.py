"""What torch keeps per operating-system thread, saved and put back so that each virtual task has its own.

All tasks share one thread. Without this, a task that blocks under `no_grad` would turn off another's gradients, one
inside autocast would lower another's precision, and the tasks would draw from one random stream, in an order that
depends on the clock.


A virtual clock, and the tasks that live on it.

Each task is a greenlet. One runs until it parks; then the hub (the greenlet that called `run`) takes the earliest entry
off its agenda, moves the clock there, and goes on. Entries of the same time are taken in the order in which they were
made, so a run is a function of its inputs alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TorchState:
    """grad: whether gradients are recorded. autocast: (enabled, dtype) by device. nesting: autocast contexts entered
    and not left: the cache of weights in low precision is cleared when the last one is left. random: of the CPU.
    """

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    nesting: int
    random: Tensor

    @classmethod
    def of_new_task(cls, seed: int) -> TorchState:
        """What a thread starts with, and a random stream of its own."""
        types = tuple((False, torch.get_autocast_dtype(device)) for device in DEVICES)
        return cls(True, types, 0, torch.Generator().manual_seed(seed).get_state())

    @classmethod
    def capture(cls) -> TorchState:
        types = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)
        return cls(torch.is_grad_enabled(), types, _nesting(), torch.get_rng_state())

    def restore(self) -> None:
        torch.set_grad_enabled(self.grad)
        for device, (enabled, dtype) in zip(DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        _set_nesting(self.nesting)
        torch.set_rng_state(self.random)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(wanted: int) -> None:
    """A task that was inside autocast finds the cache empty, never full of weights that changed meanwhile."""
    now = _nesting()
    if now or wanted:
        torch.clear_autocast_cache()
    for _ in range(now, wanted):
        torch.autocast_increment_nesting()
    for _ in range(wanted, now):
        torch.autocast_decrement_nesting()


class SimTask:
    """waited: told the seconds that the task spent waiting for others. waits_for: for people."""

    def __init__(self, scheduler: Scheduler, function: Callable[[], object], name: str, seed: int) -> None:
        self.name = name
        self.waited: Callable[[float], None] = lambda seconds: None
        self.on_end: Callable[[SimTask], None] = lambda task: None
        self.finished = False
        self.killed = False
        self.result: object = None
        self.error: BaseException | None = None
        self.waits_for = ""
        self.wait_id = 0  # of the present stay in `park`, 0 before the first, -1 outside: entries for another are void
        self.woken = -1  # the last ticket that `wake` was called for
        self.pending: BaseException | None = None
        self.torch_state = TorchState.of_new_task(seed)
        self.ended = Condition(scheduler)
        self._function = function
        self.greenlet = greenlet(self._run)

    def _run(self, _: bool) -> None:
        try:
            self.result = self._function()
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait_for(lambda: self.finished, f"task {self.name}", timeout)


class Scheduler:
    """now: seconds. current: the task that runs, None in the hub."""

    def __init__(self) -> None:
        self.now = 0.0
        self.current: SimTask | None = None
        self._event_queue: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        self._living: dict[SimTask, None] = {}  # ordered
        self._event_loop, self._event_loop_state = getcurrent(), TorchState.capture()

    # from the hub or from a task

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Have the hub call `callback`, which must not park."""
        self._entries += 1
        heapq.heappush(self._event_queue, (when, self._entries, callback))

    def spawn(self, function: Callable[[], object], name: str, seed: int) -> SimTask:
        """A task that starts as soon as the present one parks. seed: of its torch random stream."""
        task = SimTask(self, function, name, seed)
        self._living[task] = None
        self.call_at(self.now, partial(self._resume, task, 0, True))
        return task

    def wake(self, task: SimTask) -> None:
        """End its present stay in `park`."""
        if task.woken != task.wait_id:
            task.woken = task.wait_id
            self.call_at(self.now, partial(self._resume, task, task.wait_id, True))

    def throw(self, task: SimTask, error: BaseException) -> None:
        """Have `park` raise `error` in a task, now or the next time."""
        task.pending = error
        self.wake(task)

    # from a task

    def suspend(self, why: str, timeout: float | None = None) -> bool:
        """Let others run until this task is woken (True) or `timeout` seconds have passed (False)."""
        task = self.current
        if task is None:
            raise RuntimeError(f"only a task can wait for {why}")
        if task.killed:
            raise GreenletExit
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a virtual task cannot wait under inference_mode, which others would inherit; use no_grad"
            )
        if task.pending is None:
            self._entries += 1
            task.wait_id, task.waits_for = self._entries, why
            if timeout is not None:
                self.call_at(self.now + max(timeout, 0.0), partial(self._resume, task, task.wait_id, False))
            woken = self._event_loop.switch()
        if task.pending is not None:
            error, task.pending = task.pending, None
            raise error
        return woken

    def sleep(self, seconds: float) -> None:
        self.suspend(f"{seconds:g} s to pass", seconds)

    # from the hub

    def run(self, over: Callable[[], bool]) -> None:
        """Until `over`; RuntimeError where all wait for each other. What a callback raises ends it."""
        self._event_loop, self._event_loop_state = getcurrent(), TorchState.capture()
        while not over():
            if not self._event_queue:
                raise RuntimeError(f"deadlock at {self.now:.6f} s: {self._who_waits()}")
            self.now, _, act = heapq.heappop(self._event_queue)
            act()

    def kill(self, task: SimTask) -> None:
        """End a task where it stands: what its `finally` clauses do happens now, and cannot wait."""
        task.killed = True
        if not task.finished:
            self._enter(task, partial(task.greenlet.throw, GreenletExit))

    def kill_all(self) -> None:
        while self._living:
            self.kill(next(iter(self._living)))

    def _resume(self, task: SimTask, wait_id: int, woken: bool) -> None:
        """Go on with a task, unless it has gone on since the ticket was drawn."""
        if not task.finished and task.wait_id == wait_id:
            self._enter(task, partial(task.greenlet.switch, woken))

    def _enter(self, task: SimTask, switch: Callable[[], object]) -> None:
        task.greenlet.parent = self._event_loop
        task.torch_state.restore()
        task.wait_id, self.current = -1, task
        switch()
        self.current = None
        task.torch_state = TorchState.capture()
        self._event_loop_state.restore()
        if task.killed or task.greenlet.dead:
            task.finished = True
            self._living.pop(task, None)
            task.ended.wake()
            task.on_end(task)

    def _who_waits(self) -> str:
        return "; ".join(f"{task.name} waits for {task.waits_for}" for task in self._living)


class Condition:
    """Tasks that wait for something; woken in the order in which they came, each to look for itself."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspended: list[SimTask] = []

    def wake(self) -> None:
        for task in self._suspended:
            self._scheduler.wake(task)

    def suspend(self, why: str, timeout: float | None = None) -> bool:
        """Until the next `wake` (True), or for `timeout` seconds (False)."""
        task = self._scheduler.current
        assert task is not None, "only tasks wait"
        self._suspended.append(task)
        try:
            return self._scheduler.suspend(why, timeout)
        finally:
            self._suspended.remove(task)

    def wait_for(self, ready: Callable[[], bool], why: str, timeout: float | None = None) -> bool:
        """Until `ready`, asked at every `wake`; False after `timeout` seconds. Counts as waiting for others."""
        scheduler, task = self._scheduler, self._scheduler.current
        begin = scheduler.now
        try:
            while not ready():
                left = None if timeout is None else begin + timeout - scheduler.now
                if left is not None and left <= 0:
                    return False
                self.suspend(why, left)
            return True
        finally:
            if task is not None:
                task.waited(scheduler.now - begin)


class SimLock:
    """Held by the first task of a queue; passed on in the order in which they came."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: deque[SimTask] = deque()
        self._passed_on = Condition(scheduler)

    def __enter__(self) -> SimLock:
        task = self._scheduler.current
        assert task is not None, "only tasks take locks"
        if task in self._queue:
            raise RuntimeError(f"{task.name} takes a lock that it holds")
        self._queue.append(task)
        try:
            self._passed_on.wait_for(lambda: self._queue[0] is task, "a lock")
        except BaseException:
            self._leave(task)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave(self._queue[0])

    def _leave(self, task: SimTask) -> None:
        self._queue.remove(task)
        self._passed_on.wake()


class SimEvent:
    """threading.Event on the virtual clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._is_set = False
        self._times_set = 0
        self._changed = Condition(scheduler)

    def set(self) -> None:
        self._is_set = True
        self._times_set += 1
        self._changed.wake()

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """True also where the event was set and cleared again meanwhile."""
        before = self._times_set
        return self._changed.wait_for(lambda: self._is_set or self._times_set > before, "an event", timeout)
