"""`NodeAgent`: starts and monitors the learners of one host, as the supervisor on host 0 says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from asr_am.distributed.awake_clock import AwakeClock
from asr_am.distributed.coordinator import ControlMessage
from asr_am.distributed.launch_spec import HEARTBEAT_TIMEOUT, LaunchSpec
from asr_am.distributed.leases import HostLost, LearnerLost
from asr_am.distributed.supervisor import BEFORE_START, POLL_INTERVAL, Workers
from asr_am.errors import InputError, Preempted

JOIN_INTERVAL = 1.0  # seconds between two requests, as the supervisor of a larger team may still end and lose one
AGENT_TIMEOUT = 0.8  # of HEARTBEAT_TIMEOUT: a host that is cut off has ended its learners before they are replaced


class AgentConnection(Protocol):
    """The connection of an agent to the supervisor."""

    def receive(self, seconds: float) -> Iterable[ControlMessage]:
        """Yields the messages that have arrived, after waiting `seconds` for the first. The rest stays queued."""
        ...

    def send(self, message: ControlMessage) -> None: ...
    def close(self) -> None: ...


class NodeAgent:
    """Starts and monitors the learners of one host, as the supervisor on host 0 says.

    Args:
        make_workers: returns this host's processes, given the message that begins the run.
        preempted: returns True once this host has been asked to end. The whole run is to save its state then.
    """

    def __init__(
        self, spec: LaunchSpec, connection: AgentConnection, make_workers: Callable[[ControlMessage], Workers],
        clock: AwakeClock, name: str, preempted: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._spec, self._connection, self._make_workers, self._clock = spec, connection, make_workers, clock
        self._name, self._preempted, self._told = name, preempted, False
        self._workers: Workers | None = None
        self._last_sent = -math.inf

    def run(self) -> None:
        """Runs until the supervisor ends the run. Raises LearnerLost or InputError if that was not in good order."""
        try:
            begin = self._join_supervisor()
            self._workers, run = self._make_workers(begin), begin["run"]
            last_heard = self._clock.now()
            while True:
                self._heartbeat()
                self._tell_preemption()
                for message in self._connection.receive(POLL_INTERVAL):
                    last_heard = self._clock.now()
                    if message.get("do") == "start":
                        self._workers.start(message["rank"], message["incarnation"], run)
                    elif message.get("do") == "kill":
                        self._workers.kill(message["rank"])
                    elif message.get("do") == "preempt":
                        self._workers.preempt()
                    elif message.get("do") == "restart":
                        self._workers.end(self._heartbeat)
                        run, last_heard = message["run"], self._clock.now()  # what came meanwhile is not read yet
                    elif message.get("do") == "stop":
                        self._stop(message)
                        return
                for exit_status in self._workers.ended():
                    self._connection.send({"op": "ended", **vars(exit_status)})
                if self._clock.now() - last_heard > AGENT_TIMEOUT * HEARTBEAT_TIMEOUT:
                    raise InputError(f"the supervisor at {self._spec.address} cannot be reached any more: check host 0")
        finally:
            if self._workers is not None:
                self._workers.end()
            self._connection.close()

    def _heartbeat(self) -> None:
        self._clock.tick()
        if self._clock.now() - self._last_sent > HEARTBEAT_TIMEOUT / 5:
            self._last_sent = self._clock.now()
            self._connection.send({"op": "live"})

    def _tell_preemption(self) -> None:
        """Tells the supervisor, once, that this host has been asked to end."""
        if self._preempted() and not self._told:
            self._told = True
            self._connection.send({"op": "preempt"})

    def _join_supervisor(self) -> ControlMessage:
        """Registers this host, and waits until the supervisor has all hosts."""
        spec = self._spec
        deadline = self._clock.now() + spec.timeout
        while self._clock.now() < deadline:
            if self._preempted():
                raise Preempted(BEFORE_START)
            self._connection.send({
                "op": "node", "node": spec.node_rank, "nodes": spec.nodes, "learners": spec.learners,
                "in_step": spec.synchronous, "host": self._name,
            })  # fmt: skip
            for message in self._connection.receive(JOIN_INTERVAL):
                if message.get("do") == "run":
                    return message
                self._stop(message)
        raise InputError(
            f"address={spec.address}: no answer within {spec.timeout:g} s: check that the same command runs there with "
            "node_rank=0 and the same key_file"
        )

    def _stop(self, message: ControlMessage) -> None:
        """Raises the error in a stop message, if there is one."""
        if message.get("preempted"):
            raise Preempted(message["error"])
        if message.get("nodes") is not None:
            raise HostLost(message["lost"], message["error"], message["nodes"])
        if message.get("lost") is not None:
            raise LearnerLost(message["lost"], message["error"])
        if message.get("error"):
            raise InputError(message["error"])
