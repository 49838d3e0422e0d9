"""Worker processes: their environment variables, how a launcher starts and ends them, and how they end themselves."""

from __future__ import annotations

import ctypes
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.runtime.security import check_key, is_loopback, split_address
from asr_am.errors import InputError

PR_SET_PDEATHSIG = 1
EXIT_USER_ERROR = 1  # exit status of a learner that has reported an InputError
EXIT_FAILURE = 70  # of any other failure: fault-tolerant strategies go on without the learner, and it is restarted


@dataclass(frozen=True)
class WorkerEnv:
    """Environment of one learner, set by `worker_environment`, torchrun or Slurm.

    Attributes:
        rank: rank in the team.
        size: number of learners.
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

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> WorkerEnv:
        """Reads the environment. Raises InputError naming the variable that is missing or wrong."""
        if "RANK" not in variables:
            raise InputError("RANK is not in the environment: start learners with launcher=process, torchrun or Slurm")
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


def _read_int(variables: Mapping[str, str], name: str, *, default: str = "", low: int = 0, high: int = 1 << 31) -> int:
    text = variables.get(name, default)
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InputError(f"{name}={text!r} in the environment: must be a whole number, {low} to {high}")
    return int(text)


def set_parent_death_signal(launcher: int) -> None:
    """Asks the kernel to kill this process with its parent, if that is the launcher (Linux).

    Args:
        launcher: process id of the launcher.

    Raises:
        InputError: the launcher has ended already.
    """
    if os.getppid() == launcher:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _is_ancestor(launcher):  # after the call: the launcher may end at any moment
        raise InputError("the launcher of this learner has ended: start the run again")


def _is_ancestor(process: int) -> bool:
    """Returns whether a process is this one's parent, or a parent of its parent, such as that of a shell."""
    parent = os.getppid()
    while parent not in (0, process):
        try:
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, and this process was given another parent
            return os.getppid() == process
    return parent == process


LOCALHOST = "127.0.0.1"
NON_EPHEMERAL_PORTS = range(20000, 32000)  # Linux gives connections ports from 32768 on


@dataclass(frozen=True)
class LaunchSpec:
    """Arguments of one launch, the same on all hosts except for `node_rank`.

    Attributes:
        command: command line of a learner.
        learners: number of learners on each host.
        synchronous: the strategy is synchronous: the first death ends the run.
        nodes: number of hosts.
        node_rank: index of this host.
        address: host:port of the supervisor on host 0, None on a single host.
        restart_after: seconds between the death of an asynchronous learner and its restart.
        max_restarts: number of restarts of one learner.
        timeout: seconds in which all hosts must connect.
        key: secret for encryption.
        private_dir: directory for sockets and store of a team on one host, which no other user can enter.
        faults: injected faults. A crash that is listed here has its own restart time.
        environment: variables to add to this process' own.
        inherited_files: descriptors that learners on this host keep open.
    """

    command: Sequence[str]
    learners: int
    synchronous: bool
    nodes: int = 1
    node_rank: int = 0
    address: str | None = None
    restart_after: float = 1.0
    max_restarts: int = 3
    timeout: float = 60.0
    key: str | None = None
    private_dir: Path | None = None
    faults: Faults = field(default_factory=Faults)
    environment: Mapping[str, str] = field(default_factory=dict)
    inherited_files: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.learners < 1 or self.nodes < 1:
            raise InputError(f"{self.learners} learners on {self.nodes} hosts: must be at least one of each")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(f"node_rank={self.node_rank}: must be 0 to {self.nodes - 1} with nodes={self.nodes}")
        if self.nodes > 1 and self.address is None:
            raise InputError("address is missing: give host:port of the host with node_rank=0, the same on all hosts")
        if self.address is not None:
            split_address(self.address, "address")
        self.faults.check(self.size)

    @property
    def size(self) -> int:
        return self.learners * self.nodes

    @property
    def ranks(self) -> range:
        """Ranks of the learners on this host."""
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node: int) -> range:
        return range(node * self.learners, (node + 1) * self.learners)

    def restart_seconds(self, rank: int, deaths: int) -> float | None:
        """Returns the seconds until a learner is restarted that died `deaths` times before, or None for no restart."""
        if deaths >= self.max_restarts:
            return None
        crash = next((crash for crash in self.faults.crashes if crash.learner == rank), None)
        return crash.restart_after if crash is not None and deaths == 0 else self.restart_after


@dataclass(frozen=True)
class RendezvousInfo:
    """Identity and addresses of a run.

    Attributes:
        run: identity of the run, 32 hexadecimal digits.
        supervisor: address of the supervisor, tcp://host:port or ipc://path. None for synchronous teams.
        master: host and port of torch's store. None for asynchronous teams and those with a private directory.
    """

    run: str
    supervisor: str | None = None
    master: tuple[str, int] | None = None


def worker_environment(spec: LaunchSpec, rendezvous: RendezvousInfo, rank: int, incarnation: int) -> dict[str, str]:
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
        "ASR_AM_RUN": rendezvous.run,
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


TERMINATE_GRACE = 3.0  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True)
class ExitStatus:
    """Exit of a worker process.

    Attributes:
        rank: rank of the learner.
        incarnation: number of its restarts.
        status: `Popen.returncode`: below 0 the number of the signal that killed it.
    """

    rank: int
    incarnation: int
    status: int


def describe(status: int) -> str:
    """Returns how a process ended, to follow the name of a learner in a sentence."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-status} ({name})"


class WorkerProcesses:
    """Worker processes on this host.

    Args:
        command: command line of a learner.
        environment: returns the environment of a learner, given rank and incarnation.
        inherited_files: descriptors that learners keep open.
    """

    def __init__(
        self, command: Sequence[str], environment: Callable[[int, int], Mapping[str, str]],
        inherited_files: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._command, self._environment, self._inherited_files = list(command), environment, inherited_files
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}

    def start(self, rank: int, incarnation: int) -> None:
        """Starts a learner in a session of its own, so that Ctrl-C reaches the launcher only."""
        try:
            process = subprocess.Popen(
                self._command, env=dict(self._environment(rank, incarnation)), start_new_session=True,
                pass_fds=self._inherited_files,
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"{self._command[0]}: cannot be started ({error}): check the command") from error
        self._running[rank] = incarnation, process

    def ended(self) -> list[ExitStatus]:
        """Returns the processes that ended since the last call, killed ones first: others end because of them."""
        found = [
            ExitStatus(rank, incarnation, process.returncode)
            for rank, (incarnation, process) in self._running.items()
            if process.poll() is not None
        ]
        for child in found:
            _signal(self._running.pop(child.rank)[1], signal.SIGKILL)  # the rest of its process group
        return sorted(found, key=lambda child: (child.status >= 0, child.rank))

    def kill(self, rank: int) -> None:
        """Kills a learner, even one that is stopped. `ended` reports it."""
        if rank in self._running:
            _signal(self._running[rank][1], signal.SIGKILL)

    def end(self) -> None:
        """Ends all workers that run, and the processes that they have started."""
        processes = [process for _, process in self._running.values()]
        self._running.clear()
        for process in processes:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_GRACE
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signals the whole process group, which may outlive its leader."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


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
