"""Worker processes: their environment variables, how a launcher starts and ends them, and how they end themselves."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from asr_am.distributed.launch_spec import ExitStatus, LaunchSpec
from asr_am.distributed.runtime.fork_server import ForkedProcess, ForkServer
from asr_am.distributed.runtime.security import check_key, is_loopback
from asr_am.errors import InputError
from asr_am.signals import signal_on_parent_death, signals_later


@dataclass(frozen=True)
class WorkerEnv:
    """Environment of one learner, set by `worker_environment`, torchrun or Slurm.

    Attributes:
        local_rank: rank on this host.
        local_size: number of learners on each host.
        incarnation: number of restarts of this learner.
        run: identity of the run, 32 hexadecimal digits. None if the learners must agree on one.
        supervisor: address of the supervisor, tcp://host:port or ipc://path. None for synchronous teams.
        master: host and port of torch's store. None for asynchronous teams and those with a private directory.
        private_dir: directory for the sockets and the store of a team on one host. None if there is none yet.
        one_host: the whole team is on this host.
        agent_store: torchrun serves the store.
        restarts: number of times that torchrun has restarted the team.
        launcher: process id of the launcher.
        key: secret for encryption.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    incarnation: int
    run: str | None
    supervisor: str | None
    master: tuple[str, int] | None
    private_dir: Path | None
    one_host: bool
    agent_store: bool
    restarts: int
    launcher: int | None
    key: str | None

    @property
    def hosts(self) -> tuple[int, ...]:
        """Index of the host of each rank. Launchers fill one host after the other."""
        return tuple(rank // self.local_size for rank in range(self.size))

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Ranks of the other learners of this host."""
        hosts = self.hosts
        return tuple(rank for rank in range(self.size) if rank != self.rank and hosts[rank] == hosts[self.rank])

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> WorkerEnv:
        """Reads the environment. Raises InputError naming the variable that is missing or wrong."""
        if "RANK" not in variables:
            raise InputError(
                "RANK is not in the environment: start learners with launcher=process, asr_am.api.launch, torchrun or "
                "Slurm"
            )
        size = _read_int(variables, "WORLD_SIZE", low=1)
        rank = _read_int(variables, "RANK")
        if rank >= size:
            raise InputError(f"RANK={rank}: with WORLD_SIZE={size}, ranks are 0 to {size - 1}")
        supervisor, private_dir = variables.get("ASR_AM_SUPERVISOR"), variables.get("ASR_AM_PRIVATE_DIR")
        run, master = variables.get("ASR_AM_RUN"), None
        if (run is not None or supervisor is not None) and not re.fullmatch("[0-9a-f]{32}", run or ""):
            raise InputError(f"ASR_AM_RUN={run!r} in the environment: must be 32 hexadecimal digits")
        if supervisor is None and private_dir is None:
            if not variables.get("MASTER_ADDR"):
                raise InputError("MASTER_ADDR is not in the environment: set it to the host of learner 0")
            master = variables["MASTER_ADDR"], _read_int(variables, "MASTER_PORT", low=1, high=65535)
        one_host = variables.get("LOCAL_WORLD_SIZE") == str(size) or (master is not None and is_loopback(master[0]))
        if one_host and master is not None and variables.get("LOCAL_WORLD_SIZE", str(size)) != str(size):
            _check_master(master[0])
        return cls(
            rank=rank,
            size=size,
            local_rank=_read_int(variables, "LOCAL_RANK", default="0"),
            local_size=_read_int(variables, "LOCAL_WORLD_SIZE", default=str(size), low=1),
            incarnation=_read_int(variables, "ASR_AM_INCARNATION", default="0"),
            run=run,
            supervisor=supervisor,
            master=master,
            private_dir=Path(private_dir) if private_dir else None,
            one_host=one_host or private_dir is not None,
            agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=_read_int(variables, "TORCHELASTIC_RESTART_COUNT", default="0"),
            launcher=_read_int(variables, "ASR_AM_LAUNCHER") if "ASR_AM_LAUNCHER" in variables else None,
            key=check_key(variables["ASR_AM_KEY"], "ASR_AM_KEY") if "ASR_AM_KEY" in variables else None,
        )


def _check_master(host: str) -> None:
    """Raises InputError for a name that is a loopback address, as Debian gives it to a host: others cannot reach it."""
    if host != "localhost" and not host.startswith("127."):
        raise InputError(
            f"MASTER_ADDR={host}: on this host that is a loopback address, which other hosts cannot reach; give the IP "
            "address"
        )


def _read_int(variables: Mapping[str, str], name: str, *, default: str = "", low: int = 0, high: int = 1 << 31) -> int:
    text = variables.get(name, default)
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InputError(f"{name}={text!r} in the environment: must be a whole number, {low} to {high}")
    return int(text)


def set_parent_death_signal(launcher: int) -> None:
    """Has this process killed with its parent, if that is the launcher (Linux). Raises InputError if it has ended."""
    if os.getppid() == launcher:
        signal_on_parent_death(signal.SIGKILL)
    if not _is_ancestor(launcher):  # after the call: the launcher may end at any moment
        raise InputError("the launcher of this learner has ended: start the run again")


def _is_ancestor(process: int) -> bool:
    """Returns whether a process is this one's parent, or a parent of its parent, such as that of a shell."""
    parent = os.getppid()
    while parent not in (0, process):
        try:
            parent = int(Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:  # it has ended, and this process was given another parent
            return os.getppid() == process
    return parent == process


LOCALHOST = "127.0.0.1"
NON_EPHEMERAL_PORTS = range(20000, 32000)  # Linux gives connections ports from 32768 on


@dataclass(frozen=True)
class RendezvousInfo:
    """Addresses of a run, see `WorkerEnv`."""

    supervisor: str | None = None
    master: tuple[str, int] | None = None


def worker_environment(
    spec: LaunchSpec, rendezvous: RendezvousInfo, rank: int, incarnation: int, run: str
) -> dict[str, str]:
    """Returns the environment of one learner: the variables of torchrun, and those of `WorkerEnv`."""
    environment = {key: value for key, value in os.environ.items() if key not in STALE_ENV}
    environment.setdefault("OMP_NUM_THREADS", "1")  # several threads on contended cores are far slower than one
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # silences torch's warnings until the store is up
    environment |= spec.environment
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.size),
        "LOCAL_RANK": str(rank - spec.ranks.start),
        "LOCAL_WORLD_SIZE": str(spec.learners),
        "ASR_AM_RUN": run,
        "ASR_AM_INCARNATION": str(incarnation),
        "ASR_AM_LAUNCHER": str(os.getpid()),
    }
    if spec.key is not None:
        environment["ASR_AM_KEY"] = spec.key
    if spec.private_dir is not None:
        environment["ASR_AM_PRIVATE_DIR"] = str(spec.private_dir)
    if rendezvous.supervisor is not None:
        environment["ASR_AM_SUPERVISOR"] = rendezvous.supervisor
    if rendezvous.master is not None:
        environment |= {"MASTER_ADDR": rendezvous.master[0], "MASTER_PORT": str(rendezvous.master[1])}
    return environment


STALE_ENV = (
    "ASR_AM_SUPERVISOR", "ASR_AM_KEY", "ASR_AM_PRIVATE_DIR", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


def free_port(host: str) -> int:
    """Returns a free TCP port outside of the system's ephemeral range."""
    for port in random.SystemRandom().sample(NON_EPHEMERAL_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise InputError(f"{host}: no free port: check that it is an address of this host")


TERMINATE_GRACE = 10.0  # seconds between SIGTERM and SIGKILL: survivors save what they have done


class WorkerProcesses:
    """Worker processes on this host.

    Args:
        fork_server: forks them. None: each is started as a program.
    """

    def __init__(self, spec: LaunchSpec, rendezvous: RendezvousInfo, fork_server: ForkServer | None = None) -> None:
        self._spec, self._rendezvous = spec, rendezvous
        self._running: dict[int, tuple[int, subprocess.Popen[bytes] | ForkedProcess]] = {}
        self._fork_server = fork_server

    def start(self, rank: int, incarnation: int, run: str) -> None:
        """Starts a learner in a session of its own, so that Ctrl-C reaches the launcher only."""
        environment = worker_environment(self._spec, self._rendezvous, rank, incarnation, run)
        try:
            with signals_later():
                self._running[rank] = incarnation, self._start(environment)
        except OSError as error:
            raise InputError(f"{self._spec.command[0]}: cannot be started ({error}): check the command") from error

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | ForkedProcess:
        if self._fork_server is not None:
            return self._fork_server.fork(environment)
        return subprocess.Popen(
            list(self._spec.command), env=environment, start_new_session=True, pass_fds=self._spec.inherited_files
        )

    def ended(self) -> list[ExitStatus]:
        """Returns the processes that ended since the last call, killed ones first: others end because of them."""
        if self._fork_server is not None:
            self._fork_server.receive(0.0)  # also without a learner: what it reports would end each wait
        found = [
            ExitStatus(rank, incarnation, status)
            for rank, (incarnation, process) in self._running.items()
            if (status := process.poll()) is not None
        ]
        for child in found:
            _signal(self._running.pop(child.rank)[1], signal.SIGKILL)  # the rest of its process group
        return sorted(found, key=lambda child: (child.status >= 0, child.rank))

    def kill(self, rank: int) -> None:
        """Kills a learner, even one that is stopped. `ended` reports it."""
        if rank in self._running:
            _signal(self._running[rank][1], signal.SIGKILL)

    def preempt(self) -> None:
        """Asks all learners to save a checkpoint and to end."""
        for _, process in self._running.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)

    def end(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Ends all workers that run, and the processes that they have started. `meanwhile`: see `supervisor.Workers`.

        SIGTERM is for the learner alone: it needs its own processes, such as those of a DataLoader, until it has saved.
        """
        processes = [process for _, process in self._running.values()]
        self._running.clear()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
                os.kill(process.pid, signal.SIGCONT)  # a process that is stopped gets SIGTERM then
        deadline = time.monotonic() + TERMINATE_GRACE
        for process in processes:
            while process.poll() is None and (left := deadline - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(left, 1.0))
                meanwhile()
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes] | ForkedProcess, number: int) -> None:
    """Signals the whole process group, which may outlive its leader."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            if process.returncode is None:
                os.kill(process.pid, number)  # it has just been forked, and leads no group yet


def end_process(status: int = 0) -> NoReturn:
    """Ends this process at once. Call it after the team is closed.

    Threads of torch.distributed may still run while the interpreter shuts down, and then abort the process ("terminate
    called without an active exception"), so that a learner that has finished would count as dead.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM unwind the stack, so that the processes started by this one are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
