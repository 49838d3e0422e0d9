"""Who this process is: what `plan.learner_environment`, torchrun or Slurm have put into its environment.

What a team of processes is started from, and the environment that tells each of them who it is.

The learners' processes on this machine: started, watched, and ended without leaving one behind.

How processes end: a learner's own, and a launcher's that is told to."""

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
from types import FrameType
from typing import NoReturn

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.runtime.security import check_key, split_address
from asr_am.errors import InputError

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class WorkerEnv:
    """local_size: learners on each host. supervisor: tcp://host:port, None for a gang, which has `master`: host and
    port of torch's store. hosted: torchrun serves that store itself. restarts: of the gang, by torchrun. run: 32
    hexadecimal digits, None where the gang has to agree on some. launcher: its process. key: for encryption.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    incarnation: int
    run: str | None
    supervisor: str | None
    master: tuple[str, int] | None
    agent_store: bool
    restarts: int
    launcher: int | None
    key: str | None

    @property
    def hosts(self) -> tuple[int, ...]:
        """Of each rank: launchers fill one host after the other."""
        return tuple(rank // self.local_size for rank in range(self.size))

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> WorkerEnv:
        """InputError naming the variable that is missing or wrong."""
        if "RANK" not in variables:
            raise InputError("RANK is not in the environment; start learners with launcher=process, torchrun or Slurm")
        size = _whole(variables, "WORLD_SIZE", least=1)
        rank = _whole(variables, "RANK")
        if rank >= size:
            raise InputError(f"RANK={rank}: with WORLD_SIZE={size}, ranks are 0 to {size - 1}")
        supervisor = variables.get("ASR_AM_SUPERVISOR")
        run, master = variables.get("ASR_AM_RUN"), None
        if (run is not None or supervisor is not None) and not re.fullmatch("[0-9a-f]{32}", run or ""):
            raise InputError(f"ASR_AM_RUN={run!r} in the environment: must be 32 hexadecimal digits")
        if supervisor is None:
            if not variables.get("MASTER_ADDR"):
                raise InputError("MASTER_ADDR is not in the environment: the host of learner 0")
            master = variables["MASTER_ADDR"], _whole(variables, "MASTER_PORT", least=1, most=65535)
        return cls(
            rank=rank,
            size=size,
            local_rank=_whole(variables, "LOCAL_RANK", default="0"),
            local_size=_whole(variables, "LOCAL_WORLD_SIZE", default=str(size), least=1),
            incarnation=_whole(variables, "ASR_AM_INCARNATION", default="0"),
            run=run,
            supervisor=supervisor,
            master=master,
            agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=_whole(variables, "TORCHELASTIC_RESTART_COUNT", default="0"),
            launcher=_whole(variables, "ASR_AM_LAUNCHER") if "ASR_AM_LAUNCHER" in variables else None,
            key=check_key(variables["ASR_AM_KEY"], "ASR_AM_KEY") if "ASR_AM_KEY" in variables else None,
        )


def _whole(variables: Mapping[str, str], name: str, *, default: str = "", least: int = 0, most: int = 1 << 31) -> int:
    text = variables.get(name, default)
    if not text.isdecimal() or not least <= int(text) <= most:
        raise InputError(f"{name}={text!r} in the environment: must be a whole number, {least} to {most}")
    return int(text)


def set_parent_death_signal(launcher: int) -> None:
    """Let the kernel end this process with its parent, if that is the launcher (Linux)."""
    if os.getppid() != launcher:
        return  # there is something in between, such as a shell
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        raise InputError("the launcher has ended")


LOCALHOST = "127.0.0.1"
NON_EPHEMERAL_PORTS = range(20000, 32000)  # Linux gives connections ports from 32768 on


@dataclass(frozen=True)
class LaunchSpec:
    """learners: on each of `nodes` hosts; this is host `node_rank`. address: host:port of the supervisor, on host 0;
    None on a single host. restart_after: seconds before a dead learner of a team that is not in step is started again,
    at most `max_restarts` times; `faults` knows better for the crashes it has. timeout: seconds for the other hosts to
    come. key: for encryption. environment: beside this process' own.
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
    faults: Faults = field(default_factory=Faults)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.learners < 1 or self.nodes < 1:
            raise InputError(f"{self.learners} learners on {self.nodes} hosts: there must be one of each at least")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(f"node_rank={self.node_rank}: with nodes={self.nodes} it is 0 to {self.nodes - 1}")
        if self.nodes > 1 and self.address is None:
            raise InputError("address: is missing; give host:port of the host with node_rank=0, the same on all hosts")
        if self.address is not None:
            split_address(self.address, "address")
        self.faults.check(self.size)

    @property
    def size(self) -> int:
        return self.learners * self.nodes

    @property
    def ranks(self) -> range:
        """Those of this host."""
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node: int) -> range:
        return range(node * self.learners, (node + 1) * self.learners)

    def restart_seconds(self, rank: int, incarnation: int) -> float | None:
        """How long after its death an incarnation of a learner is followed by the next; None: never."""
        if incarnation >= self.max_restarts:
            return None
        crash = next((crash for crash in self.faults.crashes if crash.learner == rank), None)
        return crash.restart_after if crash is not None and incarnation == 0 else self.restart_after


@dataclass(frozen=True)
class RendezvousInfo:
    """Where the learners of a run find each other. supervisor: tcp://host:port, None for a team in step, which has
    `master`, host and port of torch's store.
    """

    run: str
    supervisor: str | None = None
    master: tuple[str, int] | None = None


def worker_environment(spec: LaunchSpec, rendezvous: RendezvousInfo, rank: int, incarnation: int) -> dict[str, str]:
    """As torchrun sets it, and what the mail needs beside."""
    environment = {key: value for key, value in os.environ.items() if key not in STALE_ENV}
    environment.setdefault("OMP_NUM_THREADS", "1")  # two arithmetic threads on contended cores are far slower than one
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of a store that is not there yet, torch warns at length
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
    if rendezvous.supervisor is not None:
        environment["ASR_AM_SUPERVISOR"] = rendezvous.supervisor
    if rendezvous.master is not None:
        environment |= {"MASTER_ADDR": rendezvous.master[0], "MASTER_PORT": str(rendezvous.master[1])}
    return environment


STALE_ENV = (
    "ASR_AM_SUPERVISOR", "ASR_AM_KEY", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at present, and that the system gives to nobody who does not ask for it."""
    for port in random.SystemRandom().sample(NON_EPHEMERAL_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise InputError(f"{host}: has no free port, or is no address of this host")


TERMINATE_GRACE = 3.0  # seconds between asking a process to end and making it


@dataclass(frozen=True)
class ExitStatus:
    """status: as `Popen.returncode`, below 0 the signal that killed it."""

    rank: int
    incarnation: int
    status: int


def describe(status: int) -> str:
    """How a process ended, as the rest of a sentence about it."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-status} ({name})"


class WorkerProcesses:
    """environment: of a learner's process, by rank and incarnation."""

    def __init__(self, command: Sequence[str], environment: Callable[[int, int], Mapping[str, str]]) -> None:
        self._command, self._environment = list(command), environment
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}

    def start(self, rank: int, incarnation: int) -> None:
        """In a session of its own: what the terminal sends (Ctrl-C) comes to the launcher only."""
        try:
            process = subprocess.Popen(
                self._command, env=dict(self._environment(rank, incarnation)), start_new_session=True
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"{self._command[0]}: cannot be started ({error})") from error
        self._running[rank] = incarnation, process

    def ended(self) -> list[ExitStatus]:
        """Those that ended since the last call, the killed ones first: others end because of them."""
        found = [
            ExitStatus(rank, incarnation, process.returncode)
            for rank, (incarnation, process) in self._running.items()
            if process.poll() is not None
        ]
        for child in found:
            _signal(self._running.pop(child.rank)[1], signal.SIGKILL)  # what a killed one leaves of its group
        return sorted(found, key=lambda child: (child.status >= 0, child.rank))

    def end(self) -> None:
        """All that still run, and what they started."""
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
    """To the whole process group, which may outlive its leader."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def end_process(status: int = 0) -> NoReturn:
    """End this process at once; call it when the team is closed.

    Threads that torch.distributed leaves behind may meet an interpreter that is shutting down, and then abort the
    process ("terminate called without an active exception"): a learner that has finished would count as dead.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what this process has started is ended too."""
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
