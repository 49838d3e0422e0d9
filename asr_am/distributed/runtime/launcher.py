"""`launch`: starts a team of processes on one or more hosts, monitors them, and restarts those that may be restarted.

`Supervisor` runs on host 0 and serves the control plane of asynchronous teams. `NodeAgent` runs on each other host,
starts learners when the supervisor says so, and reports how they end.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import zmq

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.leases import LearnerLost
from asr_am.distributed.runtime.awake_clock import AwakeClock
from asr_am.distributed.runtime.coordinator import ControlMessage, ControlServer, Coordinator, read_json
from asr_am.distributed.runtime.private_dir import private_dir
from asr_am.distributed.runtime.security import HEARTBEAT_TIMEOUT, choose_key, open_socket
from asr_am.distributed.runtime.worker_process import (
    EXIT_USER_ERROR,
    ExitStatus,
    LaunchSpec,
    RendezvousInfo,
    WorkerProcesses,
    describe,
    ended_by_sigterm,
    free_port,
    worker_environment,
)
from asr_am.errors import InputError

log = logging.getLogger(__name__)

POLL_INTERVAL = 0.05  # seconds between two checks of the processes
AGENT_TIMEOUT = 0.8  # of HEARTBEAT_TIMEOUT: a host that is cut off has ended its learners before they are replaced


@dataclass
class Host:
    """Another host.

    Attributes:
        name: host name.
        connection: ZeroMQ identity of its agent.
        last_heard: time of its agent's last message, by the supervisor's clock.
    """

    name: str
    connection: bytes
    last_heard: float


class Supervisor:
    """Starts and monitors all learners of a run, and serves the control plane if they are asynchronous."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec, self._name = spec, socket.gethostname()
        self._clock = AwakeClock(HEARTBEAT_TIMEOUT / 5)
        self._server = ControlServer(spec.address, spec.key, spec.private_dir)
        serves_store = spec.synchronous and spec.private_dir is None
        master = (self._server.host, free_port(self._server.host)) if serves_store else None
        supervisor = None if spec.synchronous else self._server.url
        self._rendezvous = RendezvousInfo(secrets.token_hex(16), supervisor, master)
        self._workers = WorkerProcesses(spec.command, self._worker_environment, spec.inherited_files)
        self._coordinator = None if spec.synchronous else Coordinator(spec.size, self._send)
        self._hosts: dict[int, Host] = {}  # other hosts, by node rank
        self._connections: dict[int, bytes] = {}  # by rank
        self._ranks: dict[bytes, int] = {}  # by connection
        self._last_heard: dict[int, float] = {}  # time of the last message of asynchronous learners, by rank
        self._running: set[int] = set()  # learners that are alive or will be restarted
        self._restarts: dict[int, float] = {}  # due time, by rank
        self._incarnations: dict[int, int] = {}  # newest incarnation that was started, by rank
        self._deaths: Counter[int] = Counter()  # by rank
        self._requests = 0  # of learners to start the team again
        self._finished = False
        self._heartbeat_sent = 0.0

    def run(self) -> None:
        """Runs until all learners have finished. Raises LearnerLost or InputError if something else ends the run."""
        try:
            self._await_nodes()
            for rank in range(self._spec.size):
                self._start(rank, 0)
            while self._running:
                self._poll()
            self._notify_hosts({"do": "stop"})
        except LearnerLost as error:
            self._notify_hosts({"do": "stop", "error": error.reason, "lost": error.rank})
            raise
        except BaseException as error:
            self._notify_hosts({"do": "stop", "error": f"host 0 stopped: {error or type(error).__name__}"})
            raise
        finally:
            self._workers.end()
            self._server.close()

    def _poll(self) -> None:
        self._tick()
        for connection, message in self._server.receive(POLL_INTERVAL):
            self._handle(connection, message)
            self._tick()
            self._heartbeat(self._clock.now())  # a burst of messages must not delay heartbeats
        for exit_status in self._workers.ended():
            self._on_end(exit_status, self._name)
        now = self._clock.now()
        for rank, due in list(self._restarts.items()):
            if due <= now:
                del self._restarts[rank]
                self._restart(rank)
        self._check_heartbeats(now)

    def _tick(self) -> None:
        if (stopped := self._clock.tick()) > 1:
            log.warning("the supervisor was stopped for %.1f s", stopped)

    def _worker_environment(self, rank: int, incarnation: int) -> dict[str, str]:
        return worker_environment(self._spec, self._rendezvous, rank, incarnation)

    # learners

    def _start(self, rank: int, incarnation: int) -> None:
        self._running.add(rank)
        self._incarnations[rank] = incarnation
        node = rank // self._spec.learners
        if node == 0:
            self._workers.start(rank, incarnation)
        else:
            self._server.send(self._hosts[node].connection, {"do": "start", "rank": rank, "incarnation": incarnation})

    def _restart(self, rank: int) -> None:
        assert self._coordinator is not None
        log.info("restarting learner %d", rank)
        incarnation = self._incarnations[rank] + 1
        self._coordinator.expect(rank, incarnation)
        self._start(rank, incarnation)

    def _restart_team(self, reason: str) -> None:
        """Ends all learners, and starts them again from the last checkpoint.

        The new team has another identity. It rejects messages of the old one, and the old one's messages are ignored.
        """
        log.warning("%s: all learners start again from the last checkpoint", reason)
        self._workers.end()
        self._rendezvous = replace(self._rendezvous, run=secrets.token_hex(16))
        self._notify_hosts({"do": "restart", "run": self._rendezvous.run})
        self._connections.clear()
        self._ranks.clear()
        self._last_heard.clear()
        self._restarts.clear()
        begin = {rank: self._incarnations[rank] + 1 for rank in sorted(self._running)}
        self._coordinator = Coordinator(self._spec.size, self._send, begin)
        for rank, incarnation in begin.items():
            self._start(rank, incarnation)

    def _on_end(self, exit_status: ExitStatus, host: str) -> None:
        """Handles the end of a learner's process."""
        if exit_status.incarnation != self._incarnations.get(exit_status.rank):
            return  # reported by another host when the team was restarted
        how = f"on {host} {describe(exit_status.status)}"
        self._last_heard.pop(exit_status.rank, None)
        self._running.discard(exit_status.rank)
        if exit_status.status == 0:
            self._finished = True
            if self._coordinator is not None:
                self._coordinator.leave(exit_status.rank, None)
        elif exit_status.status == EXIT_USER_ERROR:
            raise InputError(f"learner {exit_status.rank} on {host} failed: see its message above")
        elif self._coordinator is None:
            raise LearnerLost(exit_status.rank, how)
        else:
            deaths = self._deaths[exit_status.rank]
            self._lose(exit_status.rank, how, self._spec.restart_seconds(exit_status.rank, deaths))

    def _lose(self, rank: int, how: str, restart_after: float | None) -> None:
        """Removes a learner that died, and schedules its restart unless `restart_after` is None."""
        assert self._coordinator is not None
        self._deaths[rank] += 1
        self._coordinator.leave(rank, how, gone=restart_after is None)
        if restart_after is not None:
            log.warning("learner %d %s; restarting it", rank, how)
            self._restarts[rank] = self._clock.now() + restart_after
            self._running.add(rank)
        else:
            log.warning("learner %d %s; the others continue without it", rank, how)
            if not self._running and not self._finished:
                raise LearnerLost(rank, f"{how}, as all others had before")
        if self._coordinator.weights_lost and not self._finished:
            self._restart_team(f"learner {rank} was the last with the updates since the last checkpoint")

    # messages

    def _handle(self, connection: bytes, message: ControlMessage) -> None:
        op = message.get("op")
        if op == "hello":
            self._register(connection, message)
        elif op == "node":
            self._server.send(connection, {"do": "stop", "error": "the run has started without this host"})
        elif connection in self._ranks:
            if self._ranks[connection] in self._last_heard:
                self._last_heard[self._ranks[connection]] = self._clock.now()
            if op == "bye":
                self._last_heard.pop(self._ranks[connection], None)
            if op != "live":
                self._serve(self._ranks[connection], message)
        else:
            self._on_node(connection, message)

    def _register(self, connection: bytes, message: ControlMessage) -> None:
        """Registers a learner. Rejects everyone who is not an expected learner of this run."""
        rank, incarnation, address = message.get("rank"), message.get("incarnation"), message.get("address")
        member = self._coordinator.members.get(rank) if self._coordinator and isinstance(rank, int) else None
        expected = (
            message.get("run") == self._rendezvous.run and member is not None and member.incarnation == incarnation
        )
        if not expected or not isinstance(address, str) or not isinstance(incarnation, int):
            self._server.connection_monitor.reject(
                f"a client that is not of this run and claims to be learner {rank!r:.20}"
            )
            return
        assert self._coordinator is not None and isinstance(rank, int)
        self._ranks.pop(self._connections.get(rank, b""), None)
        self._connections[rank], self._ranks[connection] = connection, rank
        self._last_heard[rank] = self._clock.now()
        self._coordinator.register(rank, incarnation, address)

    def _serve(self, rank: int, message: ControlMessage) -> None:
        assert self._coordinator is not None
        if rank not in self._coordinator.members:
            return  # it has just died
        if message.get("op") == "restart":
            self._requests += 1
            if self._requests > self._deaths.total():  # only a death can take weights away
                raise LearnerLost(rank, f"cannot go on: {message.get('reason')}")
            self._restart_team(f"learner {rank}: {message.get('reason')}")
            return
        try:
            self._coordinator.handle(rank, message)
        except Exception as error:  # an error of one learner must not end the others
            answer = {"error": f"{message.get('op')}: {error}"}
            self._send(rank, answer | ({"id": message["id"]} if "id" in message else {}))

    def _send(self, rank: int, message: ControlMessage) -> None:
        self._server.send(self._connections[rank], message)

    # other hosts

    def _await_nodes(self) -> None:
        """Waits for the agents on all other hosts."""
        deadline = self._clock.now() + self._spec.timeout
        while len(self._hosts) < self._spec.nodes - 1:
            self._tick()
            left = deadline - self._clock.now()
            if left <= 0:
                rejected = self._server.connection_monitor.rejected
                hint = f"; {rejected} connections were rejected: give all hosts the same key_file" if rejected else ""
                missing = sorted(set(range(1, self._spec.nodes)) - self._hosts.keys())
                raise InputError(
                    f"host {', '.join(map(str, missing))} of {self._spec.nodes} has not connected within "
                    f"{self._spec.timeout:g} s: start the same command there with its node_rank and this address{hint}"
                )
            for connection, message in self._server.receive(min(left, POLL_INTERVAL)):
                self._register_node(connection, message)
        for host in self._hosts.values():
            host.last_heard = self._clock.now()  # agents send no heartbeats while they wait for the last host
        self._notify_hosts({"do": "run", "run": self._rendezvous.run, "supervisor": self._rendezvous.supervisor,
                          "master": self._rendezvous.master})  # fmt: skip

    def _register_node(self, connection: bytes, message: ControlMessage) -> None:
        if message.get("op") != "node":
            return
        spec, node = self._spec, message.get("node")
        options = [message.get(key) for key in ("nodes", "learners", "in_step")]
        wrong = None
        if options != [spec.nodes, spec.learners, spec.synchronous]:
            wrong = (
                f"host {node} was started with different learners, nodes or strategy than host 0: they must be equal"
            )
        elif not isinstance(node, int) or not 0 < node < spec.nodes or node in self._hosts:
            wrong = f"node_rank={node} is used by another host: give each host its own"
        if wrong:
            self._server.send(connection, {"do": "stop", "error": wrong})
            raise InputError(wrong)
        self._hosts[int(str(node))] = Host(str(message.get("host")), connection, self._clock.now())

    def _on_node(self, connection: bytes, message: ControlMessage) -> None:
        """Handles an agent's report or heartbeat."""
        for host in self._hosts.values():
            if host.connection == connection:
                host.last_heard = self._clock.now()
                if message.get("op") == "ended":
                    self._on_end(ExitStatus(message["rank"], message["incarnation"], message["status"]), host.name)
                return
        self._server.connection_monitor.reject("a message of a client that is neither a learner nor a host of this run")

    def _check_heartbeats(self, now: float) -> None:
        for node, host in list(self._hosts.items()):
            if now - host.last_heard > HEARTBEAT_TIMEOUT:
                del self._hosts[node]
                self._lose_host(node, f"cannot be reached any more: no heartbeat from host {host.name}")
        for rank, last_heard in list(self._last_heard.items()):
            if now - last_heard > HEARTBEAT_TIMEOUT:
                self._kill(rank)
        self._heartbeat(now)

    def _kill(self, rank: int) -> None:
        """Kills a learner that is stopped or hangs, so that it can be restarted. Its batches are free at once."""
        assert self._coordinator is not None
        log.warning("learner %d has not been heard from for %g s: it is stopped or hangs", rank, HEARTBEAT_TIMEOUT)
        del self._last_heard[rank]
        node = rank // self._spec.learners
        if node == 0:
            self._workers.kill(rank)
        elif node in self._hosts:
            self._server.send(self._hosts[node].connection, {"do": "kill", "rank": rank})
        self._coordinator.leave(rank, "has not been heard from")

    def _heartbeat(self, now: float) -> None:
        if now - self._heartbeat_sent > HEARTBEAT_TIMEOUT / 5:
            self._heartbeat_sent = now
            self._notify_hosts({"do": "live"})

    def _lose_host(self, node: int, how: str) -> None:
        lost = sorted(self._running & set(self._spec.ranks_of(node)))
        self._running.difference_update(lost)
        for rank in lost:
            self._last_heard.pop(rank, None)
            self._restarts.pop(rank, None)
            if self._coordinator is None:
                raise LearnerLost(rank, how)
            self._lose(rank, how, None)

    def _notify_hosts(self, message: ControlMessage) -> None:
        for host in self._hosts.values():
            self._server.send(host.connection, message)


class NodeAgent:
    """Starts and monitors the learners of one host, as the supervisor on host 0 says."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec, self._clock = spec, AwakeClock(HEARTBEAT_TIMEOUT / 5)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, spec.key, heartbeats=False)
        self._socket.connect(f"tcp://{spec.address}")
        self._workers: WorkerProcesses | None = None
        self._rendezvous: RendezvousInfo | None = None

    def run(self) -> None:
        """Runs until the supervisor ends the run. Raises LearnerLost or InputError if that was not in good order."""
        try:
            self._rendezvous = self._join_supervisor()
            self._workers = WorkerProcesses(self._spec.command, self._worker_environment)
            last_heard, last_sent = self._clock.now(), 0.0
            while True:
                self._clock.tick()
                for message in self._receive(POLL_INTERVAL):
                    last_heard = self._clock.now()
                    if message.get("do") == "start":
                        self._workers.start(message["rank"], message["incarnation"])
                    elif message.get("do") == "kill":
                        self._workers.kill(message["rank"])
                    elif message.get("do") == "restart":
                        self._workers.end()
                        self._rendezvous = replace(self._rendezvous, run=message["run"])
                    elif message.get("do") == "stop":
                        self._stop(message)
                        return
                for exit_status in self._workers.ended():
                    self._send({"op": "ended", **vars(exit_status)})
                if self._clock.now() - last_heard > AGENT_TIMEOUT * HEARTBEAT_TIMEOUT:
                    raise InputError(f"the supervisor at {self._spec.address} cannot be reached any more: check host 0")
                if self._clock.now() - last_sent > HEARTBEAT_TIMEOUT / 5:
                    last_sent = self._clock.now()
                    self._send({"op": "live"})
        finally:
            if self._workers is not None:
                self._workers.end()
            self._socket.close(linger=500)
            self._context.term()

    def _worker_environment(self, rank: int, incarnation: int) -> dict[str, str]:
        assert self._rendezvous is not None
        return worker_environment(self._spec, self._rendezvous, rank, incarnation)

    def _join_supervisor(self) -> RendezvousInfo:
        """Registers this host, and waits until the supervisor has all hosts."""
        spec = self._spec
        self._send({
            "op": "node", "node": spec.node_rank, "nodes": spec.nodes, "learners": spec.learners,
            "in_step": spec.synchronous, "host": socket.gethostname(),
        })  # fmt: skip
        for message in self._receive(spec.timeout):
            if message.get("do") == "run":
                master = message["master"]
                return RendezvousInfo(message["run"], message["supervisor"], (master[0], master[1]) if master else None)
            self._stop(message)
        raise InputError(
            f"address={spec.address}: no answer within {spec.timeout:g} s: check that the same command runs there with "
            "node_rank=0 and the same key_file"
        )

    def _stop(self, message: ControlMessage) -> None:
        """Raises the error in a stop message, if there is one."""
        if message.get("lost") is not None:
            raise LearnerLost(message["lost"], message["error"])
        if message.get("error"):
            raise InputError(message["error"])

    def _receive(self, seconds: float) -> Iterator[ControlMessage]:
        """Yields the messages that have arrived, after waiting `seconds` for the first. The rest stays queued."""
        wait = int(1000 * seconds)
        while self._socket.poll(wait):
            wait = 0
            message = read_json(self._socket.recv_multipart())
            if message is not None:
                yield message

    def _send(self, message: ControlMessage) -> None:
        self._socket.send(json.dumps(message).encode())


def launch(
    command: Sequence[str], learners: int, *, synchronous: bool, nodes: int = 1, node_rank: int = 0,
    address: str | None = None, restart_after: float = 1.0, max_restarts: int = 3, timeout: float = 60.0,
    key_file: str | None = None, encrypt: bool | None = None, faults: Faults | None = None,
    env: Mapping[str, str] | None = None, inherited_files: Sequence[int] = (),
) -> None:  # fmt: skip
    """Runs a team of processes, each of which calls `connect`, until all have ended.

    On several hosts, call it on each of them with the same arguments except for `node_rank`.

    Args:
        command: command line of a learner.
        learners: number of learners on each host.
        synchronous: the first death ends the run. Otherwise the others continue, and the dead learner is restarted.
        nodes: number of hosts.
        node_rank: index of this host.
        address: host:port of host 0. Needed with several hosts.
        restart_after: seconds between a death and the restart.
        max_restarts: number of restarts of one learner.
        timeout: seconds in which all hosts must connect.
        key_file: file with the run's secret, the same on all hosts (see security.py). It protects messages and the
            control plane, not torch's collectives.
        encrypt: encrypt connections. None encrypts unless the team is on one host and has no `address`: its sockets are
            then in a directory that no other user can enter. Several hosts need a key file.
        faults: injected faults, for the restart times of injected crashes.
        env: variables to add to the learners' environment.
        inherited_files: descriptors that the learners keep open, such as that of a lock.

    Raises:
        LearnerLost: a synchronous learner died, or no learner is left.
        InputError: a learner failed with exit status 1, after its own message, or a host has not connected in time.
    """
    spec = LaunchSpec(
        command, learners, synchronous, nodes, node_rank, address, restart_after, max_restarts, timeout,
        faults=faults or Faults(), environment=env or {}, inherited_files=inherited_files,
    )  # fmt: skip
    private = nodes == 1 and address is None
    key = choose_key(key_file, encrypt, private=private, one_start=nodes == 1)
    with ended_by_sigterm(), private_dir() if private else nullcontext() as folder:
        spec = replace(spec, key=key, private_dir=folder)
        if node_rank == 0:
            Supervisor(spec).run()
        else:
            NodeAgent(spec).run()
