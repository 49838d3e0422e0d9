"""`Supervisor`: starts a team, monitors it, restarts those that may be restarted, and serves the control plane.

It runs on host 0. `node_agent.NodeAgent` runs on each other host and starts learners there as the supervisor says. Both
see processes and connections through the interfaces below. `runtime.launcher` gives them real ones and the real time,
and the simulator virtual ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asr_am.distributed.awake_clock import AwakeClock
from asr_am.distributed.coordinator import ControlMessage, Coordinator
from asr_am.distributed.launch_spec import (
    EXIT_LOST,
    EXIT_USER_ERROR,
    HEARTBEAT_TIMEOUT,
    ExitStatus,
    LaunchSpec,
    describe,
)
from asr_am.distributed.leases import HostLost, LearnerLost
from asr_am.errors import EXIT_PREEMPTED, InputError, Preempted

log = logging.getLogger(__name__)

POLL_INTERVAL = 0.05  # seconds between two checks of the processes
RESTART_WINDOW = 3600.0  # seconds in which deaths are counted
BEFORE_START = "not all hosts had connected; the same command starts the run"  # when asked to end


class Workers(Protocol):
    """The learners' processes on one host."""

    def start(self, rank: int, incarnation: int, run: str) -> None:
        """Starts a learner of the team with this identity."""
        ...

    def ended(self) -> Sequence[ExitStatus]:
        """Returns the processes that ended since the last call."""
        ...

    def kill(self, rank: int) -> None:
        """Kills a learner. `ended` reports it."""
        ...

    def preempt(self) -> None:
        """Asks all learners to save a checkpoint and to end."""
        ...

    def end(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Ends all learners. `ended` does not report them. Calls `meanwhile` about each second while it waits."""
        ...


class Server(Protocol):
    """Where learners and agents connect to the supervisor.

    Attributes:
        rejected: number of messages and connections that were refused.
    """

    @property
    def rejected(self) -> int: ...

    def receive(self, seconds: float) -> Iterable[tuple[bytes, ControlMessage]]:
        """Yields messages with the connections they came on. Waits `seconds` for the first."""
        ...

    def send(self, connection: bytes, message: ControlMessage) -> None: ...

    def reject(self, what: str) -> None:
        """Counts a message that is refused, and logs the first."""
        ...

    def close(self) -> None: ...


@dataclass
class Host:
    """Another host.

    Attributes:
        connection: ZeroMQ identity of its agent.
        last_heard: time of its agent's last message, by the supervisor's clock.
    """

    name: str
    connection: bytes
    last_heard: float


class Supervisor:
    """Starts and monitors all learners of a run, and serves the control plane if they are asynchronous.

    Args:
        new_run: returns the identity of a new team, 32 hexadecimal digits.
        addresses: sent to the agents on other hosts, with the identity.
        poll_interval: seconds between two checks of the processes, if nothing else happens.
        preempted: returns True once the run is to save its state and to end.
    """

    def __init__(
        self, spec: LaunchSpec, server: Server, workers: Workers, clock: AwakeClock, name: str,
        new_run: Callable[[], str], addresses: Mapping[str, Any], poll_interval: float = POLL_INTERVAL,
        preempted: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._preempted = preempted
        self._preempted_since: float | None = None  # a learner, or this process, has been asked to end
        self._spec, self._server, self._workers, self._clock, self._name = spec, server, workers, clock, name
        self._new_run, self._addresses, self._poll_interval = new_run, addresses, poll_interval
        self._run = new_run()
        self._coordinator = None if spec.synchronous else Coordinator(spec.size, self._send)
        self._hosts: dict[int, Host] = {}  # other hosts, by node rank
        self._connections: dict[int, bytes] = {}  # by rank
        self._ranks: dict[bytes, int] = {}  # by connection
        self._last_heard: dict[int, float] = {}  # time of the last message of asynchronous learners, by rank
        self._running: set[int] = set()  # learners that are alive or will be restarted
        self._restarts: dict[int, float] = {}  # due time, by rank
        self._incarnations: dict[int, int] = {}  # newest incarnation that was started, by rank
        self._deaths: list[tuple[float, int]] = []  # time and rank
        self._killed: set[int] = set()  # learners that were killed here, and whose end is not known yet
        self._requests = 0  # of learners to start the team again
        self._requested: tuple[int, ControlMessage] | None = None  # the last one, which is to be answered
        self._finished = False
        self._heartbeat_sent = 0.0

    def run(self) -> None:
        """Runs until all learners have finished. Raises LearnerLost or InputError if something else ends the run."""
        try:
            self._await_nodes()
            for rank in range(self._spec.size):
                self._start(rank, 0)
            while self._running - (self._restarts.keys() if self._finished else set()):  # the rest has nothing to do
                self._poll()
            if self._preempted_since is not None:
                raise Preempted("the same command continues from the last checkpoint")
            self._notify_hosts({"do": "stop"})
        except Preempted as error:
            self._notify_hosts({"do": "stop", "error": str(error), "preempted": True})
            raise
        except LearnerLost as error:
            nodes = {"nodes": error.nodes} if isinstance(error, HostLost) else {}
            self._notify_hosts({"do": "stop", "error": error.reason, "lost": error.rank, **nodes})
            raise
        except BaseException as error:
            self._notify_hosts({"do": "stop", "error": f"host 0 stopped: {error or type(error).__name__}"})
            raise
        finally:
            self._workers.end()
            self._server.close()

    def _poll(self) -> None:
        self._tick()
        self._check_preemption()
        for connection, message in self._server.receive(self._seconds_to_wait()):
            self.handle(connection, message)
            self._tick()
            self._heartbeat(self._clock.now())  # a burst of messages must not delay heartbeats
        ended = self._workers.ended()
        if self._coordinator is not None:
            self._coordinator.finish(
                end.rank
                for end in ended
                if end.status in (0, EXIT_PREEMPTED) and end.incarnation == self._incarnations.get(end.rank)
            )
        for exit_status in ended:
            self._on_end(exit_status, self._name)
        if self._requested is not None and not self._killed:
            self._answer_request(*self._requested)
        now = self._clock.now()
        for rank, due in list(self._restarts.items()):
            if due <= now:
                del self._restarts[rank]
                self._restart(rank)
        self._check_heartbeats(now)

    def _check_preemption(self) -> None:
        """Asks the learners to end if this process has been asked. Raises Preempted if they take too long."""
        if self._preempted():
            self._preempt()
        if self._preempted_since is not None and self._clock.now() - self._preempted_since > self._spec.grace:
            raise Preempted(
                f"no checkpoint within {self._spec.grace:g} s (launcher.grace); the same command continues from the "
                "one before"
            )

    def _preempt(self) -> None:
        """Asks all learners to end, unless they were asked before."""
        if self._preempted_since is None:
            log.info("asked to end by a signal: the learners save a checkpoint")
            self._preempted_since = self._clock.now()
            self._running -= self._restarts.keys()
            self._restarts.clear()
            self._workers.preempt()
            self._notify_hosts({"do": "preempt"})

    def _seconds_to_wait(self) -> float:
        """Returns the seconds until something is due even if no message comes."""
        now = self._clock.now()
        waits = [self._poll_interval, *(max(due - now, 0.0) for due in self._restarts.values())]
        return min([*waits, HEARTBEAT_TIMEOUT / 5] if self._hosts or self._last_heard else waits)

    def _tick(self) -> None:
        if (stopped := self._clock.tick()) > 1:
            log.warning("the supervisor was stopped for %.1f s", stopped)

    # learners

    def _start(self, rank: int, incarnation: int) -> None:
        self._running.add(rank)
        self._incarnations[rank] = incarnation
        node = rank // self._spec.learners
        if node == 0:
            self._workers.start(rank, incarnation, self._run)
        else:
            self._server.send(self._hosts[node].connection, {"do": "start", "rank": rank, "incarnation": incarnation})

    def _schedule(self, rank: int, after: float) -> None:
        """Schedules the start of a learner's next incarnation, in `after` seconds."""
        self._running.add(rank)
        self._incarnations[rank] += 1
        self._restarts[rank] = self._clock.now() + after

    def _restart(self, rank: int) -> None:
        incarnation = self._incarnations[rank]
        if self._coordinator is not None:
            log.info("restarting learner %d", rank)
            self._coordinator.expect(rank, incarnation)
        self._start(rank, incarnation)

    def _restart_team(self, reason: str, after: float = 0.0) -> None:
        """Ends all learners, and starts them again from the last checkpoint, in `after` seconds.

        The new team has another identity. It rejects messages of the old one, and the old one's messages are ignored.
        """
        log.warning("%s: all learners start again from the last checkpoint", reason)
        self._requested = None
        self._killed.clear()
        self._run = self._new_run()
        self._notify_hosts({"do": "restart", "run": self._run})  # which end their learners at the same time
        self._workers.end(self._while_learners_end)
        for host in self._hosts.values():
            host.last_heard = self._clock.now()  # what it has sent meanwhile is not read yet
        self._connections.clear()
        self._ranks.clear()
        self._last_heard.clear()
        for rank in sorted(self._running - self._restarts.keys()):
            self._schedule(rank, after)
        begin = {rank: self._incarnations[rank] for rank in sorted(self._restarts)}
        if self._coordinator is not None:
            self._coordinator = Coordinator(self._spec.size, self._send, begin)
            self._restarts.clear()
            for rank, incarnation in begin.items():
                self._start(rank, incarnation)

    def _while_learners_end(self) -> None:
        self._clock.tick()
        self._heartbeat(self._clock.now())

    def _on_end(self, exit_status: ExitStatus, host: str) -> None:
        """Handles the end of a learner's process."""
        if exit_status.incarnation != self._incarnations.get(exit_status.rank):
            return  # reported by another host when the team was restarted
        how = f"on {host} {describe(exit_status.status)}"
        self._last_heard.pop(exit_status.rank, None)
        self._running.discard(exit_status.rank)
        self._killed.discard(exit_status.rank)
        if exit_status.status == EXIT_PREEMPTED:
            self._preempt()
        if exit_status.status == 0 or self._preempted_since is not None:
            self._finished = True
            if self._coordinator is not None:
                self._coordinator.leave(exit_status.rank, None)
        elif exit_status.status == EXIT_USER_ERROR:
            raise InputError(f"learner {exit_status.rank} on {host} failed: see its message above")
        elif self._coordinator is None:
            self._lose_in_step(exit_status, how)
        else:
            deaths = self._recent_deaths().count(exit_status.rank)
            self._lose(exit_status.rank, how, self._spec.restart_seconds(exit_status.rank, deaths))

    def _recent_deaths(self) -> list[int]:
        """Returns the rank of each death that counts against `LaunchSpec.max_restarts`."""
        since = self._clock.now() - RESTART_WINDOW
        return [rank for time, rank in self._deaths if time >= since]

    def _lose_in_step(self, end: ExitStatus, how: str) -> None:
        """Starts a synchronous team again, as it cannot go on without one of its learners.

        Raises:
            LearnerLost: that was done as often as allowed.
        """
        after = self._spec.restart_seconds(end.rank, len(self._recent_deaths()))
        self._deaths.append((self._clock.now(), end.rank))
        if after is None:
            raise LearnerLost(end.rank, how, own_error=end.status > 0 and end.status != EXIT_LOST)
        self._running, self._finished = set(range(self._spec.size)), False
        self._restart_team(f"learner {end.rank} {how}", after)

    def _lose(self, rank: int, how: str, restart_after: float | None) -> None:
        """Removes a learner that died, and schedules its restart unless `restart_after` is None."""
        assert self._coordinator is not None
        self._deaths.append((self._clock.now(), rank))
        self._coordinator.leave(rank, how, gone=restart_after is None)
        if restart_after is not None:
            log.warning("learner %d %s; restarting it", rank, how)
            self._schedule(rank, restart_after)
        else:
            if not self._spec.has_sockets():
                how += f" and cannot be restarted, as {self._spec.private_dir} was removed"
            log.warning("learner %d %s; the others continue without it", rank, how)
            if not self._running and not self._finished:
                raise LearnerLost(rank, f"{how}, as all others had before")
        if self._finished:
            return
        if self._spec.together and restart_after is not None:
            self._restart_team(f"learner {rank} {how}")
        elif self._coordinator.weights_lost:
            self._restart_team(f"learner {rank} was the last with the updates since the last checkpoint")

    def _answer_request(self, rank: int, message: ControlMessage) -> None:
        """Starts the team again, as a learner has asked.

        Raises:
            LearnerLost: nobody has died, or somebody is gone for good without whom the strategy cannot go on.
        """
        if self._preempted_since is not None:  # the rest of a team that was asked to end: it may lack a learner
            raise Preempted("the same command continues from the last checkpoint")
        self._requests += 1
        lost, reason = message.get("lost"), str(message.get("reason"))
        if isinstance(lost, int) and self._running != set(range(self._spec.size)):
            raise LearnerLost(lost, reason)
        if self._requests > len(self._deaths):  # only a death can take weights away
            raise LearnerLost(rank, f"cannot go on: {reason}")
        self._restart_team(f"learner {lost} {reason}" if lost is not None else f"learner {rank}: {reason}")

    # messages

    def handle(self, connection: bytes, message: ControlMessage) -> None:
        """Handles a message of a learner, or of an agent."""
        op = message.get("op")
        if op == "hello":
            self._register(connection, message)
        elif op == "node":
            if all(host.connection != connection for host in self._hosts.values()):
                self._server.send(connection, {"do": "stop", "error": "the run has started without this host"})
        elif connection in self._ranks:
            if self._ranks[connection] in self._last_heard:
                self._last_heard[self._ranks[connection]] = self._clock.now()
            if op == "bye":
                self._last_heard.pop(self._ranks[connection], None)
            if op == "live":
                self._last_heard[self._ranks[connection]] = self._clock.now()
            else:
                self._serve(self._ranks[connection], message)
        else:
            self._on_node(connection, message)

    def _register(self, connection: bytes, message: ControlMessage) -> None:
        """Registers a learner. Rejects everyone who is not an expected learner of this run."""
        rank, incarnation, address = message.get("rank"), message.get("incarnation"), message.get("address")
        member = self._coordinator.members.get(rank) if self._coordinator and isinstance(rank, int) else None
        expected = message.get("run") == self._run and member is not None and member.incarnation == incarnation
        if not expected or not isinstance(address, str) or not isinstance(incarnation, int):
            self._server.reject(f"a client that is not of this run and claims to be learner {rank!r:.20}")
            return
        assert self._coordinator is not None and isinstance(rank, int)
        self._ranks.pop(self._connections.get(rank, b""), None)
        self._connections[rank], self._ranks[connection] = connection, rank
        self._coordinator.register(rank, incarnation, address)

    def _serve(self, rank: int, message: ControlMessage) -> None:
        assert self._coordinator is not None
        if rank not in self._coordinator.members:
            return  # it has just died
        if message.get("op") == "restart":
            self._requested = rank, message  # answered after the deaths of which it speaks are known
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
            if self._preempted():
                raise Preempted(BEFORE_START)
            left = deadline - self._clock.now()
            if left <= 0:
                rejected = self._server.rejected
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
        self._notify_hosts({"do": "run", "run": self._run, **self._addresses})

    def _register_node(self, connection: bytes, message: ControlMessage) -> None:
        if message.get("op") != "node" or any(host.connection == connection for host in self._hosts.values()):
            return
        spec, node, name = self._spec, message.get("node"), str(message.get("host"))
        earlier = self._hosts.get(node) if isinstance(node, int) else None
        options = [message.get(key) for key in ("nodes", "learners", "in_step")]
        wrong = None
        if options != [spec.nodes, spec.learners, spec.synchronous]:
            wrong = (
                f"host {node} was started with different learners, nodes or strategy than host 0: they must be equal"
            )
        elif not isinstance(node, int) or not 0 < node < spec.nodes or (earlier and earlier.name != name):
            wrong = f"node_rank={node} is used by another host: give each host its own"
        if wrong:
            self._server.send(connection, {"do": "stop", "error": wrong})
            raise InputError(wrong)
        if earlier:
            again = f"the command with node_rank={node} has been started again on this host, so this one ends"
            self._server.send(earlier.connection, {"do": "stop", "error": again})
        self._hosts[int(str(node))] = Host(name, connection, self._clock.now())

    def _on_node(self, connection: bytes, message: ControlMessage) -> None:
        """Handles an agent's report, heartbeat, or word that its host has been asked to end."""
        for host in self._hosts.values():
            if host.connection == connection:
                host.last_heard = self._clock.now()
                if message.get("op") == "ended":
                    self._on_end(ExitStatus(message["rank"], message["incarnation"], message["status"]), host.name)
                elif message.get("op") == "preempt":
                    self._preempt()
                return
        self._server.reject("a message of a client that is neither a learner nor a host of this run")

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
        self._killed.add(rank)
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
            self._killed.discard(rank)
            self._restarts.pop(rank, None)
            if self._coordinator is None:
                raise HostLost(rank, how, [0, *sorted(self._hosts)])
            self._lose(rank, how, None)

    def _notify_hosts(self, message: ControlMessage) -> None:
        for host in self._hosts.values():
            self._server.send(host.connection, message)
