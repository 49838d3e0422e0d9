from __future__ import annotations

import threading
import time

import pytest

from asr_am.distributed.runtime.event_loop import Closed, TeamEvent, TeamLock, Waiting
from asr_am.distributed.team import Usage


def in_a_task(waiting: Waiting, call: object) -> list[BaseException | object]:
    """What `call` returns or raises in a thread of its own, once that is over."""
    results: list[BaseException | object] = []

    def run() -> None:
        try:
            results.append(call())  # type: ignore[operator]
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(0.1)
    waiting.close()
    thread.join(30)
    return results


def test_closing_ends_every_wait_of_a_task() -> None:
    for call in ("event", "pause", "lock"):
        waiting = Waiting(Usage())
        event, lock = TeamEvent(waiting), TeamLock(waiting)
        calls = {"event": event.wait, "pause": lambda w=waiting: w.pause(60), "lock": lambda w=waiting: w.pause(60)}
        (result,) = in_a_task(waiting, calls[call])
        assert isinstance(result, Closed), call
        with pytest.raises(Closed):
            lock.__enter__()


def test_a_failure_is_raised_in_the_training_task_only() -> None:
    waiting = Waiting(Usage())
    event = TeamEvent(waiting)
    threading.Timer(0.05, lambda: waiting.fail(KeyError("first"))).start()
    with pytest.raises(KeyError, match="first"):
        event.wait()
    waiting.fail(ValueError("second"))
    with pytest.raises(KeyError, match="first"):
        waiting.check()
    threading.Timer(0.02, event.set).start()
    assert in_a_task(waiting, event.wait) == [True]


def test_only_who_is_ready_is_woken() -> None:
    waiting, asked = Waiting(Usage()), []
    letters: list[int] = []

    def ready() -> bool:
        asked.append(threading.get_ident())
        return len(letters) == 50

    thread = threading.Thread(target=lambda: waiting.wait_for(ready))
    thread.start()
    while not asked:
        time.sleep(0.001)
    for letter in range(50):
        with waiting.change():
            letters.append(letter)
    thread.join(30)
    assert not thread.is_alive() and asked.count(thread.ident) == 1 and len(asked) == 51


def test_events_wait_with_and_without_a_timeout() -> None:
    waiting = Waiting(Usage())
    event = TeamEvent(waiting)
    assert event.wait(0.01) is False and not event.is_set()
    event.set()
    assert event.wait() is True and event.is_set()
    event.clear()
    assert event.wait(0) is False


def test_the_training_task_counts_what_it_waits_for_others() -> None:
    usage = Usage()
    waiting = Waiting(usage)
    TeamEvent(waiting).wait(0.05)
    assert 0.05 <= usage.waiting_seconds < 5
    counted = usage.waiting_seconds
    waiting.pause(0.05)
    assert usage.waiting_seconds == counted, "a sleep is not for others"
    lock = TeamLock(waiting)
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.05)

    threading.Thread(target=hold).start()
    held.wait()
    with lock:
        assert usage.waiting_seconds > counted
    counted = usage.waiting_seconds
    thread = threading.Thread(target=lambda: TeamEvent(waiting).wait(0.05))
    thread.start()
    thread.join()
    assert usage.waiting_seconds == counted, "another task's"
