"""What a team of processes is started from, and the environment that tells each of them who it is."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from asr_am.distributed.cluster import Faults
from asr_am.distributed.process.sockets import split_address
from asr_am.errors import InputError

LOCALHOST = "127.0.0.1"
NOT_HANDED_OUT = range(20000, 32000)  # Linux gives connections ports from 32768 on


@dataclass(frozen=True)
class Plan:
    """learners: on each of `nodes` hosts; this is host `node_rank`. address: host:port of the supervisor, on host 0;
    None on a single host. restart_after: seconds before a dead learner of a team that is not in step is started again,
    at most `max_restarts` times; `faults` knows better for the crashes it has. timeout: seconds for the other hosts to
    come. key: for encryption. environment: beside this process' own.
    """

    command: Sequence[str]
    learners: int
    in_step: bool
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
class Meeting:
    """Where the learners of a run find each other. supervisor: tcp://host:port, None for a team in step, which has
    `master`, host and port of torch's store.
    """

    run: str
    supervisor: str | None = None
    master: tuple[str, int] | None = None


def learner_environment(plan: Plan, meeting: Meeting, rank: int, incarnation: int) -> dict[str, str]:
    """As torchrun sets it, and what the mail needs beside."""
    environment = {key: value for key, value in os.environ.items() if key not in OF_ANOTHER_RUN}
    environment.setdefault("OMP_NUM_THREADS", "1")  # two arithmetic threads on contended cores are far slower than one
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of a store that is not there yet, torch warns at length
    environment |= plan.environment
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.size),
        "LOCAL_RANK": str(rank - plan.ranks.start),
        "LOCAL_WORLD_SIZE": str(plan.learners),
        "ASR_AM_RUN": meeting.run,
        "ASR_AM_INCARNATION": str(incarnation),
        "ASR_AM_LAUNCHER": str(os.getpid()),
    }
    if plan.key is not None:
        environment["ASR_AM_KEY"] = plan.key
    if meeting.supervisor is not None:
        environment["ASR_AM_SUPERVISOR"] = meeting.supervisor
    if meeting.master is not None:
        environment |= {"MASTER_ADDR": meeting.master[0], "MASTER_PORT": str(meeting.master[1])}
    return environment


OF_ANOTHER_RUN = (
    "ASR_AM_SUPERVISOR", "ASR_AM_KEY", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at present, and that the system gives to nobody who does not ask for it."""
    for port in random.SystemRandom().sample(NOT_HANDED_OUT, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise InputError(f"{host}: has no free port, or is no address of this host")
