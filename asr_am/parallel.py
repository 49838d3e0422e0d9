"""Maps a function over items with a progress bar: in this process, a pool of processes, threads, or on a cluster.

Workers are processes where kaldifst and kaldi_decoder hold the GIL. Each uses one arithmetic thread: two threads on
contended cores are many times slower than one. Functions compiled by numba release the GIL, so threads will do, and
neither their inputs nor their results are copied.

Within `on_cluster`, parallel maps run on a Dask cluster if function and items can be sent (`dask_jobs/encoding.py`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

from threadpoolctl import threadpool_limits

from asr_am.dask_jobs.encoding import NotSent
from asr_am.errors import InputError
from asr_am.progress import ProgressBar, mute, track
from asr_am.signals import signal_on_parent_death

if TYPE_CHECKING:
    from asr_am.dask_jobs.client import DaskJobs

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


_work: tuple[Callable[[Any], Any], Sequence[Any]]  # function and items, set in worker processes
_cluster: DaskJobs | None = None


@contextmanager
def on_cluster(cluster: DaskJobs) -> Iterator[None]:
    """Context in which parallel maps run on a cluster. Those that cannot use at most the processors of this host."""
    global _cluster
    _cluster = cluster
    try:
        yield
    finally:
        _cluster = None
        cluster.close()


def _jobs_here(jobs: int) -> int:
    """Returns the number of jobs of a map that runs on this host."""
    return min(jobs, os.cpu_count() or 1) if _cluster else jobs


def _init_worker(parent: int, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """Initialises a worker: one thread, and death with the parent, as an orphan would hold inherited file locks.

    Ctrl-C reaches all processes. The parent handles it and kills the workers, which print nothing.
    """
    global _work
    _work = function, items
    _begin_worker(parent)


def _begin_worker(parent: int) -> None:
    global _cluster
    _cluster = None  # the parent's
    mute()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's handler
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of libraries that are loaded later
    threadpool_limits(1)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _run_items(numbers: range) -> list[Any]:
    function, items = _work
    return [function(items[number]) for number in numbers]


def _count(bar: ProgressBar, size: int, future: Future[list[Any]]) -> None:
    if not future.cancelled():
        bar.advance(size)


def parallel_map(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, description: str, chunk: int = 1,
    sizes: Sequence[int] | None = None, unit: str = "", here: bool = False,
) -> list[Result]:  # fmt: skip
    """Returns `[function(item) for item in items]`, computed by forked processes, or on the cluster of `on_cluster`.

    Results are pickled, so large ones belong in files. On a cluster, an item may be run twice at the same time if a
    host is lost and comes back. What it writes must have a temporary name first, or be the same bytes.

    Args:
        function: Called for each item. Forked workers inherit it without pickling.
        items: Inherited likewise, so they may be large.
        chunk: Number of items that a worker takes at a time.
        sizes: What the progress bar counts for each item, for instance its utterances. Default: 1.
        unit: Name of what is counted, to show a rate.
        here: Only this host has what the items need.

    Raises:
        InputError: The cluster is lost.
        RuntimeError: A worker was killed from outside.
        Exception: The first exception that an item raised.
    """
    sizes = sizes or [1] * len(items)
    if _cluster and not here and jobs > 1 and len(items) > 1:
        try:
            return _map_on_cluster(_cluster, function, items, jobs, description, chunk, sizes, unit)
        except NotSent as reason:
            log.debug("%s: on this host only, as %s", description, reason)
    jobs = _jobs_here(jobs)
    with ProgressBar(description, sum(sizes), unit=unit) as bar:
        if jobs > 1 and len(items) > 1:
            return _map_in_pool(function, items, min(jobs, len(items)), description, chunk, sizes, bar)
        results = []
        for item, size in zip(items, sizes, strict=True):
            results.append(function(item))
            bar.advance(size)
        return results


def threaded_map(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, description: str, sent: bool = False
) -> Iterator[Result]:
    """Yields `function(item)` for each item in their order, computed by threads, or on the cluster of `on_cluster`.

    At most two results per thread wait to be taken, so memory does not grow with the number of items. The function
    should release the GIL. A cluster computes only results that may be `sent`: all are held until the last one is
    there, so they are small.
    """
    if sent and _cluster:
        yield from parallel_map(function, items, jobs, description)
        return
    jobs = _jobs_here(jobs)
    if jobs <= 1 or len(items) == 1:
        yield from map(function, track(items, description))
        return
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(min(jobs, len(items)))
    with ProgressBar(description, len(items)) as bar:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) == 2 * jobs:
                    yield waiting.popleft().result()
                    bar.advance()
            while waiting:
                yield waiting.popleft().result()
                bar.advance()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Failure:
    """Result of an item that has failed."""

    reason: str


def isolated_map(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, description: str
) -> list[Result | Failure]:
    """Returns `function(item)` for each item, computed in a forked process of its own.

    Where the function raises an exception or its process is killed, the result is a Failure, and the others go on.
    """
    context = multiprocessing.get_context("fork")
    results: list[Result | Failure] = [Failure("was not run")] * len(items)
    waiting = deque(enumerate(items))
    running: dict[Connection, tuple[int, Any]] = {}
    with ProgressBar(description, len(items)) as bar:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    number, item = waiting.popleft()
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_run_isolated, args=(os.getpid(), function, item, sender))
                    process.start()
                    sender.close()
                    running[receiver] = number, process
                ready = wait(list(running))
                for receiver in [each for each in running if each in ready]:
                    number, process = running.pop(receiver)
                    try:
                        results[number] = receiver.recv()
                    except EOFError:
                        results[number] = Failure("its process was killed (out of memory?)")
                    process.join()
                    receiver.close()
                    bar.advance(1)
        finally:
            for _, process in running.values():
                process.kill()
                process.join()
    return results


def _run_isolated(parent: int, function: Callable[[Item], Result], item: Item, sender: Connection) -> None:
    _begin_worker(parent)
    result: Result | Failure
    try:
        result = function(item)
    except InputError as error:
        result = Failure(str(error))
    except Exception as error:
        log.exception("%s failed", item)
        result = Failure(repr(error))
    sender.send(result)


def _map_on_cluster(
    cluster: DaskJobs, function: Callable[[Item], Result], items: Sequence[Item], jobs: int, description: str,
    chunk: int, sizes: Sequence[int], unit: str,
) -> list[Result]:  # fmt: skip
    begins = range(0, len(items), chunk)
    with ProgressBar(description, sum(sizes), unit=unit) as bar:

        def count(number: int) -> None:
            bar.advance(sum(sizes[begins[number] : begins[number] + chunk]))

        return cluster.map(function, [items[b : b + chunk] for b in begins], jobs, description, count)


def _map_in_pool(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, description: str, chunk: int,
    sizes: Sequence[int], bar: ProgressBar,
) -> list[Result]:  # fmt: skip
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(jobs, context, initializer=_init_worker, initargs=(os.getpid(), function, items))
    with pool:
        try:
            futures: list[Future[list[Result]]] = []
            for first in range(0, len(items), chunk):
                numbers = range(first, min(first + chunk, len(items)))
                futures.append(pool.submit(_run_items, numbers))
                size = sum(sizes[number] for number in numbers)
                futures[-1].add_done_callback(partial(_count, bar, size))
            return [result for future in futures for result in future.result()]
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"{description}: a worker process was killed (out of memory?); try a smaller --nj"
            ) from error
        except (KeyboardInterrupt, SystemExit):  # do not wait for the items that workers have begun
            for process in multiprocessing.active_children():
                process.kill()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
