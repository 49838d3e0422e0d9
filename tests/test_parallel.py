from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from asr_am.errors import InputError
from asr_am.parallel import Failure, isolated_map, parallel_map, threaded_map


def test_workers_inherit_what_cannot_be_pickled() -> None:
    """Checks that items are inherited: models of gigabytes and memory maps must not be pickled."""
    lock = threading.Lock()
    items = [(lock, number) for number in range(5)]
    assert parallel_map(lambda item: (item[0].locked(), item[1] ** 2), items, 2, "squares") == [
        (False, number**2) for number in range(5)
    ]


def test_a_worker_has_one_arithmetic_thread_of_the_libraries_that_its_parent_has_loaded() -> None:
    np.ones((2, 2)) @ np.ones((2, 2))

    def threads(number: int) -> list[int]:
        return [library["num_threads"] for library in threadpool_info()]

    with threadpool_limits(2):
        assert max(threads(0)) == 2
        assert {thread for found in parallel_map(threads, range(2), 2, "threads") for thread in found} == {1}


def test_threads_yield_in_order_and_run_a_bounded_distance_ahead() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        return number**2

    for jobs in (1, 2):
        begun.clear()
        found = threaded_map(work, range(20), jobs, "squares")
        assert next(found) == 0
        assert len(begun) <= 2 * jobs
        assert list(found) == [number**2 for number in range(1, 20)]


def test_an_error_in_a_thread_is_raised_and_ends_the_others() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise ValueError("one")
        return number

    with pytest.raises(ValueError, match="one"):
        list(threaded_map(work, range(50), 2, "numbers"))
    assert len(begun) < 10


def test_isolated_items_survive_each_other() -> None:
    def work(item: str) -> str:
        if item == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "wrong":
            raise InputError("wrong input")
        if item == "bug":
            raise ZeroDivisionError
        return item.upper()

    items = ["a", "killed", "wrong", "b", "bug", "c"]
    found = isolated_map(work, items, 2, "items")
    assert found[0::3] == ["A", "B"] and found[5] == "C"
    reasons = [result.reason for result in found if isinstance(result, Failure)]
    assert reasons == ["its process was killed (out of memory?)", "wrong input", "ZeroDivisionError()"]
