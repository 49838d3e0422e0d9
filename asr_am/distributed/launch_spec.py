"""What a launcher is told about a team, and how a worker process has ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asr_am.distributed.cluster_config import Faults
from asr_am.errors import InputError

WireDtype = Literal["float32", "bfloat16", "float16"]  # in which weights and gradients travel (`wire_dtype`)
SUPERVISOR_SOCKET = "supervisor"  # in the private directory of a team on one host
HEARTBEAT_TIMEOUT = 10.0  # seconds without an answer after which a host or a learner is lost
EXIT_USER_ERROR = 1  # exit status of a learner that has reported an InputError
EXIT_LOST = 71  # of a learner of a synchronous team that has lost another one: the team is started again
EXIT_FAILURE = 70  # of any other failure: fault-tolerant strategies go on without the learner, and it is restarted


@dataclass(frozen=True)
class LaunchSpec:
    """Arguments of one launch, the same on all hosts except for `node_rank`.

    Attributes:
        command: command line of a learner.
        learners: number of learners on each host.
        synchronous: the strategy is synchronous: after a death the team starts again from the last checkpoint.
        nodes: number of hosts.
        node_rank: index of this host.
        address: host:port of the supervisor on host 0, None on a single host.
        restart_after: seconds between the death of a learner and its restart, or that of its synchronous team, for each
            death before it within an hour. The first restart is at once.
        max_restarts: number of restarts within an hour, of one learner or of a synchronous team.
        grace: seconds in which learners that are asked to end must have done so.
        timeout: seconds in which all hosts must connect.
        key: secret for encryption.
        private_dir: directory for sockets and store of a team on one host, which no other user can enter.
        faults: injected faults. A crash that is listed here has its own restart time.
        environment: variables to add to this process' own.
        inherited_files: descriptors that learners on this host keep open.
        together: the strategy is not synchronous, but all learners start again after a death, too.
    """

    command: Sequence[str]
    learners: int
    synchronous: bool
    nodes: int = 1
    node_rank: int = 0
    address: str | None = None
    restart_after: float = 1.0
    max_restarts: int = 3
    grace: float = 60.0
    timeout: float = 60.0
    key: str | None = None
    private_dir: Path | None = None
    faults: Faults = field(default_factory=Faults)
    environment: Mapping[str, str] = field(default_factory=dict)
    inherited_files: Sequence[int] = ()
    together: bool = False

    def __post_init__(self) -> None:
        if self.learners < 1 or self.nodes < 1:
            raise InputError(f"{self.learners} learners on {self.nodes} hosts: must be at least one of each")
        if not 0 <= self.node_rank < self.nodes:
            raise InputError(f"node_rank={self.node_rank}: must be 0 to {self.nodes - 1} with nodes={self.nodes}")
        if self.nodes > 1 and self.address is None:
            raise InputError("address is missing: give host:port of the host with node_rank=0, the same on all hosts")
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

    def has_sockets(self) -> bool:
        """Returns False if somebody has removed the sockets of a team on one host: no learner can connect any more."""
        return self.private_dir is None or (self.private_dir / SUPERVISOR_SOCKET).exists()

    def restart_seconds(self, rank: int, deaths: int) -> float | None:
        """Returns the seconds until a learner is restarted, None for no restart.

        Args:
            deaths: earlier deaths of the learner, or of its synchronous team, within an hour.
        """
        if deaths >= self.max_restarts or not self.has_sockets():
            return None
        crash = next((crash for crash in self.faults.crashes if crash.learner == rank), None)
        return crash.restart_after if crash is not None and deaths == 0 else deaths * self.restart_after


@dataclass(frozen=True)
class ExitStatus:
    """Exit of a worker process.

    Attributes:
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
