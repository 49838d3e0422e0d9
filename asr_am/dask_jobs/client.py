"""Runs the items of maps as tasks of a Dask cluster, in the stage's process.

Dask gives the tasks of a lost worker to another one. If the scheduler is lost, the stage ends: what items have written
stays, and the same command continues with it.
"""

from __future__ import annotations

import glob
import logging
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from asr_am import disk
from asr_am.dask_jobs.dask_worker import SOFTWARE, StageProcess, run_items
from asr_am.dask_jobs.encoding import encode
from asr_am.dask_jobs.job_options import JobOptions
from asr_am.dask_jobs.keys import KEYS_COMMAND, make_keys, read_keys
from asr_am.dask_jobs.start import CONNECT, log_to_file, start_cluster
from asr_am.errors import InputError

if TYPE_CHECKING:
    from distributed import Client, Future
    from distributed.deploy import Cluster
    from distributed.security import Security

log = logging.getLogger(__name__)

POLL = 1.0  # seconds between looks at a cluster that gives no result


def make_connection_dir(logs: Path) -> Path:
    """Makes a private folder for a connection, and removes those of processes of this host that were killed."""
    mine = f"connection.{socket.gethostname()}."
    for path in logs.glob(f"{glob.escape(mine)}*"):
        process = path.name.removeprefix(mine).partition(".")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            disk.remove(path)
    return Path(tempfile.mkdtemp(prefix=f"{mine}{os.getpid()}.", dir=logs))


def check_software(client: Client) -> None:
    """Raises InputError if the scheduler or a worker cannot import asr_am. It could not read any task."""
    found = {"scheduler": client.run_on_scheduler(find_spec, "asr_am")}
    on_workers = client.run(find_spec, "asr_am", on_error="ignore")  # without those that are lost meanwhile
    found |= {f"worker {address}": spec for address, spec in on_workers.items()}
    for end, spec in found.items():
        if spec is None:
            raise InputError(f"the Dask {end} has no asr_am; start it again with the same software, or use jobs=local")


class DaskJobs:
    """The connection of a stage to a Dask cluster. The first map starts or finds the cluster.

    The workers must see `logs`, the folder of logs.
    """

    def __init__(self, options: JobOptions, logs: Path) -> None:
        self._options, self._logs = options, logs.absolute()
        self._client: Client | None = None
        self._cluster: Cluster | None = None
        self._shared: Path | None = None  # folder of this connection
        self._seen, self._waits = 0.0, False  # when there was a worker, and that the user knows of there being none

    def map(
        self, function: Callable[[Any], Any], tasks: Sequence[Sequence[Any]], jobs: int, description: str,
        count: Callable[[int], None],
    ) -> list[Any]:  # fmt: skip
        """Returns the results of all items of all tasks in their order, computed on the cluster.

        Args:
            tasks: lists of items. A worker takes one list at a time.
            count: called with the number of each task that is finished.

        Raises:
            NotSent: function or items cannot be sent.
            InputError: there is no cluster, it is lost, or a task ends the workers that take it.
            Exception: the first error of an item.
        """
        sent, lists = encode(function), [encode(list(task)) for task in tasks]
        client = self._client or self._connect(jobs)
        if client.status != "running":
            raise self._lost()
        name = uuid4().hex
        label = "_".join(description.split())
        shared = client.submit(bytes, sent, key=f"function-{name}")  # a task: it outlives the worker that holds it
        futures = client.map(
            run_items, lists, key=[f"{label}-{name}-{number}" for number in range(len(lists))], map_name=name,
            function=shared, stage=self._stage(),
        )  # fmt: skip
        try:
            results = self._results(client, futures, description, count)
        except BaseException:
            with suppress(Exception):
                client.cancel(futures, force=True)
            raise
        return [result for number in range(len(lists)) for result in results[number]]

    def close(self) -> None:
        """Ends the connection, and the cluster that it has started."""
        for part in (self._client, self._cluster):
            if part is not None:
                with suppress(Exception):
                    part.close(timeout=10)
        if self._shared is not None:
            disk.remove(self._shared)
        self._client = self._cluster = self._shared = None

    def _results(
        self, client: Client, futures: Sequence[Future], description: str, count: Callable[[int], None]
    ) -> dict[int, list[Any]]:
        done: SimpleQueue[int] = SimpleQueue()
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: done.put(number))
        results: dict[int, list[Any]] = {}
        self._seen = time.monotonic()
        while len(results) < len(futures):
            try:
                number = done.get(timeout=POLL)
            except Empty:
                self._check(client)
                continue
            results[number] = pickle.loads(self._result(futures[number], description))
            futures[number].release()
            count(number)
        return results

    def _result(self, future: Future, description: str) -> bytes:
        from distributed import CancelledError, KilledWorker

        try:
            return bytes(future.result())
        except CancelledError:
            raise self._lost() from None
        except KilledWorker as error:
            raise InputError(
                f"{description}: one job has ended {error.allowed_failures + 1} workers, the last one at "
                f"{error.last_worker.address} (out of memory?); see their logs in {self._logs}, and give jobs more "
                "memory (jobs.memory, or a smaller --nj)"
            ) from None

    def _check(self, client: Client) -> None:
        """Raises InputError if the scheduler is lost, or all workers for too long."""
        if client.status != "running":
            raise self._lost()
        with suppress(Exception):  # the scheduler may be lost meanwhile
            if client.nthreads():
                self._seen, self._waits = time.monotonic(), False
                return
        limit = self._options.timeout
        if limit is not None and time.monotonic() - self._seen > limit:
            raise InputError(
                f"jobs={self._options.name}: there was no worker for {limit:g} s; see the logs in {self._logs}, or use "
                "jobs=local"
            )
        if not self._waits:
            why = "; a worker that cannot import asr_am ends at its first task" if self._options.scheduler else ""
            log.info("jobs=%s: waiting for workers%s", self._options.name, why)
        self._waits = True

    def _connect(self, jobs: int) -> Client:
        """Connects to the cluster, after it was started if need be."""
        import dask
        from distributed import Client

        self._logs.mkdir(parents=True, exist_ok=True)
        self._shared = make_connection_dir(self._logs)
        log_to_file(self._logs / "dask.log")
        dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GB"})
        address, options = self._options.scheduler, self._options
        try:
            security = self._security()
            if address is None:
                self._cluster = start_cluster(options, jobs, security, self._logs)
            self._client = Client(address or self._cluster, security=security, timeout=CONNECT, set_as_default=False)
            check_software(self._client)
        except InputError:
            raise
        except Exception as error:
            where = f"jobs={options.name}: no cluster" if address is None else f"jobs.scheduler={address}: no answer"
            reason = str(error) or repr(error)
            raise InputError(f"{where} ({reason}); see {self._logs / 'dask.log'}, or use jobs=local") from error
        log.info("jobs=%s: scheduler %s, dashboard %s", options.name, self._client.scheduler.address, self._dashboard())
        return self._client

    def _dashboard(self) -> str:
        """Returns the address of the dashboard. That of Dask has the scheduler's host, also if ours is another."""
        assert self._client is not None
        link, (host, _, _) = self._client.dashboard_link, self._options.dashboard.partition(":")
        if self._options.scheduler is not None or host in ("", "0.0.0.0"):
            return link
        link = urlsplit(link)._replace(netloc=f"{host}:{urlsplit(link).port}").geturl()
        return f"{link} on {self._options.hosts[0]}" if self._options.name == "ssh" else link

    def _security(self) -> Security:
        """Returns the TLS settings: the user's for their scheduler, new ones for a cluster of this stage."""
        from distributed.security import Security

        if self._options.keys is not None:
            return read_keys(Path(self._options.keys))
        if self._options.scheduler is None:
            assert self._shared is not None
            make_keys(self._shared)
            return read_keys(self._shared)
        configured = Security()  # by the user's files of Dask
        if configured.tls_ca_file is None:
            raise InputError(f"jobs.scheduler={self._options.scheduler}: needs jobs.keys=FOLDER; see {KEYS_COMMAND}")
        return configured

    def _stage(self) -> StageProcess:
        assert self._shared is not None
        return StageProcess(os.getcwd(), [os.path.abspath(path) for path in sys.path], SOFTWARE, self._shared)

    def _lost(self) -> InputError:
        return InputError(
            f"jobs={self._options.name}: the scheduler is lost, which has ended or cannot be reached any more; see "
            f"{self._logs}. The same command continues"
        )
