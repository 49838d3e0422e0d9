"""Hands the items of a map to workers on other hosts, in the stage's process.

A thread per worker takes an item, sends it and waits for the answer. If the worker's command ends, or is silent for too
long, the item goes to another one, and the worker is started again. A host that fails TRIES times in a row is left out
for the rest of the stage. Answers may be kept in files, so that a stage that was killed continues with the other items.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from asr_am.errors import InputError
from asr_am.jobs.hosts import POLL, WORKER_EXIT_TIMEOUT, JobOptions, Worker, WorkerLost
from asr_am.jobs.plain import NotPlain, decode, encode
from asr_am.jobs.worker import INPUT_ERROR, NOT_PLAIN, OS_ERROR, RESULTS

log = logging.getLogger(__name__)

TRIES = 3  # failures in a row after which a host is left out, and workers that one task may end
RETRY = 1.0  # seconds before the second try, twice as long before the third


@dataclass
class Map:
    """What the threads of a map share.

    Attributes:
        function: the encoded function.
        tasks: encoded lists of items.
        todo: numbers of tasks to run, None for a thread to end.
        answers: (number, answer) of a finished task, (number, WorkerLost) of one for another worker, and
            (None, WorkerLost) if a worker is left out.
        over: the map has ended.
    """

    function: bytes
    tasks: list[bytes]
    todo: SimpleQueue[int | None] = field(default_factory=SimpleQueue)
    answers: SimpleQueue[tuple[int | None, bytes | WorkerLost]] = field(default_factory=SimpleQueue)
    over: threading.Event = field(default_factory=threading.Event)


class JobPool:
    """The workers of a stage.

    Args:
        options: of group `jobs`.
        logs: folder of the workers' logs.
    """

    def __init__(self, options: JobOptions, logs: Path) -> None:
        self._options, self._logs = options, logs
        self._workers: list[Worker] = []
        self._left_out: set[str] = set()
        self._lock = threading.Lock()

    def map(
        self, function: Callable[[Any], Any], tasks: Sequence[Sequence[Any]], jobs: int, description: str,
        keep: Path | None, count: Callable[[int], None],
    ) -> list[Any]:  # fmt: skip
        """Computes the results of all items of all tasks on the hosts.

        Args:
            function: called for each item.
            tasks: lists of items. A worker takes one list at a time.
            jobs: number of workers.
            description: of the work, for messages.
            keep: folder for answers. A task whose answer is there is not run again.
            count: called with the number of each task that is finished.

        Returns:
            The results in the order of the items.

        Raises:
            NotPlain: the function, an item or a result has no encoding.
            InputError: no host works, or a task ends the workers that take it.
            Exception: the first error of an item.
        """
        work = Map(encode(function), [encode(list(task)) for task in tasks])
        digest = hashlib.sha256(work.function).digest()
        files = [keep and keep / hashlib.sha256(digest + task).hexdigest() for task in work.tasks]
        found = {number: results for number, file in enumerate(files) if (results := _read_kept(file)) is not None}
        if found:
            log.info("%s: %d of %d jobs were finished by an earlier run", description, len(found), len(tasks))
        for number in found:
            count(number)
        missing = [number for number in range(len(tasks)) if number not in found]
        with contextlib.closing(self._answers(work, missing, jobs, description)) as answers:
            for number, answer in answers:
                found[number] = _results(answer, description)
                _write_kept(files[number], answer)
                count(number)
        return [result for number in range(len(tasks)) for result in found[number]]

    def close(self) -> None:
        """Ends all workers."""
        deadline = time.monotonic() + WORKER_EXIT_TIMEOUT
        for worker in self._workers:
            worker.disconnect()
        for worker in self._workers:
            worker.close(deadline)

    def _answers(
        self, work: Map, missing: Sequence[int], jobs: int, description: str
    ) -> Generator[tuple[int, bytes], None, None]:
        """Yields (number, answer) of the tasks `missing`, as they come."""
        for task in missing:
            work.todo.put(task)
        workers = self._find_workers(min(jobs, len(missing)))
        threads = [threading.Thread(target=self._run_tasks, args=(worker, work)) for worker in workers]
        left, working, losses = len(missing), len(threads), [0] * len(work.tasks)
        try:
            for thread in threads:
                thread.start()
            while left:
                if not working:
                    raise self._no_host()
                for worker in workers:
                    worker.check()
                try:
                    number, answer = work.answers.get(timeout=POLL)
                except Empty:
                    continue
                if number is None:
                    working -= 1
                elif isinstance(answer, bytes):
                    left -= 1
                    yield number, answer
                else:
                    losses[number] += 1
                    if losses[number] == TRIES:
                        raise self._ends_workers(description, answer)
                    work.todo.put(number)
        finally:
            work.over.set()
            for _ in threads:
                work.todo.put(None)
            for worker, thread in zip(workers, threads, strict=True):
                while thread.is_alive():
                    worker.end("is no longer needed")
                    thread.join(POLL)

    def _find_workers(self, number: int) -> list[Worker]:
        """Returns up to `number` workers, on all hosts that are not left out."""
        self._workers += [self._options.worker(index, self._logs) for index in range(len(self._workers), number)]
        return [worker for worker in self._workers[:number] if worker.host not in self._left_out]

    def _run_tasks(self, worker: Worker, work: Map) -> None:
        """Runs tasks with one worker until the map is over or the worker is left out. The body of a thread."""
        while not work.over.is_set():
            number = None
            try:
                if not worker.ready():
                    continue
                if (number := work.todo.get()) is None:
                    return
                answer = worker.run(work.function, work.tasks[number])
                worker.failures = 0
                work.answers.put((number, answer))
            except Exception as error:
                worker.close()
                if work.over.is_set():
                    return
                lost = error if isinstance(error, WorkerLost) else WorkerLost(f"cannot be used ({error!r})")
                if number is not None:
                    work.answers.put((number, lost))
                if self._leaves_out(worker, lost):
                    work.answers.put((None, lost))
                    return
                work.over.wait(RETRY * worker.failures)

    def _leaves_out(self, worker: Worker, lost: WorkerLost) -> bool:
        """Counts a failure. Returns True if the worker's host is left out from now on."""
        worker.failures += 1
        with self._lock:
            if worker.host in self._left_out:
                return True
            if worker.failures < TRIES:
                log.info("a worker on %s %s, and is started again; see %s", worker.host, lost, worker.log_file)
                return False
            self._left_out.add(worker.host)
        log.warning(
            "%s is left out: its worker %s, %d times in a row; see %s", worker.host, lost, TRIES, worker.log_file
        )
        return True

    def _no_host(self) -> InputError:
        return InputError(
            f"jobs={self._options.name}: no host is left, each has failed {TRIES} times in a row "
            f"({', '.join(sorted(self._left_out))}); see their logs in {self._logs}, or go on with jobs=local"
        )

    def _ends_workers(self, description: str, lost: WorkerLost) -> InputError:
        return InputError(
            f"{description}: one job has ended {TRIES} workers, the last of which {lost}; see their logs in "
            f"{self._logs}, and give jobs more memory (jobs.arguments, or a smaller --nj)"
        )


def _results(answer: bytes, description: str) -> list[Any]:
    """Returns the results of a task. Raises its error, as far as possible as it was raised."""
    kind, *parts = decode(answer)
    if kind == RESULTS:
        return parts[0]
    if kind == INPUT_ERROR:
        raise InputError(*parts)
    if kind == NOT_PLAIN:
        raise NotPlain(*parts)
    if kind == OS_ERROR:
        raise OSError(*parts)
    raise RuntimeError(f"{description}: {parts[0]}")


def _read_kept(file: Path | None) -> list[Any] | None:
    """Returns the results in a file. None without an intact file."""
    with contextlib.suppress(Exception):  # after a power cut anything may be wrong with it
        return _results(file.read_bytes(), "") if file else None
    return None


def _write_kept(file: Path | None, answer: bytes) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_bytes(answer)
        temporary.replace(file)
