"""Work over many items with a progress bar, in this process or over a pool of processes.

Processes and not threads, because kaldifst and kaldi_decoder hold the GIL. One arithmetic thread per worker: two
threads on contended cores are many times slower than one.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")
Result = TypeVar("Result")
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def track(iterable: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yield from `iterable` under a progress bar on stderr (silent where stderr is not a terminal)."""
    if total is None and isinstance(iterable, Sequence):
        total = len(iterable)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        yield from progress.track(iterable, description=description, total=total)


_work: tuple[Callable[[Any], Any], Sequence[Any]]  # of a worker process


def _begin_worker(parent: int, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """One thread, and no life after the parent's: a worker would keep the lock that it inherited."""
    global _work
    _work = function, items
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _do(number: int) -> Any:
    function, items = _work
    return function(items[number])


def parallel_map(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, description: str, chunk: int = 1
) -> list[Result]:
    """`[function(item) for item in items]` over `jobs` forked processes, in order.

    Workers inherit `function` and `items` when they are forked, so neither is copied, however large it is; what is
    returned is pickled back, so large results belong in files. The first exception raised by an item is raised here; a
    worker killed from outside is a RuntimeError that says so.
    """
    if jobs <= 1 or len(items) <= 1:
        return [function(item) for item in track(items, description)]
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        min(jobs, len(items)), context, initializer=_begin_worker, initargs=(os.getpid(), function, items)
    )
    with pool:
        try:
            return list(track(pool.map(_do, range(len(items)), chunksize=chunk), description, total=len(items)))
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"{description}: a worker process was killed (out of memory?); try a smaller --nj"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
