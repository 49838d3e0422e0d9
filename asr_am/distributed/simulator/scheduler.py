"""Discrete-event scheduler of the virtual cluster: a virtual clock, and tasks that wait on it.

Each task is a greenlet. A task runs until it is suspended. Then the event loop (the greenlet that called `run`) takes
the earliest event off its queue, moves the clock to its time, and executes it. Events of the same time are executed in
the order in which they were added, so a run depends on its inputs alone.

All tasks share one thread, so what torch keeps per thread is saved and restored for each task: its modes (`TorchModes`)
at each switch, its random stream when another task runs. The event loop has modes of its own, and draws no numbers.
Otherwise a task suspended under `no_grad` would turn off the gradients of others, one inside autocast would lower their
precision, and all would draw from one random stream in an order that depends on the clock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

import torch
from greenlet import GreenletExit, getcurrent, greenlet

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TorchModes:
    """Modes that torch keeps per thread.

    Attributes:
        grad: gradients are recorded.
        nesting: number of autocast contexts that are open. Leaving the last one clears the cache of cast weights.
        autocast: (enabled, dtype) for each of DEVICES, if one is open.
    """

    grad: bool = True
    nesting: int = 0
    autocast: tuple[tuple[bool, torch.dtype], ...] = ()

    @classmethod
    def capture(cls) -> TorchModes:
        nesting = _nesting()
        open_for = DEVICES if nesting else ()
        autocast = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in open_for)
        return cls(torch.is_grad_enabled(), nesting, autocast)

    def restore(self, present: TorchModes) -> None:
        """Sets these modes, where the `present` ones are others."""
        if self.grad != present.grad:
            torch.set_grad_enabled(self.grad)
        if self.nesting or present.nesting:
            for number, device in enumerate(DEVICES):
                enabled, dtype = self.autocast[number] if self.autocast else (False, torch.get_autocast_dtype(device))
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            _set_nesting(self.nesting)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(target: int) -> None:
    current = _nesting()
    torch.clear_autocast_cache()  # the weights may have changed while the task was suspended
    for _ in range(current, target):
        torch.autocast_increment_nesting()
    for _ in range(target, current):
        torch.autocast_decrement_nesting()


@dataclass
class SimProcess:
    """A process, as far as its tasks share it.

    Attributes:
        stopped_until: its tasks do not run before (SIGSTOP, a suspended machine).
    """

    stopped_until: float = 0.0


class SimTask:
    """A task on the virtual clock.

    Attributes:
        waited: called with the seconds that the task spent waiting for others.
        on_end: called when the task has ended.
        killed: the task was ended by `Scheduler.kill`.
        process: the process it belongs to, None if that is never stopped.
        result: what its function returned.
        error: what its function raised.
        waits_for: what it waits for, for messages.
        wait_id: id of the present suspension, 0 before the first, -1 while it runs. Wake-ups for another id are void.
        woken: id of the last suspension that `Scheduler.wake` was called for.
        pending: exception that its next suspension raises.
        modes: torch's modes while the task is suspended.
        random: state of torch's random generator, while the generator has that of another task.
        ended: condition that is woken at the end.
    """

    def __init__(self, scheduler: Scheduler, function: Callable[[], object], name: str, seed: int) -> None:
        self.name = name
        self.waited: Callable[[float], None] = lambda seconds: None
        self.on_end: Callable[[SimTask], None] = lambda task: None
        self.finished = False
        self.killed = False
        self.process: SimProcess | None = None
        self.result: object = None
        self.error: BaseException | None = None
        self.waits_for = ""
        self.wait_id = 0
        self.woken = -1
        self.pending: BaseException | None = None
        self.modes = TorchModes()
        self.random = torch.Generator().manual_seed(seed).get_state()
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
    """Event loop on a virtual clock.

    Attributes:
        now: virtual seconds.
        current: the task that runs, None in the event loop.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.current: SimTask | None = None
        self._event_queue: list[tuple[float, int, Callable[[], None]]] = []
        self._last_id = 0
        self._tasks: dict[SimTask, None] = {}  # tasks that have not ended, in the order of their start
        self._event_loop, self._event_loop_modes = getcurrent(), TorchModes.capture()
        self._random = torch.get_rng_state()  # of the caller, while the generator has that of a task
        self._random_of: SimTask | None = None  # the task whose state torch's random generator has

    # called from the event loop or from a task

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Schedules `callback`, which must not wait."""
        self._last_id += 1
        heapq.heappush(self._event_queue, (when, self._last_id, callback))

    def spawn(self, function: Callable[[], object], name: str, seed: int) -> SimTask:
        """Starts a task, once the present one is suspended. `seed` is the seed of its torch random stream."""
        task = SimTask(self, function, name, seed)
        self._tasks[task] = None
        self.call_at(self.now, partial(self._resume, task, 0, True))
        return task

    def wake(self, task: SimTask) -> None:
        """Ends the present suspension of a task."""
        if task.woken != task.wait_id:
            task.woken = task.wait_id
            self.call_at(self.now, partial(self._resume, task, task.wait_id, True))

    def throw(self, task: SimTask, error: BaseException) -> None:
        """Raises `error` in a task, from its present or next suspension."""
        task.pending = error
        self.wake(task)

    # called from a task

    def suspend(self, why: str, timeout: float | None = None) -> bool:
        """Suspends this task until it is woken (returns True) or `timeout` seconds have passed (returns False)."""
        task = self.current
        if task is None:
            raise RuntimeError(f"only a task can wait for {why}")
        if task.killed:
            raise GreenletExit
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a virtual task cannot wait under torch.inference_mode, which others would inherit: use torch.no_grad"
            )
        if task.pending is None:
            self._last_id += 1
            task.wait_id, task.waits_for = self._last_id, why
            if timeout is not None:
                # A wait that rounding would end at this very moment could be repeated for ever.
                when = max(self.now + timeout, math.nextafter(self.now, math.inf)) if timeout > 0 else self.now
                self.call_at(when, partial(self._resume, task, task.wait_id, False))
            woken = self._event_loop.switch()
        if task.pending is not None:
            error, task.pending = task.pending, None
            raise error
        return woken

    def sleep(self, seconds: float) -> None:
        self.suspend(f"{seconds:g} s to pass", seconds)

    # called from the event loop

    def run(self, over: Callable[[], bool]) -> None:
        """Executes events until `over`. Raises RuntimeError in a deadlock, or what a callback raises."""
        self._event_loop, self._event_loop_modes = getcurrent(), TorchModes.capture()
        try:
            while not over():
                if not self._event_queue:
                    raise RuntimeError(f"deadlock at {self.now:.6f} s: {self._describe_waits()}")
                self.now, _, callback = heapq.heappop(self._event_queue)
                callback()
        finally:
            self._take_random(None)

    def kill(self, task: SimTask) -> None:
        """Ends a task where it is suspended. Its `finally` clauses run now, and cannot wait."""
        task.killed = True
        if not task.finished:
            self._enter(task, partial(task.greenlet.throw, GreenletExit))

    def kill_all(self) -> None:
        while self._tasks:
            self.kill(next(iter(self._tasks)))
        self._take_random(None)

    def _resume(self, task: SimTask, wait_id: int, woken: bool) -> None:
        """Resumes a task, unless it has been resumed since this wake-up was scheduled."""
        if task.finished or task.wait_id != wait_id:
            return
        if task.process is not None and task.process.stopped_until > self.now:
            self.call_at(task.process.stopped_until, partial(self._resume, task, wait_id, woken))
        else:
            self._enter(task, partial(task.greenlet.switch, woken))

    def _enter(self, task: SimTask, switch: Callable[[], object]) -> None:
        task.greenlet.parent = self._event_loop
        self._take_random(task)
        task.modes.restore(self._event_loop_modes)
        task.wait_id, self.current = -1, task
        switch()
        self.current = None
        task.modes = TorchModes.capture()
        self._event_loop_modes.restore(task.modes)
        if task.killed or task.greenlet.dead:
            task.finished = True
            self._tasks.pop(task, None)
            task.ended.wake()
            task.on_end(task)

    def _take_random(self, task: SimTask | None) -> None:
        """Gives torch's random generator the state of a task, or of the caller of `run`."""
        before = self._random_of
        if task is before:
            return
        if before is None:
            self._random = torch.get_rng_state()
        elif not before.finished:
            before.random = torch.get_rng_state()
        torch.set_rng_state(self._random if task is None else task.random)
        self._random_of = task

    def _describe_waits(self) -> str:
        return "; ".join(f"{task.name} waits for {task.waits_for}" for task in self._tasks)


class Condition:
    """Condition variable on the virtual clock. Wakes its tasks in the order in which they were suspended."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspended: list[SimTask] = []

    def wake(self, chosen: Container[SimTask] | None = None) -> None:
        """Wakes the tasks that are suspended, or only the `chosen` ones of them."""
        for task in self._suspended:
            if chosen is None or task in chosen:
                self._scheduler.wake(task)

    def suspend(self, why: str, timeout: float | None = None) -> bool:
        """Suspends this task until the next `wake` (returns True) or for `timeout` seconds (returns False)."""
        task = self._scheduler.current
        assert task is not None, "only tasks wait"
        self._suspended.append(task)
        try:
            return self._scheduler.suspend(why, timeout)
        finally:
            self._suspended.remove(task)

    def wait_for(self, ready: Callable[[], bool], why: str, timeout: float | None = None) -> bool:
        """Waits until `ready()` is true, and counts the time as waiting for others.

        Args:
            ready: called now and after every `wake`.
            why: what the task waits for, for messages.
            timeout: seconds, None to wait forever.

        Returns:
            False if the timeout has passed.
        """
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
    """Lock on the virtual clock, first come, first served. The first task in the queue holds it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: deque[SimTask] = deque()
        self._released = Condition(scheduler)

    def __enter__(self) -> SimLock:
        task = self._scheduler.current
        assert task is not None, "only tasks acquire locks"
        if task in self._queue:
            raise RuntimeError(f"{task.name} acquires a lock that it holds")
        self._queue.append(task)
        if len(self._queue) == 1:
            return self
        try:
            self._released.wait_for(lambda: self._queue[0] is task, "a lock")
        except BaseException:
            self._leave(task)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave(self._queue[0])

    def _leave(self, task: SimTask) -> None:
        self._queue.remove(task)
        self._released.wake()


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
        """Waits until the event is set. Returns True even if it was set and cleared again in the meantime."""
        before = self._times_set
        return self._changed.wait_for(lambda: self._is_set or self._times_set > before, "an event", timeout)
