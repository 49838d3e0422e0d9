"""A Dask cluster of this host with a TLS key, and what its workers run in tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asr_am.dask_jobs.client import DaskJobs
from asr_am.dask_jobs.job_options import JobOptions
from asr_am.dask_jobs.keys import make_keys, read_keys
from tests.support.named_pipes import wait_for

distributed = pytest.importorskip("distributed", reason="the optional extra cluster is not installed")


class RunningCluster:
    """A scheduler and two workers, as a user's.

    Attributes:
        options: of group `jobs`, to use it.
        overrides: the same on a command line.
    """

    def __init__(self, cluster: distributed.LocalCluster, keys: Path) -> None:
        self._cluster = cluster
        self.options = JobOptions("dask", scheduler=cluster.scheduler_address, keys=str(keys))
        self.overrides = ("jobs=dask", f"jobs.scheduler={cluster.scheduler_address}", f"jobs.keys={keys}")

    def jobs(self, logs: Path) -> DaskJobs:
        return DaskJobs(self.options, logs)

    def workers(self) -> list[int]:
        """Returns the processes of the workers."""
        return [nanny.pid for nanny in self._cluster.workers.values() if nanny.pid is not None]

    def kill_worker(self) -> None:
        """Kills a worker, and waits until its files are closed."""
        worker = self.workers()[0]
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: worker not in self.workers())


@contextmanager
def running_cluster(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[RunningCluster]:
    """Starts a cluster whose jobs may end two workers, and writes its key to `folder`."""
    import dask

    root = Path(__file__).parents[2]
    patch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
    make_keys(folder / "keys")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=0, host="127.0.0.1", protocol="tls://",
            security=read_keys(folder / "keys"), dashboard_address=None, silence_logs=False,
        ) as cluster,
    ):  # fmt: skip
        yield RunningCluster(cluster, folder / "keys")


def end_worker(_: int) -> None:
    """Ends the process that runs it."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(path: Path) -> None:
    raise FileNotFoundError(2, "No such file", str(path))
