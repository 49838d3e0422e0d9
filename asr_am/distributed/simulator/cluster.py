"""Runs of a virtual cluster: learners start, crash and restart at virtual times, as the supervisor decides."""

from __future__ import annotations

import gc
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from asr_am.distributed.awake_clock import AwakeClock
from asr_am.distributed.cluster_config import Cluster, Crash, Workload
from asr_am.distributed.coordinator import ControlMessage, Coordinator
from asr_am.distributed.launch_spec import HEARTBEAT_TIMEOUT, ExitStatus, LaunchSpec, WireDtype
from asr_am.distributed.membership import Membership, apply_event
from asr_am.distributed.node_agent import NodeAgent
from asr_am.distributed.simulator.collectives import Collectives
from asr_am.distributed.simulator.control import SIM_POLL_INTERVAL, SimAgentConnection, SimControlClient, SimServer
from asr_am.distributed.simulator.messaging import FLOAT_BYTES, SimMessaging
from asr_am.distributed.simulator.network import SimNetwork
from asr_am.distributed.simulator.scheduler import Scheduler, SimProcess, SimTask
from asr_am.distributed.simulator.sim_learner import SimLearner, random_stream
from asr_am.distributed.simulator.team import SimTeam
from asr_am.distributed.supervisor import Supervisor
from asr_am.distributed.team import CommStats
from asr_am.distributed.wire_dtype import WIRE_DTYPES, mean_in_order

log = logging.getLogger(__name__)
T = TypeVar("T")
KILLED = -9  # exit status of a process after SIGKILL
TERMINATE_GRACE = 10.0  # virtual seconds in which the survivors of a synchronous team notice a loss and end
CONNECT_TIMEOUT = 60.0  # virtual seconds in which all learners must connect


@dataclass(frozen=True)
class SimLaunchSpec(LaunchSpec):
    """A launch whose restart times are those of the last crash of each learner.

    Attributes:
        restarts: seconds until a learner is restarted that died now, by rank. None: never.
    """

    restarts: dict[int, float | None] = field(default_factory=dict)

    def restart_seconds(self, rank: int, deaths: int) -> float | None:
        return self.restarts.get(rank, self.restart_after)


def _serve_barriers(barriers: Coordinator, connection: bytes, message: ControlMessage) -> None:
    rank, incarnation = map(int, connection.split(b"."))
    member = barriers.members.get(rank)
    if member is None or member.incarnation != incarnation:
        return  # of the team before, which its host has not ended yet
    if message["op"] == "hello":
        barriers.register(rank, message["incarnation"], message["address"])
    elif message["op"] != "live":
        barriers.handle(rank, message)


def _given(host: SimHost, begin: object) -> SimHost:
    return host


class SimHost:
    """The learners' processes on one virtual host (`supervisor.Workers`)."""

    def __init__(self, cluster: SimCluster, ranks: range, on_end: Callable[[], None]) -> None:
        self._cluster, self.ranks, self._on_end = cluster, ranks, on_end
        self._ended: list[ExitStatus] = []

    def start(self, rank: int, incarnation: int, run: str) -> None:
        self._cluster.start(self._cluster.learners[rank], incarnation, run)

    def ended(self) -> list[ExitStatus]:
        ended, self._ended = self._ended, []
        return sorted(ended, key=lambda end: (end.status >= 0, end.rank))

    def kill(self, rank: int) -> None:
        """Kills a learner soon: only the event loop can."""
        scheduler, learner = self._cluster.scheduler, self._cluster.learners[rank]
        scheduler.call_at(scheduler.now, partial(self._cluster.end, learner, KILLED, "was killed", learner.incarnation))

    def preempt(self) -> None:
        raise RuntimeError("a virtual cluster is not preempted")

    def end(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        if self._cluster.in_step:
            self._await_survivors(meanwhile)
        for rank in self.ranks:
            self.kill(rank)
        self._cluster.scheduler.sleep(0.0)
        self._ended.clear()

    def _await_survivors(self, meanwhile: Callable[[], None]) -> None:
        """Waits until the learners of a synchronous team have saved their last step, and have ended."""
        scheduler, learners = self._cluster.scheduler, self._cluster.learners
        end = scheduler.now + TERMINATE_GRACE
        while scheduler.now < end and any(
            learners[rank].alive and learners[rank].stopped_until <= scheduler.now for rank in self.ranks
        ):
            scheduler.sleep(SIM_POLL_INTERVAL)
            meanwhile()

    def report(self, learner: SimLearner, status: int) -> None:
        """Notes that a process has ended."""
        self._ended.append(ExitStatus(learner.rank, learner.incarnation, status))
        self._on_end()


class SimCluster:
    """A virtual cluster for one run. The same seed gives the same run, to the last bit.

    The supervisor and the agents are those of real processes. By default the control plane takes no virtual time, and
    an exception of a learner ends the run. With `control_latency` and `exit_status` a launch is as one of real
    processes: control messages take time, learners send heartbeats, average by messages, and have an exit status.

    Attributes:
        hardware: the cluster that is simulated, with its faults.
        workload: the model whose computing time and size is simulated.
        seed: seed of all random streams.
        learners: state of each learner, by rank.
        learner_hosts: their hosts, by rank.
        scheduler, network, collectives, messaging, server: the parts of the simulator.
    """

    def __init__(
        self, hardware: Cluster, workload: Workload, learners: int, seed: int, model_elements: int | None = None, *,
        scheduler: Scheduler | None = None, control_latency: float | None = None,
        exit_status: Callable[[BaseException], int] | None = None, wire: WireDtype = "float32",
    ) -> None:  # fmt: skip
        """Builds the cluster.

        Args:
            model_elements: number of elements of the model that is trained. Needed if the workload has a size in bytes:
                messages are then timed as if the model had that size.
            scheduler: the virtual clock, if several launches share it.
            control_latency: mean virtual seconds of a control message. None: the control plane takes no time.
            exit_status: returns the exit status of a learner after an exception. None: it ends the run.
            wire: type in which weights and gradients are sent.

        Raises:
            InputError: the cluster has too few devices, or the workload has no figures for the cluster's device.
        """
        hardware.check(learners)
        workload.check(hardware.device)
        if workload.bytes is not None and model_elements is None:
            raise ValueError("the workload has a size in bytes: model_elements must be given")
        self.hardware, self.workload, self.seed, self._model_elements = hardware, workload, seed, model_elements
        self.wire = WIRE_DTYPES[wire]
        self.scheduler = scheduler or Scheduler()
        self.learners = [SimLearner(rank=rank, host=hardware.host_of(rank)) for rank in range(learners)]
        self.learner_hosts = tuple(learner.host for learner in self.learners)
        self.network = SimNetwork(hardware, self.scheduler)
        self.collectives = self._make_collectives()
        streams = [random_stream(seed, rank, 0, "mail") for rank in range(learners)]
        self.messaging = SimMessaging(
            self.scheduler, self.learners, self.network, self.modelled_bytes, hardware.faults, streams, self.wire
        )
        self.control_latency, self._exit_status = control_latency, exit_status
        self._control_delays = random_stream(seed, 0, 0, "control")
        self.server = SimServer(self.scheduler, None if control_latency is None else self._control_arrival)
        self.processes: list[tuple[SimProcess, SimTask]] = []  # the supervisor and the agents, by host
        self._learner_server = self.server
        self._run = ""  # identity of the present team
        self._barriers: Coordinator | None = None  # of a synchronous launch
        self._hosts: list[SimHost] = []
        self._main: Callable[[SimTeam], Any] | None = None
        self._results: dict[int, Any] = {}
        self._last_mean: tuple[object, Tensor] | None = None

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.scheduler.now

    @property
    def comm_stats(self) -> list[CommStats]:
        """Communication statistics of each learner, by rank."""
        return [learner.comm_stats for learner in self.learners]

    def modelled_bytes(self, count: float) -> float:
        """Returns the bytes of the workload that `count` bytes of the trained model stand for."""
        if self.workload.bytes is None or self._model_elements is None:
            return count
        return count * self.workload.bytes / (self._model_elements * FLOAT_BYTES)

    def run(self, main: Callable[[SimTeam], T]) -> dict[int, T]:
        """Runs `main` once for each learner, and again for each restart.

        Args:
            main: the training task of one incarnation of a learner.

        Returns:
            What `main` returned, by rank, without learners that did not finish.

        Raises:
            LearnerLost: no learner was left.
            RuntimeError: all learners wait for each other.
            Exception: whatever `main` raises.
        """
        supervisor = self.launch(main)
        thresholds = gc.get_threshold()
        gc.set_threshold(*thresholds[:2], 10 * thresholds[2])  # a full collection looks at all learners' models
        try:
            self.scheduler.run(lambda: supervisor.finished)
        finally:
            self.scheduler.kill_all()
            gc.set_threshold(*thresholds)
        if supervisor.error is not None:
            raise supervisor.error
        return dict(sorted(self._results.items()))

    def launch(self, main: Callable[[SimTeam], Any], synchronous: bool = False) -> SimTask:
        """Starts the supervisor, and the agents on other hosts. Returns the supervisor's task.

        Args:
            synchronous: a death starts the team again. A coordinator that answers at once then stands for the barriers
                of torch.distributed.
        """
        if self._main is not None:
            raise RuntimeError("a SimCluster runs once; create another one")
        self._main = main
        size, faults = len(self.learners), self.hardware.faults
        detailed = self.control_latency is not None
        per_host = min(size, self.hardware.devices_per_host) if detailed else size
        spec = SimLaunchSpec([], per_host, synchronous, -(-size // per_host), address="virtual")
        self._spec = spec
        self._hosts = [
            SimHost(self, range(first, min(first + per_host, size)), self.server.wake if first == 0 else lambda: None)
            for first in range(0, size, per_host)
        ]
        clock = partial(AwakeClock, HEARTBEAT_TIMEOUT / 5 if detailed else math.inf, lambda: self.scheduler.now)
        supervisor = Supervisor(
            spec, self.server, self._hosts[0], clock(), "host 0", lambda: secrets.token_hex(16), {},
            SIM_POLL_INTERVAL if detailed else math.inf,
        )  # fmt: skip
        self.server.handle = supervisor.handle
        if synchronous:
            self._learner_server = SimServer(self.scheduler, None)
        self._spawn_process(supervisor.run, "supervisor")
        for node, host in list(enumerate(self._hosts))[1:]:
            name = f"host {node}"
            connection = SimAgentConnection(self.scheduler, self.server, name.encode(), node)
            agent = NodeAgent(replace(spec, node_rank=node), connection, partial(_given, host), clock(), name)
            self._spawn_process(agent.run, f"agent of {name}")
        for crash in faults.crashes:
            self.scheduler.call_at(self.now + crash.at, partial(self._crash, crash))
        return self.processes[0][1]

    def _spawn_process(self, function: Callable[[], object], name: str) -> None:
        process = SimProcess()
        task = self.scheduler.spawn(function, name, seed=0)
        task.process = process
        self.processes.append((process, task))

    def _control_arrival(self, now: float, host: int) -> float:
        assert self.control_latency is not None
        delay = self.control_latency * self._control_delays.uniform(0.5, 1.5)
        return max(now + delay, self.network.reachable_at(now, 0, host))

    def spawn(self, learner: SimLearner, function: Callable[[], object], name: str) -> SimTask:
        """Starts a task of a learner. Its errors are raised in the training task."""
        purpose = f"torch {len(learner.tasks)} {name}"
        seed = random_stream(self.seed, learner.rank, learner.incarnation, purpose).integers(2**62)
        task = self.scheduler.spawn(function, f"learner {learner.rank} {name!r}", int(seed))
        task.process = learner
        task.on_end = lambda task: self.scheduler.throw(learner.training, task.error) if task.error else None
        learner.tasks.append(task)
        return task

    # processes of learners

    def start(self, learner: SimLearner, incarnation: int, run: str) -> None:
        """Starts a learner's process. Called by its host."""
        if run != self._run:
            self._begin_team(incarnation, run)
        learner.incarnation, learner.alive, learner.stopped_until = incarnation, True, 0.0
        learner.tasks.clear()
        if incarnation:
            self.messaging.restart(learner.rank)
        team = self.connect(learner, run)
        hello = {"run": run, "rank": learner.rank, "incarnation": incarnation, "address": f"sim:{learner.rank}"}
        if self.control_latency is None:
            learner.control.notify("hello", **hello)
        task = self.spawn(learner, partial(self._run_learner, team, hello), "training")
        task.waited = learner.waited
        task.on_end = partial(self._on_training_end, learner)

    def _begin_team(self, incarnation: int, run: str) -> None:
        """Forgets what a team has left whose learners were all ended."""
        if self._run:
            self.collectives = self._make_collectives()
        self._run = run
        if self._learner_server is not self.server:
            self._barriers = Coordinator(
                len(self.learners), lambda rank, message: self.learners[rank].control.connection.receive(message),
                dict.fromkeys(range(len(self.learners)), incarnation),
            )  # fmt: skip
            self._learner_server.handle = partial(_serve_barriers, self._barriers)

    def _make_collectives(self) -> Collectives:
        return Collectives(self.scheduler, self.learners, self.network, self.hardware.overlap_speed)

    @property
    def in_step(self) -> bool:
        """True for a synchronous launch as of real processes, whose learners end when one is lost."""
        return self._barriers is not None

    def connect(self, learner: SimLearner, run: str) -> SimTeam:
        """Returns the team of a new process, which the supervisor does not know yet."""
        learner.run, learner.membership = run, (membership := Membership(learner.rank, len(self.learners)))
        peers = self.messaging.peers(learner.rank)
        learner.control = SimControlClient(
            self.scheduler, self._learner_server, f"{learner.rank}.{learner.incarnation}".encode(), learner.host,
            lambda event: apply_event(membership, event, peers), partial(self._fail, learner, learner.incarnation),
        )  # fmt: skip
        return SimTeam(self, learner, learner.control, run)

    def _run_learner(self, team: SimTeam, hello: dict[str, Any]) -> object:
        assert self._main is not None
        if self.control_latency is not None:
            team.connect(hello, CONNECT_TIMEOUT)
        return self._main(team)

    def _fail(self, learner: SimLearner, incarnation: int, error: Exception) -> None:
        if learner.alive and learner.incarnation == incarnation:
            self.scheduler.throw(learner.training, error)

    def _on_training_end(self, learner: SimLearner, task: SimTask) -> None:
        """Ends a process whose training task has ended."""
        if task.killed:
            return
        error = task.error or task.pending
        if error is not None and self._exit_status is None:
            raise error
        if error is None:
            self._results[learner.rank] = task.result
            if self.control_latency is not None:  # else the supervisor is told of the end at once
                learner.control.notify("bye")
        status = 0 if error is None or self._exit_status is None else self._exit_status(error)
        self.end(learner, status, "has left the team" if status == 0 else "failed", learner.incarnation)

    def end(self, learner: SimLearner, status: int, reason: str, incarnation: int) -> None:
        """Ends a learner's process, with its tasks. Called by the event loop."""
        if not learner.alive or learner.incarnation != incarnation:
            return
        learner.alive = False
        learner.control.connection.closed = True
        self.messaging.lose(learner.rank)
        if learner.run == self._run:  # else its host has ended it late, and a new team has begun
            if self._barriers is not None:
                self._barriers.leave(learner.rank, None if status == 0 else reason)
            self.collectives.lose(learner.rank, reason)
        for task in learner.tasks:
            self.scheduler.kill(task)
        next(host for host in self._hosts if learner.rank in host.ranks).report(learner, status)

    def _crash(self, crash: Crash) -> None:
        learner = self.learners[crash.learner]
        if learner.alive:
            learner.comm_stats.faults["crash"] += 1
            self._spec.restarts[learner.rank] = crash.restart_after
            self.end(learner, KILLED, "crashed", learner.incarnation)

    def mean_of(self, rows: dict[int, Tensor]) -> Tensor:
        """Returns the mean of these rows, computed once for all learners that have them."""
        if self._last_mean is None or self._last_mean[0] is not rows:
            self._last_mean = rows, mean_in_order(rows.values())
        return self._last_mean[1]
