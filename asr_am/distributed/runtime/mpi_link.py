"""MPI in one process: its start, and the frames and requests that the communication thread progresses.

All calls of MPI after the start are made in the communication thread (MPI_THREAD_SERIALIZED is enough). MPI has no
descriptor to wait for, so the thread polls: often for a while after anything has happened, as an answer may come soon,
and each millisecond where nothing happens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from asr_am.distributed.runtime.event_loop import EventLoop
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

        mpi4py.rc.finalize = False  # the team does: a process that has failed must end at once, and all others with it
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
ATTENTIVE = 5e-3  # seconds of short pauses after anything has happened


class MpiLink:
    """Frames between all processes (short messages that keep their order), and requests under way.

    Made before the event loop is started. `handlers` has a function of sender and bytes for each kind of frame.
    """

    def __init__(self, mpi: Any, event_loop: EventLoop) -> None:
        self.mpi, self._event_loop = mpi, event_loop
        self._frames, self._payloads = mpi.COMM_WORLD.Dup(), mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._frames.rank, self._frames.size
        self.handlers: dict[int, Callable[[int, bytes], None]] = {}
        self._pending: list[tuple[Any, object, Callable[[], None]]] = []  # request, its buffer, what follows
        self._attentive_until = 0.0
        event_loop.call(self._poll)

    # called in the communication thread

    def send(self, to: int, kind: int, frame: bytes, payload: np.ndarray | None = None) -> None:
        """Sends a frame, and after it a payload, which must not be changed before it has arrived."""
        if to == self.rank:
            self._event_loop.call(lambda: self.handlers[kind](to, frame))
            return
        self.track(self._frames.Isend(frame, to, kind), frame)
        if payload is not None and len(payload):
            self.track(self._payloads.Isend(payload, to), payload)

    def receive_payload(self, source: int, payload: np.ndarray, done: Callable[[], None]) -> None:
        """Receives the payload of the frame that is being handled. Calls `done` when it is there."""
        if len(payload):
            self.track(self._payloads.Irecv(payload, source), payload, done)
        else:
            done()

    def track(self, request: Any, buffer: object, done: Callable[[], None] = lambda: None) -> None:
        """Calls `done` when a request is complete. Keeps its buffer until then."""
        self._pending.append((request, buffer, done))
        self._attentive_until = time.monotonic() + ATTENTIVE

    @property
    def idle(self) -> bool:
        return not self._pending

    def _poll(self) -> None:
        """Polls, and arranges the next poll."""
        if self._progress():
            self._attentive_until = time.monotonic() + ATTENTIVE
        if time.monotonic() < self._attentive_until:
            time.sleep(SHORT_PAUSE)
            self._event_loop.after(0.0, self._poll)
        else:
            self._event_loop.after(LONG_PAUSE / 2, self._poll)  # the loop waits whole milliseconds

    def _progress(self) -> bool:
        """Handles all frames that are there and all requests that are complete. Returns whether there were any."""
        status, active = self.mpi.Status(), False
        while (message := self._frames.Improbe(status=status)) is not None:
            frame = bytearray(status.Get_count(self.mpi.BYTE))
            message.Recv(frame)
            self.handlers[status.Get_tag()](status.Get_source(), bytes(frame))
            active = True
        pending, self._pending = self._pending, []
        for request, buffer, done in pending:
            if request.Test():
                done()
                active = True
            else:
                self._pending.append((request, buffer, done))
        return active
