"""Maps a function over items with a progress bar, in this process or in a pool of processes.

Workers are processes, because kaldifst and kaldi_decoder hold the GIL. Each uses one arithmetic thread: two threads on
contended cores are many times slower than one.
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
    """Yields from `iterable` with a progress bar on stderr, if stderr is a terminal."""
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


_work: tuple[Callable[[Any], Any], Sequence[Any]]  # function and items, set in worker processes


def _init_worker(parent: int, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """Initialises a worker: one thread, and death with the parent, as an orphan would hold inherited file locks.

    Ctrl-C reaches all processes. The parent handles it and kills the workers, which print nothing.
    """
    global _work
    _work = function, items
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's handler
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _run_item(number: int) -> Any:
    function, items = _work
    return function(items[number])


def parallel_map(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, description: str, chunk: int = 1
) -> list[Result]:
    """Computes `[function(item) for item in items]` in forked processes.

    Args:
        function: Called for each item. Forked workers inherit it without pickling.
        items: Inherited likewise, so they may be large.
        jobs: Number of processes. Up to 1 runs in this process.
        description: Label of the progress bar.
        chunk: Number of items that a worker takes at a time.

    Returns:
        The results in the order of items. They are pickled, so large ones belong in files.

    Raises:
        RuntimeError: A worker was killed from outside.
        Exception: The first exception that an item raised.
    """
    if jobs <= 1 or len(items) <= 1:
        return [function(item) for item in track(items, description)]
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        min(jobs, len(items)), context, initializer=_init_worker, initargs=(os.getpid(), function, items)
    )
    with pool:
        try:
            return list(track(pool.map(_run_item, range(len(items)), chunksize=chunk), description, total=len(items)))
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
