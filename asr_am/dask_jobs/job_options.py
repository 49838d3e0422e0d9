"""The options of jobs. They are checked before a stage begins, without importing Dask."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from asr_am.dask_jobs.keys import KEYS_COMMAND, check_keys
from asr_am.errors import InputError

QUEUES = {"slurm": "SLURMCluster", "sge": "SGECluster", "pbs": "PBSCluster", "lsf": "LSFCluster"}  # of dask_jobqueue
MODULES = {"local": (), "dask": ("distributed",), "ssh": ("distributed", "asyncssh")}


@dataclass(frozen=True)
class JobOptions:
    """The options of group `jobs`. They are explained in its files."""

    name: str
    scheduler: str | None = None
    keys: str | None = None
    hosts: Sequence[str] = ()
    memory: str = "4GB"
    walltime: str | None = None
    directives: Sequence[str] = ()
    interface: str | None = None
    dashboard: str = "127.0.0.1:0"
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Raises InputError if an option does not fit the others, or the software is not installed."""
        if self.name not in (*MODULES, *QUEUES):
            raise InputError(f"jobs.name={self.name}: must be one of {', '.join((*MODULES, *QUEUES))}")
        if self.timeout is not None and not self.timeout > 0:
            raise InputError(f"jobs.timeout={self.timeout}: must be above 0")
        if not re.fullmatch(r"[\w.-]*:\d+", self.dashboard):
            raise InputError(f"jobs.dashboard={self.dashboard}: must be host:port, such as 127.0.0.1:8787")
        if self.name == "ssh" and not self.hosts:
            raise InputError("jobs=ssh: needs hosts; give e.g. jobs.hosts=[node1,node2]")
        for host in self.hosts:
            if "@" in host:
                raise InputError(f"jobs.hosts: {host}: name the host only, and its user in ~/.ssh/config")
        if self.scheduler is not None:
            self._check_scheduler(self.scheduler)
        if self.keys is not None:
            check_keys(Path(self.keys))
        for module in MODULES.get(self.name, ("distributed", "dask_jobqueue")):
            if find_spec(module) is None:
                raise InputError(
                    f"jobs={self.name}: needs the package {module}; pip install -e '.[cluster]', or use jobs=local"
                )

    def _check_scheduler(self, address: str) -> None:
        if address.startswith("tcp:"):
            raise InputError(
                f"jobs.scheduler={address}: whoever reaches a scheduler without TLS can run anything; make a key "
                f"({KEYS_COMMAND}) and use tls://"
            )
        if not re.fullmatch(r"tls://[^/]+:\d+", address):
            raise InputError(f"jobs.scheduler={address}: must be an address such as tls://host:8786")
