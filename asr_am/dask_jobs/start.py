"""Starts Dask clusters: on this host, by ssh, or as jobs of a queue. Their connections have a TLS key of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asr_am.dask_jobs.job_options import QUEUES, JobOptions
from asr_am.errors import InputError, one_line

if TYPE_CHECKING:
    from distributed.deploy import Cluster
    from distributed.security import Security

CONNECT = 30.0  # seconds in which a host or a scheduler must answer
WORKER_OPTIONS = {"nthreads": 1, "memory_limit": 0, "dashboard": False}


def start_cluster(options: JobOptions, workers: int, security: Security, logs: Path) -> Cluster:
    """Starts a scheduler and workers of one thread each. A lost worker is started again.

    All hosts must be able to read the files that `security` names.

    Raises:
        InputError: a host cannot be reached.
        Exception: Dask's, if they cannot be started.
    """
    if options.name == "ssh":
        return _by_ssh(options, workers, security)
    if options.name in QUEUES:
        return _by_queue(options, workers, security, logs)
    return _on_this_host(options, workers, security, logs)


def _on_this_host(options: JobOptions, workers: int, security: Security, logs: Path) -> Cluster:
    import dask
    from distributed import LocalCluster

    # workers would write to the terminal
    dask.config.set({"distributed.nanny.pre-spawn-environ.DASK_LOGGING": repr(file_logging(logs / "workers.log"))})
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, memory_limit=0, host="127.0.0.1", protocol="tls://",
        security=security, dashboard_address=options.dashboard, silence_logs=False,
    )  # fmt: skip


def _by_ssh(options: JobOptions, workers: int, security: Security) -> Cluster:
    """Starts the scheduler on the first host, and workers on all in turn."""
    import dask
    from distributed import SSHCluster

    asyncio.run(_check_hosts(options.hosts))
    files = {"ca-file": security.tls_ca_file}
    for end in ("client", "scheduler", "worker"):
        config = security.get_tls_config_for_role(end)
        files |= {f"{end}.{kind}": config[kind] for kind in ("cert", "key")}
    # Dask sends its configuration to the hosts. Set one by one: the section has other options, which must stay
    dask.config.set({f"distributed.comm.tls.{name}": file for name, file in files.items()})
    dask.config.set({"distributed.comm.require-encryption": True})
    hosts = [options.hosts[number % len(options.hosts)] for number in range(workers)]
    variables = [f"{name}={value}" for name, value in environment().items()]
    child = [sys.executable, "-m", "asr_am.dask_jobs.ssh_child", sys.executable]
    return SSHCluster(
        [options.hosts[0], *hosts], security=security, remote_python=shlex.join(["env", *variables, *child]),
        worker_options=WORKER_OPTIONS | {"protocol": "tls://", "interface": options.interface},
        scheduler_options={
            "protocol": "tls://", "port": 0, "dashboard_address": options.dashboard, "interface": options.interface,
        },
    )  # fmt: skip


async def _check_hosts(hosts: Sequence[str]) -> None:
    """Connects to each host once. Raises InputError that names one, which Dask's errors do not."""
    import asyncssh

    async def check(host: str) -> None:
        try:
            async with asyncssh.connect(host, login_timeout=CONNECT):
                pass
        except (OSError, asyncssh.Error) as error:
            reason = one_line(str(error)) or type(error).__name__
            raise InputError(
                f"jobs.hosts: {host}: {reason}; `ssh {host} true` must work without a password (ports and users are in "
                "~/.ssh/config)"
            ) from error

    await asyncio.gather(*map(check, dict.fromkeys(hosts)))


def _by_queue(options: JobOptions, workers: int, security: Security, logs: Path) -> Cluster:
    import dask_jobqueue

    cluster = getattr(dask_jobqueue, QUEUES[options.name])(
        cores=1, processes=1, memory=options.memory, walltime=options.walltime, interface=options.interface,
        job_extra_directives=list(options.directives), job_name="asr_am", log_directory=str(logs.absolute()),
        job_script_prologue=[f"export {name}={shlex.quote(value)}" for name, value in environment().items()],
        worker_extra_args=["--no-dashboard"], protocol="tls://", security=security, silence_logs=False,
        scheduler_options={
            "protocol": "tls://", "security": security, "dashboard_address": options.dashboard,
            "interface": options.interface,
        },
    )  # fmt: skip
    try:
        cluster.sync(_submit, cluster, workers)
    except BaseException:
        with suppress(Exception):  # of jobs that have no number
            cluster.close()
        raise
    cluster.adapt(minimum=workers, maximum=workers)  # submits a job again that was cancelled or has run out of time
    return cluster


async def _submit(cluster: Any, workers: int) -> None:
    """Submits jobs. Raises what the queue says against them, which `scale` alone would only log."""
    cluster.scale(workers)
    await cluster._correct_state()


def environment() -> dict[str, str]:
    """Returns the variables of a worker: the same modules as here, one arithmetic thread."""
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "OMP_NUM_THREADS": "1"}


def file_logging(path: Path) -> dict[str, Any]:
    """Returns a configuration of `logging` with a file for everything."""
    handler = {"class": "logging.FileHandler", "filename": str(path.absolute()), "formatter": "plain"}
    return {
        "version": 1, "disable_existing_loggers": False, "handlers": {"file": handler},
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "root": {"handlers": ["file"], "level": "INFO"},
    }  # fmt: skip


def log_to_file(path: Path) -> None:
    """Has Dask write its messages in this process to a file only."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = "distributed", "dask_jobqueue", "tornado", "asyncssh"
    for name in (*ours, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in ours:
            logger = logging.getLogger(name)
            logger.handlers = [handler] if name in ours else []
            logger.propagate = name not in ours
