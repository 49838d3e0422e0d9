"""`ProcessTeam`: the `Team` of a real process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Literal, NoReturn, Protocol

import torch
from torch import Tensor

from asr_am.distributed.coordinated_backend import Transport
from asr_am.distributed.leases import GradientFn, LearnerLost, Leases, Segment
from asr_am.distributed.membership import Membership
from asr_am.distributed.runtime.event_loop import CommClosed, EventLoop, TeamEvent, TeamLock, WaitMonitor
from asr_am.distributed.runtime.fault_injection import ComputeEmulator
from asr_am.distributed.runtime.step_watch import StepWatch
from asr_am.distributed.team import CommStats, CostKind, Gather, Group, Message, ModelSize, Work
from asr_am.distributed.wire_dtype import rounded

SHUTDOWN_TIMEOUT = 5.0  # seconds for communication tasks to end


class Backend(Protocol):
    """Collectives and control plane: `TorchBackend`, `MpiBackend` or `CoordinatedBackend`."""

    @property
    def world(self) -> Group: ...
    @property
    def waits_on_host(self) -> bool: ...
    def split(self, groups: Sequence[Sequence[int]]) -> Group | None: ...
    def leases(self, segment: Segment, synchronous: bool) -> Leases: ...
    def gather(self, values: Tensor) -> dict[int, Tensor]: ...
    def average(self, x: Tensor) -> Tensor: ...
    def restart_team(self, reason: str, lost: int | None) -> NoReturn: ...
    def confirm(self) -> None: ...
    def close(self) -> None: ...


class LeavingTransport(Transport, Protocol):
    """Messages to other learners: `messaging.Transport` or `mpi_team.MpiTransport`."""

    def send_goodbye(self, lost: int | None) -> None: ...


class ProcessTeam:
    """The `Team` of one process. `connect` creates it, in the thread of the training task.

    Args:
        launch: identity of the run, given by its launcher.
        incarnation: number of restarts of this learner.
        restarts: see `Team.restarts`.
        hosts: index of the host of each rank.
        backend: collectives and control plane.
        wire: type in which weights and gradients travel.
    """

    clock: Literal["wall", "virtual"] = "wall"

    def __init__(
        self, launch: str, incarnation: int, hosts: Sequence[int], comm_stats: CommStats, membership: Membership,
        wait_monitor: WaitMonitor, event_loop: EventLoop, transport: LeavingTransport, backend: Backend,
        compute_emulator: ComputeEmulator, wire: torch.dtype = torch.float32, restarts: int | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.incarnation = membership.rank, membership.size, incarnation
        self.restarts = incarnation if restarts is None else restarts
        self.launch = launch
        self.hosts, self.comm_stats = tuple(hosts), comm_stats
        self.waits_on_host = backend.waits_on_host
        self.ranks, self.rejoins = membership.ranks, membership.rejoins
        self._membership, self._wait_monitor, self._event_loop = membership, wait_monitor, event_loop
        self._transport, self._backend, self._compute_emulator = transport, backend, compute_emulator
        self._wire, self.faults = wire, compute_emulator.faults
        self._step_watch = StepWatch(self.rank, wait_monitor, event_loop)
        self._tasks: list[threading.Thread] = []
        self._closed = False

    def live_ranks(self) -> Sequence[int]:
        self._wait_monitor.check()
        return self._membership.live_ranks()

    def is_gone(self, rank: int) -> bool:
        self._wait_monitor.check()
        return rank in self._membership.gone

    def restart_team(self, reason: str, lost: int | None = None) -> NoReturn:
        self._wait_monitor.ignore(LearnerLost)  # the supervisor ends this process
        self._backend.restart_team(reason, lost)

    def is_loss(self, error: Exception) -> bool:
        return isinstance(error, LearnerLost)

    @contextmanager
    def sigterm_as_loss(self) -> Iterator[None]:
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            lost = LearnerLost(self.rank, "was asked to end, as another one is lost")
            threading.Thread(target=self._wait_monitor.fail, args=(lost,)).start()  # this one may be about to wait

        signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def confirm(self) -> None:
        self._wait_monitor.check()
        self._backend.confirm()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleeps. Ends early if the team is closed or has failed."""
        self._wait_monitor.pause(seconds)

    def simulate_cost(self, kind: CostKind, elements: int, scattered: bool = False) -> None:
        pass

    def modelled_size(self) -> ModelSize | None:
        return None

    def timed(self, gradient: GradientFn) -> GradientFn:
        return self._step_watch.apply(self._compute_emulator.apply(gradient, self.sleep))

    def start_all_reduce_mean(self, x: Tensor, modelled: float | None = None) -> Work:
        self._wait_monitor.check()
        return self._backend.world.start_all_reduce_mean(x, modelled)

    def start_all_gather(self, x: Tensor, lengths: Sequence[int] | None = None) -> Gather:
        self._wait_monitor.check()
        return self._backend.world.start_all_gather(x, lengths)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        self._wait_monitor.check()
        self._backend.world.broadcast(x, source)

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        self._wait_monitor.check()
        return self._backend.split(groups)

    def register_tag(self, tag: str, *lengths: int) -> None:
        self._transport.register_tag(tag, lengths)

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        if to == self.rank or not 0 <= to < self.size:
            raise ValueError(f"learner {self.rank} of {self.size} cannot send to rank {to}")
        self._transport.send(to, tag, clock, tensors)

    def recv(self, tag: str, source: int | None = None, timeout: float | None = None) -> Message | None:
        return self._transport.recv(tag, source, timeout)

    def as_sent(self, x: Tensor) -> Tensor:
        return rounded(x, self._wire)

    def spawn(self, task: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                task()
            except CommClosed:
                pass
            except BaseException as error:
                self._wait_monitor.fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._tasks.append(thread)
        thread.start()
        return thread

    def lock(self) -> TeamLock:
        return TeamLock(self._wait_monitor)

    def event(self) -> TeamEvent:
        return TeamEvent(self._wait_monitor)

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        self._wait_monitor.check()
        self._compute_emulator.max_frames = max(segment.frames, default=0)
        return self._backend.leases(segment, synchronous)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        self._wait_monitor.check()
        return self._backend.gather(values)

    def average(self, x: Tensor) -> Tensor:
        self._wait_monitor.check()
        return self._backend.average(x)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        failure = self._wait_monitor.failure
        self._backend.close()
        self._transport.send_goodbye(failure.rank if isinstance(failure, LearnerLost) else None)
        self._stop()

    def _stop(self) -> None:
        """Ends all threads of the team."""
        self._wait_monitor.close()
        for task in self._tasks:
            task.join(SHUTDOWN_TIMEOUT)
        self._event_loop.stop()
