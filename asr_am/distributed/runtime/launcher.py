"""`launch`: starts a team of processes on one or more hosts, and ends when all of them have ended."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, replace

import zmq

from asr_am.distributed.awake_clock import AwakeClock
from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.coordinator import ControlMessage
from asr_am.distributed.launch_spec import HEARTBEAT_TIMEOUT, LaunchSpec
from asr_am.distributed.node_agent import NodeAgent
from asr_am.distributed.runtime.control_server import ControlServer, read_json, wait_for_message
from asr_am.distributed.runtime.fork_server import ForkServer
from asr_am.distributed.runtime.preemption import noting, preempted
from asr_am.distributed.runtime.private_dir import private_dir
from asr_am.distributed.runtime.security import choose_key, open_socket, split_address
from asr_am.distributed.runtime.worker_process import (
    RendezvousInfo,
    WorkerProcesses,
    ended_by_sigterm,
    free_port,
)
from asr_am.distributed.supervisor import Supervisor


def make_supervisor(spec: LaunchSpec, fork_server: ForkServer | None = None) -> Supervisor:
    """Returns the supervisor of a team, which listens already. `fork_server` forks its learners."""
    server = ControlServer(spec.address, spec.key, spec.private_dir, fork_server)
    serves_store = spec.synchronous and spec.private_dir is None
    rendezvous = RendezvousInfo(
        None if spec.synchronous else server.url, (server.host, free_port(server.host)) if serves_store else None
    )
    return Supervisor(
        spec, server, WorkerProcesses(spec, rendezvous, fork_server), AwakeClock(HEARTBEAT_TIMEOUT / 5),
        socket.gethostname(), lambda: secrets.token_hex(16), asdict(rendezvous),
        preempted=preempted,
    )  # fmt: skip


def make_agent(spec: LaunchSpec, fork_server: ForkServer | None = None) -> NodeAgent:
    """Returns the agent of a host other than host 0. `fork_server` forks its learners."""

    def make_workers(begin: ControlMessage) -> WorkerProcesses:
        master = begin["master"]
        rendezvous = RendezvousInfo(begin["supervisor"], (master[0], master[1]) if master else None)
        return WorkerProcesses(spec, rendezvous, fork_server)

    clock = AwakeClock(HEARTBEAT_TIMEOUT / 5)
    return NodeAgent(
        spec, SupervisorConnection(spec, fork_server), make_workers, clock, socket.gethostname(), preempted
    )


class SupervisorConnection:
    """An agent's socket to the supervisor (`node_agent.AgentConnection`).

    Args:
        fork_server: its reports end a wait for messages.
    """

    def __init__(self, spec: LaunchSpec, fork_server: ForkServer | None = None) -> None:
        self._fork_server = fork_server
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, spec.key, heartbeats=False)
        self._socket.connect(f"tcp://{spec.address}")

    def receive(self, seconds: float) -> Iterator[ControlMessage]:
        while wait_for_message(self._socket, seconds, self._fork_server):
            seconds = 0.0
            message = read_json(self._socket.recv_multipart())
            if message is not None:
                yield message

    def send(self, message: ControlMessage) -> None:
        self._socket.send(json.dumps(message).encode())

    def close(self) -> None:
        self._socket.close(linger=500)
        self._context.term()


def launch(
    command: Sequence[str], learners: int, *, synchronous: bool, nodes: int = 1, node_rank: int = 0,
    address: str | None = None, restart_after: float = 1.0, max_restarts: int = 3, grace: float = 60.0,
    signals: Sequence[str] = (), timeout: float = 60.0,
    key_file: str | None = None, encrypt: bool | None = None, faults: Faults | None = None,
    env: Mapping[str, str] | None = None, inherited_files: Sequence[int] = (), fork: bool = False,
    together: bool = False,
) -> None:  # fmt: skip
    """Runs a team of processes, each of which calls `connect`, until all have ended.

    On several hosts, call it on each of them with the same arguments except for `node_rank`. Arguments that are not
    given here are described at `LaunchSpec`.

    Args:
        synchronous: after a death all learners are started again. They continue from their last checkpoint. Otherwise
            the others go on, and the dead learner is restarted.
        signals: some of TERM, USR1 and USR2. After one of them to this process the learners get SIGUSR1: they save a
            checkpoint and end (`preemption`), if they train by the stages or `train_model`. Without TERM, it ends all
            at once.
        key_file: file with the run's secret, the same on all hosts (see security.py). It protects messages and the
            control plane, not torch's collectives.
        encrypt: encrypt connections. None encrypts unless the team is on one host and has no `address`: its sockets are
            then in a directory that no other user can enter. Several hosts need a key file.
        env: variables to add to the learners' environment.
        together: all learners are started again after a death, although they are not synchronous.
        fork: a process on each host imports the program, and forks the learners, so that a dead one is replaced at
            once. For commands as of `fork_server.ForkServer`.

    Raises:
        LearnerLost: learners died more often than they may be restarted.
        Preempted: the run was asked to end, and its learners have done so.
        InputError: a learner failed with exit status 1, after its own message, or a host has not connected in time.
    """
    spec = LaunchSpec(
        command, learners, synchronous, nodes, node_rank, address, restart_after, max_restarts, grace, timeout,
        faults=faults or Faults(), environment=env or {}, inherited_files=inherited_files,
        together=together,
    )  # fmt: skip
    if address is not None:
        split_address(address, "address")
    private = nodes == 1 and address is None
    key = choose_key(key_file, encrypt, private=private, one_start=nodes == 1)
    forking = closing(ForkServer(command, inherited_files)) if fork else nullcontext()
    with ended_by_sigterm(), noting(signals), private_dir() if private else nullcontext() as folder, forking as server:
        spec = replace(spec, key=key, private_dir=folder)
        if node_rank == 0:
            make_supervisor(spec, server).run()
        else:
            make_agent(spec, server).run()
