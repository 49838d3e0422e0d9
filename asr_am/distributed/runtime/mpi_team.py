"""`connect_mpi`: the team of processes that mpirun has started, with collectives and messages over MPI.

When a process dies, the others leave this team, and the next one continues from the last checkpoint (`mpi_link`).
Learner 0 serves leases and barriers of asynchronous strategies (`coordinator`).
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Faults, Workload
from asr_am.distributed.coordinated_backend import RELIABLE, CoordinatedBackend
from asr_am.distributed.coordinator import Coordinator
from asr_am.distributed.launch_spec import WireDtype
from asr_am.distributed.leases import LearnerLost, Leases, RoundRobinLeases, Segment
from asr_am.distributed.membership import Membership, apply_event
from asr_am.distributed.runtime.control_client import Requests
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.fault_injection import ComputeEmulator, MessageFaults, arm_crash
from asr_am.distributed.runtime.gpu_placement import place
from asr_am.distributed.runtime.message_buffers import BufferPool
from asr_am.distributed.runtime.message_queues import OutgoingMessage, Receiver, SendChannel, Sender, fill, lengths_of
from asr_am.distributed.runtime.mpi_collectives import MpiGroup
from asr_am.distributed.runtime.mpi_link import MpiLink, MpiProcesses, mpi_processes
from asr_am.distributed.runtime.team import Backend, ProcessTeam
from asr_am.distributed.runtime.wire import SIZE, Kind, WireHeader, check_tag, decode, encode
from asr_am.distributed.team import CommStats, Group, Message, SingleProcess, find_group
from asr_am.distributed.wire_dtype import WIRE_DTYPES, num_words, travels_as
from asr_am.errors import InputError, Preempted

MESSAGE, CONTROL = 1, 2  # kinds of frames
MAX_INLINE = 2048  # bytes of a message that is part of its frame, which MPI sends without waiting for the receiver


class MpiTransport:
    """Messages of one learner: headers of `wire` in frames, each with the words of the message, or followed by them.

    Args:
        reliable: tags without injected faults.
        wire: type in which float32 tensors are sent.
    """

    def __init__(
        self, link: MpiLink, event_loop: EventLoop, membership: Membership, wait_monitor: WaitMonitor,
        comm_stats: CommStats, message_faults: MessageFaults, reliable: Sequence[str], wire: torch.dtype,
    ) -> None:  # fmt: skip
        self._link, self._event_loop, self._wire = link, event_loop, wire
        self._hello = WireHeader(Kind.HELLO, bytes(16), link.rank, 0)  # MPI knows which run this is
        self._membership, self._wait_monitor = membership, wait_monitor
        self._buffers = BufferPool()
        self._receiver = Receiver(self._hello.run, membership, wait_monitor, comm_stats, self._buffers)
        self._sender = Sender(comm_stats, message_faults, reliable)
        link.handlers[MESSAGE] = self._on_frame

    def register_tag(self, tag: str, lengths: tuple[int, ...]) -> None:
        check_tag(tag)
        self._receiver.register_tag(tag, lengths)

    def send(self, to: int, tag: str, clock: int, tensors: tuple[Tensor, ...]) -> None:
        self._wait_monitor.check()
        check_tag(tag)
        if not self._membership[to].alive:
            return
        lengths, dtypes = lengths_of(tensors), tuple(travels_as(tensor, self._wire) for tensor in tensors)
        message = OutgoingMessage(clock, lengths, dtypes, self._buffers.acquire(num_words(lengths, dtypes)))
        message.filled = max(fill(message.words, tensors, dtypes))
        with self._wait_monitor.change():
            channel = self._sender.put(to, tag, message)
        self._event_loop.call_here(partial(self._push, channel))

    def recv(self, tag: str, source: int | None, timeout: float | None) -> Message | None:
        message = self._receiver.recv(tag, source, timeout)
        if message is not None:
            self._event_loop.call_here(partial(self._send_credits, message.source))
        return message

    def send_goodbye(self, lost: int | None) -> None:
        """Waits until all others leave as well."""
        left: list[bool] = []

        def leave() -> None:
            self._link.track(self._link.processes.start_leaving(), None, partial(left.append, True))

        self._event_loop.call(leave)
        while not (left and self._link.idle) and self._wait_monitor.failure is None:
            time.sleep(1e-3)

    # called in callbacks of the event loop

    def on_event(self, event: dict[str, Any]) -> None:
        with self._wait_monitor.change():
            apply_event(self._membership, event, self)

    def on_peer_started(self, rank: int, incarnation: int, address: str) -> None:
        raise AssertionError("MPI starts no process again")

    def on_peer_died(self, rank: int, incarnation: int) -> None:
        """Notes that a learner has finished."""
        if self._membership.mark_dead(rank, incarnation):
            self._sender.drop(rank)

    def _push(self, channel: SendChannel) -> None:
        message = channel.in_flight
        if message is None or channel.sent:
            return
        if (delay := message.due - time.monotonic()) > 0:
            self._event_loop.after(delay, partial(self._push, channel))
            return
        channel.sent = 1
        self._send_credits(channel.to)  # first, so that who hears from this learner may send the next message
        header = replace(
            self._hello, kind=Kind.CHUNK, clock=message.clock, tag=channel.tag, seq=message.number,
            lengths=message.lengths, exact=message.exact, dtype=message.dtype,
        )  # fmt: skip
        if message.words.nbytes <= MAX_INLINE:
            self._link.send(channel.to, MESSAGE, encode(header) + message.words.tobytes())
        else:
            self._link.send(channel.to, MESSAGE, encode(header), message.words)

    def _send_credits(self, rank: int) -> None:
        credits = self._receiver.credits[rank]
        while credits:
            credit = credits.popleft()
            self._link.send(rank, MESSAGE, encode(replace(self._hello, kind=Kind.ACK, tag=credit.tag, seq=credit.seq)))

    def _on_frame(self, source: int, frame: bytes) -> None:
        header = decode(frame[:SIZE])
        if header.kind is Kind.ACK:
            with self._wait_monitor.change():
                channel = self._sender.done(source, header.tag, header.seq)
            if channel is not None:
                self._push(channel)
            return
        words = self._buffers.acquire(header.words)

        def arrived() -> None:
            self._receiver.on_message(header, words)
            self._send_credits(source)

        if words.nbytes <= MAX_INLINE:
            words[:] = np.frombuffer(frame, np.float32, offset=SIZE)
            arrived()
        else:
            self._link.receive_payload(source, words, arrived)


class MpiBackend:
    """Collectives and control plane of a synchronous team. The arguments are those of `MpiGroup`."""

    waits_on_host = True

    def __init__(
        self, link: MpiLink, event_loop: EventLoop, wait_monitor: WaitMonitor, comm_stats: CommStats, wire: torch.dtype
    ) -> None:
        self._rank, self._size = link.rank, link.size
        self._event_loop, self._wait_monitor = event_loop, wait_monitor
        self._make_group = partial(MpiGroup, link, event_loop, wait_monitor)
        self._comm_stats, self._wire = comm_stats, wire
        self.world: Group = self._make_group(range(self._size), comm_stats, wire)
        self._control = self._make_group(range(self._size), CommStats(), torch.float32)

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        """Makes the group of this learner. Its members wait for each other."""
        members = find_group(self._rank, self._size, groups)
        if members is None or len(members) == 1:
            return None if members is None else SingleProcess()
        made: list[MpiGroup] = []

        def make() -> None:
            group = self._make_group(members, self._comm_stats, self._wire)
            with self._wait_monitor.change():
                made.append(group)

        self._event_loop.call(make)
        self._wait_monitor.wait_for(lambda: bool(made))
        return made[0]

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        assert synchronous
        return RoundRobinLeases(segment, self._rank, self._size, self.gather)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """Gathers ragged rows: first their lengths, then the rows, as int32 so that their bits stay."""
        own = values.detach().to("cpu", torch.float64).reshape(-1).view(torch.int32)
        lengths = torch.cat(self._control.start_all_gather(torch.tensor([len(own)], dtype=torch.int32)).wait()).tolist()
        rows = self._control.start_all_gather(own, lengths).wait()
        return {rank: row.clone().view(torch.float64) for rank, row in enumerate(rows)}

    def average(self, x: Tensor) -> Tensor:
        mean = x.detach().to("cpu", torch.float32, copy=True)
        self._control.start_all_reduce_mean(mean).wait()
        return mean.to(x.device, x.dtype)

    def restart_team(self, reason: str, lost: int | None) -> NoReturn:
        raise LearnerLost(self._rank, f"cannot go on: {reason}")

    def confirm(self) -> None:
        pass  # the loss of a learner ends the others

    def close(self) -> None:
        pass


class MpiControl(Requests):
    """A learner's connection to the coordinator in learner 0, as JSON in frames."""

    def __init__(
        self, link: MpiLink, event_loop: EventLoop, wait_monitor: WaitMonitor, transport: MpiTransport
    ) -> None:
        super().__init__(wait_monitor, transport.on_event, "learner 0")
        self._link, self._event_loop = link, event_loop
        self._coordinator = Coordinator(link.size, self._send_to) if link.rank == 0 else None
        link.handlers[CONTROL] = self._receive

    def _send(self, message: dict[str, object]) -> None:
        self._event_loop.call_here(partial(self._send_to, 0, message))

    def _send_to(self, rank: int, message: dict[str, Any]) -> None:
        self._link.send(rank, CONTROL, json.dumps(message).encode())

    def _receive(self, source: int, frame: bytes) -> None:
        message = json.loads(frame)
        if "op" in message:
            self._serve(source, message)
        else:
            self.handle(message)

    def _serve(self, source: int, message: dict[str, Any]) -> None:
        assert self._coordinator is not None
        try:
            if message["op"] == "hello":
                self._coordinator.register(source, 0, "")
            elif message["op"] == "restart":
                raise InputError(f"{message['reason']}; start the same command again")
            else:
                self._coordinator.handle(source, message)
        except Exception as error:  # an error of one learner must not end the others
            kind = "input" if isinstance(error, InputError) else ""
            answer = {"error": f"{message['op']}: {error}", "kind": kind}
            self._send_to(source, answer | ({"id": message["id"]} if "id" in message else {}))


class MpiTeam(ProcessTeam):
    """The `Team` of a process that mpirun has started."""

    def __init__(self, link: MpiLink, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._link = link

    def is_loss(self, error: Exception) -> bool:
        return super().is_loss(error) or self._link.processes.is_broken(error)

    def restart_team(self, reason: str, lost: int | None = None) -> NoReturn:
        """Raises LearnerLost: `close` finds out who lives."""
        raise LearnerLost(self.rank if lost is None else lost, reason)

    def close(self) -> None:
        """Leaves the team together with all others.

        Raises:
            ProcessLost: one of them has died. After another error of this process MPI stays as it is, and all others
                end with this one.
        """
        if self._closed:
            return
        processes, error = self._link.processes, self._wait_monitor.failure or sys.exc_info()[1]
        if error is None or isinstance(error, Preempted):
            super().close()
            error = self._wait_monitor.failure  # while it waited for the others
        elif processes.is_broken(error):
            self._closed = True
            self._stop()
        else:
            return
        self._link.abandon(error)
        processes.end_team(finished=error is None)


def connect_mpi(
    faults: Faults, workload: Workload | None = None, *, size: int, synchronous: bool, device: str = "cpu",
    wire: WireDtype = "float32",
) -> ProcessTeam | None:  # fmt: skip
    """Connects this process to the others that mpirun has started. The other arguments are those of `connect`.

    More processes than `size` are spares: for them this returns None when the team has finished.

    Args:
        size: number of ranks.
        synchronous: the strategy takes its steps at all learners together.

    Raises:
        ProcessLost: a process has died, or there are fewer than `size`.
        InputError: MPI cannot be used.
    """
    faults.check(size)
    processes = mpi_processes()
    try:
        comm = processes.make_team(size)
        if comm is not None:
            return _connect(processes, comm, faults, workload, synchronous, device, wire)
    except processes.mpi.Exception as error:
        if processes.is_broken(error):
            processes.end_team(finished=False)
        raise
    processes.wait_as_spare()
    return None


def _connect(
    processes: MpiProcesses, comm: Any, faults: Faults, workload: Workload | None, synchronous: bool, device: str,
    wire: WireDtype,
) -> MpiTeam:  # fmt: skip
    mpi, dtype, comm_stats = processes.mpi, WIRE_DTYPES[wire], CommStats()
    rank, size, incarnation = comm.rank, comm.size, processes.restarts
    local = comm.Split_type(mpi.COMM_TYPE_SHARED)
    if torch.cuda.is_available():
        torch.cuda.set_device(place(local.rank, torch.cuda.device_count(), share=True))  # the trainer may refuse
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    compute_emulator = ComputeEmulator(faults, workload, device, rank, comm_stats, synchronize)
    wait_monitor, membership = WaitMonitor(comm_stats), Membership(rank, size)
    event_loop = EventLoop(wait_monitor)
    link = MpiLink(processes, comm, event_loop, wait_monitor)
    transport = MpiTransport(
        link, event_loop, membership, wait_monitor, comm_stats, MessageFaults(faults, rank, 0),
        () if synchronous else RELIABLE, dtype,
    )  # fmt: skip
    with ExitStack() as undo:  # if a process dies meanwhile
        undo.push(lambda kind, error, traceback: link.abandon(error))
        undo.callback(event_loop.stop)
        hosts, run = _tell_all(comm, local)
        backend: Backend
        if synchronous:
            membership.fill({other: (0, "") for other in range(size)})
            backend = MpiBackend(link, event_loop, wait_monitor, comm_stats, dtype)
            event_loop.start()
        else:
            control = MpiControl(link, event_loop, wait_monitor, transport)
            backend = CoordinatedBackend(control, transport, rank, 0)
            event_loop.start()
            control.notify("hello")
            wait_monitor.wait_for(lambda: membership.complete)
        undo.pop_all()
    arm_crash(faults, rank, incarnation, comm_stats)
    return MpiTeam(
        link, run, 0, hosts, comm_stats, membership, wait_monitor, event_loop, transport, backend, compute_emulator,
        dtype, processes.restarts,
    )  # fmt: skip


def _tell_all(comm: Any, local: Any) -> tuple[list[int], str]:
    """Returns the index of the host of each rank, and the identity of the run, which learner 0 chooses."""
    leader, leaders = np.array([comm.rank]), np.empty(comm.size, np.int64)
    run = bytearray(secrets.token_bytes(16))
    local.Bcast(leader)
    comm.Allgather(leader, leaders)
    comm.Bcast(run)
    return np.unique(leaders, return_inverse=True)[1].tolist(), run.hex()
