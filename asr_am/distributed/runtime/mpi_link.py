"""MPI in one process: its start, the processes that live, and what the communication thread progresses.

While a team is connected, all calls of MPI are made in callbacks of the event loop, one at a time, for which
MPI_THREAD_SERIALIZED is enough. MPI has no descriptor to wait for, so the communication thread polls: often for a while
after anything has happened, as an answer may come soon, and each millisecond where nothing happens. A thread that
begins to wait polls itself for a moment, as a short message may come sooner than threads change.

When a process dies, an MPI with ULFM (Open MPI 5 with `mpirun --with-ft ulfm`) lets calls of the others fail. They
leave their team, agree on who lives, and make the next team. Other MPIs end all processes.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from asr_am.distributed.leases import ProcessLost
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.errors import InputError

COMMAND = "mpirun -n 4 python -m asr_am.stages train launcher=mpi learners=4 ..."


def start_mpi() -> Any:
    """Starts MPI, and returns the module `mpi4py.MPI`.

    Raises:
        InputError: mpirun has not started this process, mpi4py or its MPI is missing, allows no threads, or does not
            know the others.
    """
    if "RANK" not in os.environ:
        raise InputError(f"launcher=mpi: mpirun has not started this process; use {COMMAND}")
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # `MpiProcesses` does
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"launcher=mpi: mpi4py cannot be loaded ({str(error).splitlines()[0]}); install it with pip install "
            "'.[mpi]', or for your cluster's MPI with pip install mpi4py"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise InputError("launcher=mpi: this MPI allows one thread only; use one with MPI_THREAD_SERIALIZED")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if MPI.COMM_WORLD.size != size:
        raise InputError(
            f"launcher=mpi: mpi4py's MPI sees {MPI.COMM_WORLD.size} processes where {size} were started: use the "
            "mpirun of the MPI that mpi4py was installed for"
        )
    return MPI


SHORT_PAUSE, LONG_PAUSE = 50e-6, 1e-3  # seconds between two polls
HELPED_PAUSE = 300e-6  # where a waiting thread polls, too
ATTENTIVE = 5e-3  # seconds of short pauses after anything has happened
SPARE_PAUSE = 10e-3  # seconds between two polls of a process without a rank
DRAIN = 2.0  # seconds for requests of a lost team to end


class MpiProcesses:
    """The processes that live. The first of them are the ranks of the team, and the others are spares.

    Attributes:
        mpi: the module `mpi4py.MPI`.
        restarts: number of deaths since a team has finished.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi, self.restarts = mpi, 0
        self._live = mpi.COMM_WORLD.Dup()
        self._done = True  # no team is connected
        self._noticed = False  # a call has failed because a process has died

        def at_exit() -> None:
            """Ends all processes after an error of this one, which they must not wait for."""
            if not self._done:
                mpi.COMM_WORLD.Abort(1)
            elif self._live.size == mpi.COMM_WORLD.size:  # else Open MPI 5.0 may hang there
                mpi.Finalize()

        atexit.register(at_exit)

    def make_team(self, size: int) -> Any:
        """Returns the communicator of the first `size` processes, or None for a spare.

        Raises:
            ProcessLost: there are fewer.
        """
        if self._live.size < size:
            raise ProcessLost(self._live.size, self._live.size)
        self._done = False
        comm = self._live.Split(0 if self._live.rank < size else self.mpi.UNDEFINED, self._live.rank)
        return None if comm == self.mpi.COMM_NULL else comm

    def start_leaving(self) -> Any:
        """Returns the request that is complete when all have called this: MPI must not be ended before."""
        return self._live.Ibarrier()

    def wait_as_spare(self) -> None:
        """Waits for the end of the team. Raises ProcessLost as `end_team` does."""
        finished = True
        try:
            _wait(self.start_leaving(), SPARE_PAUSE)
        except self.mpi.Exception:
            finished = False
        self.end_team(finished)

    def is_broken(self, error: BaseException | None = None) -> bool:
        """Returns True if this or another process has noticed that one has died.

        Args:
            error: of this team. It may come before anything else tells of the death.
        """
        kinds = (self.mpi.ERR_PROC_FAILED, self.mpi.ERR_PROC_FAILED_PENDING, self.mpi.ERR_REVOKED)
        if isinstance(error, self.mpi.Exception) and error.Get_error_class() in kinds:
            self._noticed = True
        try:
            return bool(self._noticed or self._live.Is_revoked() or self._live.Get_failed().size)
        except NotImplementedError:  # an MPI without ULFM
            return False

    def end_team(self, finished: bool) -> None:
        """Ends the team together with all other processes, and without those that have died.

        Args:
            finished: the team has finished at this process.

        Raises:
            ProcessLost: it has not finished at all of them.
        """
        agreed = np.array([finished and not self.is_broken()], np.int32)
        try:
            if not agreed[0]:
                self._live.Revoke()  # spares notice it, too
            _wait(self._live.Iagree(agreed))
        except NotImplementedError:  # as in `is_broken`
            pass
        except self.mpi.Exception:  # at all of them
            agreed[0] = 0
        self._done = True
        if not agreed[0]:
            raise self._lose()
        self.restarts = 0

    def _lose(self) -> ProcessLost:
        self.restarts += 1
        self._noticed = False
        before = self._live
        before.Revoke()
        self._live = before.Shrink()  # keeps a core busy until all are here
        gone = self.mpi.Group.Difference(before.group, self._live.group)
        rank = self.mpi.Group.Translate_ranks(gone, [0], before.group)[0] if gone.size else before.rank
        return ProcessLost(rank, self._live.size)


def _wait(request: Any, pause: float = LONG_PAUSE) -> None:
    """Waits for a request without a busy core, which others need to come to this point."""
    while not request.Test():
        time.sleep(pause)


@cache
def mpi_processes() -> MpiProcesses:
    """Returns the processes that mpirun has started and that live. Raises InputError as `start_mpi`."""
    return MpiProcesses(start_mpi())


class MpiLink:
    """Frames between all ranks of a team (short messages that keep their order), and requests under way.

    Made before the event loop is started. `handlers` has a function of sender and bytes for each kind of frame.
    """

    def __init__(self, processes: MpiProcesses, team: Any, event_loop: EventLoop, wait_monitor: WaitMonitor) -> None:
        self.processes, self._team, self._event_loop = processes, team, event_loop
        self._made: list[Any] = [team]  # communicators
        self._frames, self._payloads = self.duplicate(team), self.duplicate(team)
        self.rank, self.size = team.rank, team.size
        self.handlers: dict[int, Callable[[int, bytes], None]] = {}
        self._pending: list[tuple[Any, object, Callable[[], None]]] = []  # request, its buffer, what follows
        self._attentive_until = 0.0
        self._helped = False  # a waiting thread has polled since the last poll
        event_loop.call(self._poll)
        wait_monitor.progress = lambda: event_loop.try_here(self._help)

    # called in callbacks of the event loop

    def send(self, to: int, kind: int, frame: bytes, payload: np.ndarray | None = None) -> None:
        """Sends a frame, and after it a payload, which must not be changed before it has arrived."""
        if to == self.rank:
            self._event_loop.call(lambda: self.handlers[kind](to, frame))
            return
        self.track(self._frames.Isend(frame, to, kind), frame)
        if payload is not None:
            self.track(self._payloads.Isend(payload, to), payload)

    def receive_payload(self, source: int, payload: np.ndarray, done: Callable[[], None]) -> None:
        """Receives the payload of the frame that is being handled. Calls `done` when it is there."""
        self.track(self._payloads.Irecv(payload, source), payload, done)

    def track(self, request: Any, buffer: object, done: Callable[[], None] = lambda: None) -> None:
        """Calls `done` when a request is complete. Keeps its buffer until then."""
        self._pending.append((request, buffer, done))
        self._attentive_until = time.monotonic() + ATTENTIVE

    @property
    def idle(self) -> bool:
        return not self._pending

    def duplicate(self, comm: Any) -> Any:
        self._made.append(comm.Dup())
        return self._made[-1]

    def make_group(self, ranks: Sequence[int]) -> Any:
        """Returns the communicator of these ranks, which call this at the same time."""
        self._made.append(self._team.Create_group(self._team.group.Incl(list(ranks))))
        return self._made[-1]

    def abandon(self, error: BaseException | None) -> None:
        """Ends all requests if a process has died. Call it after the event loop has stopped."""
        if not self.processes.is_broken(error):
            return
        for comm in self._made:
            comm.Revoke()
        end = time.monotonic() + DRAIN
        while self._pending and time.monotonic() < end:
            self._pending = [each for each in self._pending if not self._has_ended(each[0])]

    def _has_ended(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self.processes.mpi.Exception:
            return True

    def _poll(self) -> None:
        """Polls, and arranges the next poll."""
        if self._helped:
            pause = HELPED_PAUSE
        else:
            self._progress()
            pause = SHORT_PAUSE if time.monotonic() < self._attentive_until else LONG_PAUSE / 2
        self._helped = False
        self._event_loop.after(pause, self._poll)  # waits whole milliseconds for a long pause

    def _help(self) -> None:
        self._helped = True
        self._progress()

    def _progress(self) -> None:
        """Handles all frames that are there and all requests that are complete."""
        mpi = self.processes.mpi
        status, active = mpi.Status(), False
        while (message := self._frames.Improbe(status=status)) is not None:
            frame = bytearray(status.Get_count(mpi.BYTE))
            message.Recv(frame)
            self.handlers[status.Get_tag()](status.Get_source(), bytes(frame))
            active = True
        for pending in list(self._pending):
            request, _, done = pending
            if request.Test():
                self._pending = [other for other in self._pending if other is not pending]
                done()
                active = True
        if active:
            self._attentive_until = time.monotonic() + ATTENTIVE
