from __future__ import annotations

import threading
import time

import pytest

from asr_am.distributed.awake_clock import AwakeClock
from asr_am.distributed.runtime.event_loop import CommClosed, EventLoop, TeamEvent, TeamLock, WaitMonitor
from asr_am.distributed.team import CommStats


def in_a_task(wait_monitor: WaitMonitor, call: object) -> list[BaseException | object]:
    """Calls `call` in another thread, and returns a function that waits for its result or exception."""
    results: list[BaseException | object] = []

    def run() -> None:
        try:
            results.append(call())  # type: ignore[operator]
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(0.1)
    wait_monitor.close()
    thread.join(30)
    return results


def test_closing_ends_every_wait_of_a_task() -> None:
    for call in ("event", "pause", "lock"):
        wait_monitor = WaitMonitor(CommStats())
        event, lock = TeamEvent(wait_monitor), TeamLock(wait_monitor)
        calls = {
            "event": event.wait,
            "pause": lambda w=wait_monitor: w.pause(60),
            "lock": lambda w=wait_monitor: w.pause(60),
        }
        (result,) = in_a_task(wait_monitor, calls[call])
        assert isinstance(result, CommClosed), call
        with pytest.raises(CommClosed):
            lock.__enter__()


def test_a_failure_is_raised_in_the_training_task_only() -> None:
    wait_monitor = WaitMonitor(CommStats())
    event = TeamEvent(wait_monitor)
    threading.Timer(0.05, lambda: wait_monitor.fail(KeyError("first"))).start()
    with pytest.raises(KeyError, match="first"):
        event.wait()
    wait_monitor.fail(ValueError("second"))
    with pytest.raises(KeyError, match="first"):
        wait_monitor.check()
    threading.Timer(0.02, event.set).start()
    assert in_a_task(wait_monitor, event.wait) == [True]


def test_ignored_failures_of_several_tasks_end_no_wait_but_others_do() -> None:
    wait_monitor = WaitMonitor(CommStats())
    event = TeamEvent(wait_monitor)
    wait_monitor.fail(KeyError("a task's"))
    wait_monitor.ignore(KeyError)
    threading.Timer(0.02, lambda: wait_monitor.fail(KeyError("another task's"))).start()
    threading.Timer(0.1, event.set).start()
    assert event.wait(30)
    wait_monitor.check()
    wait_monitor.fail(ValueError("another kind"))
    with pytest.raises(ValueError, match="another kind"):
        event.wait()


def test_only_who_is_ready_is_woken() -> None:
    wait_monitor, asked = WaitMonitor(CommStats()), []
    messages: list[int] = []

    def ready() -> bool:
        asked.append(threading.get_ident())
        return len(messages) == 50

    thread = threading.Thread(target=lambda: wait_monitor.wait_for(ready))
    thread.start()
    while not asked:
        time.sleep(0.001)
    for message in range(50):
        with wait_monitor.change():
            messages.append(message)
    thread.join(30)
    assert not thread.is_alive() and asked.count(thread.ident) == 1 and len(asked) == 51


def test_events_wait_with_and_without_a_timeout() -> None:
    wait_monitor = WaitMonitor(CommStats())
    event = TeamEvent(wait_monitor)
    assert event.wait(0.01) is False and not event.is_set()
    event.set()
    assert event.wait() is True and event.is_set()
    event.clear()
    assert event.wait(0) is False


def test_the_training_task_counts_what_it_waits_for_others() -> None:
    comm_stats = CommStats()
    wait_monitor = WaitMonitor(comm_stats)
    TeamEvent(wait_monitor).wait(0.05)
    assert 0.05 <= comm_stats.waiting_seconds < 5
    counted = comm_stats.waiting_seconds
    wait_monitor.pause(0.05)
    assert comm_stats.waiting_seconds == counted, "a sleep is not for others"
    lock = TeamLock(wait_monitor)
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.05)

    threading.Thread(target=hold).start()
    held.wait()
    with lock:
        assert comm_stats.waiting_seconds > counted
    counted = comm_stats.waiting_seconds
    thread = threading.Thread(target=lambda: TeamEvent(wait_monitor).wait(0.05))
    thread.start()
    thread.join()
    assert comm_stats.waiting_seconds == counted, "another task's"


def test_a_timeout_does_not_pass_while_the_process_is_stopped() -> None:
    """A callback that blocks the communication thread stands for a process that is stopped."""
    wait_monitor = WaitMonitor(CommStats())
    wait_monitor.clock = AwakeClock(max_step=0.6)  # above MAX_POLL
    event_loop, ends = EventLoop(wait_monitor), []
    event_loop.start()
    begin, real = wait_monitor.clock.now(), time.monotonic()
    event_loop.call(lambda: event_loop.after(0.9, lambda: ends.append(wait_monitor.clock.now())))
    event_loop.call(lambda: time.sleep(1.5))
    assert wait_monitor.wait_for(lambda: False, 0.9) is False
    assert time.monotonic() - real >= 1.5, "0.9 s and those for which the clock stood still"
    while not ends:
        time.sleep(0.01)
    assert ends[0] - begin >= 0.9 and time.monotonic() - real >= 1.5
    event_loop.stop()


def test_a_clock_before_its_first_tick_is_a_clock() -> None:
    clock = AwakeClock(max_step=0.0)
    begin = clock.now()
    time.sleep(0.01)
    assert clock.now() > begin and clock.tick() == 0.0
    stopped_at = clock.now()
    time.sleep(0.01)
    assert clock.now() == stopped_at and clock.tick() > 0


def test_a_timer_that_sets_itself_again_at_once_starves_no_command() -> None:
    wait_monitor = WaitMonitor(CommStats())
    loop, executed, turns = EventLoop(wait_monitor), TeamEvent(wait_monitor), [0]

    def again() -> None:
        turns[0] += 1
        if turns[0] == 1:
            loop.call(executed.set)
        if turns[0] < 1000 and not executed.is_set():
            loop.after(0.0, again)

    loop.after(0.0, again)
    loop.start()
    assert executed.wait(30) and turns[0] < 10
    loop.stop()


def test_a_command_here_is_executed_after_those_before_it_and_never_beside_a_callback() -> None:
    loop, order = EventLoop(WaitMonitor(CommStats())), list[str]()
    inside, go_on = threading.Event(), threading.Event()
    loop.call(lambda: order.append("before"))
    loop.call_here(lambda: order.append(f"here, {threading.current_thread().name}"))
    assert order == ["before", f"here, {threading.current_thread().name}"]
    loop.start()

    def callback() -> None:
        inside.set()
        go_on.wait()
        order.append("callback")

    loop.call(callback)
    inside.wait()
    assert not loop.try_here(lambda: order.append("beside the callback"))
    loop.call_here(lambda: order.append(f"later, {threading.current_thread().name}"))
    assert len(order) == 2
    go_on.set()
    loop.stop()
    assert order[2:] == ["callback", "later, communication"]
    loop.call_here(lambda: order.append("after the end"))
    assert len(order) == 4


def test_an_error_of_a_command_here_is_raised_by_the_next_call_of_the_training_task() -> None:
    wait_monitor = WaitMonitor(CommStats())
    loop = EventLoop(wait_monitor)
    loop.call_here(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        wait_monitor.check()
    loop.stop()


def test_a_waiting_thread_progresses_messages_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_am.distributed.runtime.event_loop.SPIN", 30.0)
    wait_monitor, calls = WaitMonitor(CommStats()), list[int]()
    wait_monitor.progress = lambda: calls.append(threading.get_ident())
    assert wait_monitor.wait_for(lambda: len(calls) == 3, 30)
    assert calls == [threading.get_ident()] * 3
    assert not wait_monitor.wait_for(lambda: False, 0.01)
    stopped_at = len(calls)
    assert not wait_monitor.wait_for(lambda: False, 0.0) and len(calls) == stopped_at
