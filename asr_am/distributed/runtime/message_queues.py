"""Queues of the transport: outgoing messages (`Sender`), incoming ones (`Receiver`), and their memory (`BufferPool`).

Each message is identified by its sender and number. Per tag and receiver at most one message is in flight, and at most
one more waits for it: a newer one overwrites the waiting one. The receiver returns a credit when a task has received
the message or when it is rejected, and the sender may then send the next.

`Sender` is called inside `WaitMonitor.change`, by sending tasks and the communication thread. `Receiver` is called by
the communication thread only, except for `register_tag` and `take`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.membership import Membership
from asr_am.distributed.runtime.event_loop import WaitMonitor
from asr_am.distributed.runtime.fault_injection import MessageFaults
from asr_am.distributed.runtime.wire import CHUNK, FIRST_CLOCK, WireHeader
from asr_am.distributed.team import CommStats, Message, shapes_match

MIN_POOLED = 1 << 16  # numbers: the allocator reuses smaller blocks itself
MAX_FREE = 4  # free buffers that are kept of each size
STEPS_PER_OCTAVE = 4  # buffer sizes between two powers of two: with one size per length, free buffers would fill memory


class BufferPool:
    """Pool of message buffers. Thread-safe.

    Fresh memory of the size of a model costs more than copying the model, because the system clears each page first.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=MAX_FREE))

    def acquire(self, count: int) -> np.ndarray:
        """Returns a float32 array [count], not cleared. It is free again when it and all its views are deleted."""
        if count < MIN_POOLED:
            return np.empty(count, np.float32)
        step = (1 << count.bit_length() - 1) // STEPS_PER_OCTAVE
        size = -(-count // step) * step
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.float32)
        # made from a memoryview so that views keep `array` alive, not only `memory`
        array = np.frombuffer(memory.data, np.float32, count)
        weakref.finalize(array, free.append, memory).atexit = False
        return array


STRIDE = 4 * CHUNK  # numbers that are copied before the first chunks of a large message are sent


@dataclass
class OutgoingMessage:
    """A message to send.

    Attributes:
        clock: clock of the message.
        lengths: lengths of its tensors.
        numbers: its tensors, end to end.
        number: its number at this sender.
        filled: how many of `numbers` are copied.
        due: earliest time at which it may be sent (`time.monotonic`).
    """

    clock: int
    lengths: tuple[int, ...]
    numbers: np.ndarray
    number: int = 0
    filled: int = 0
    due: float = 0.0

    def num_ready_chunks(self) -> int:
        """Returns how many chunks are filled."""
        complete = self.filled == len(self.numbers)
        return max(-(-self.filled // CHUNK), 1) if complete else self.filled // CHUNK


@dataclass
class SendChannel:
    """Messages of one tag to one learner.

    Attributes:
        to: rank of the receiver.
        tag: tag of the messages.
        in_flight: the message that the receiver has neither received nor rejected yet.
        next: the message that is sent after it.
        sent: number of chunks of the message in flight that were handed to ZeroMQ.
    """

    to: int
    tag: str
    in_flight: OutgoingMessage | None = None
    next: OutgoingMessage | None = None
    sent: int = 0


class Sender:
    """Outgoing messages of one learner.

    Args:
        comm_stats: statistics of this learner.
        message_faults: injected faults.
        reliable: tags without injected faults.
    """

    def __init__(self, comm_stats: CommStats, message_faults: MessageFaults, reliable: Sequence[str]) -> None:
        self._comm_stats, self._message_faults, self._reliable = comm_stats, message_faults, frozenset(reliable)
        self._channels: dict[tuple[int, str], SendChannel] = {}
        self._count = 0

    def put(self, to: int, tag: str, message: OutgoingMessage) -> SendChannel:
        """Queues a message, and numbers it."""
        self._count += 1
        message.number = self._count
        channel = self._channels.setdefault((to, tag), SendChannel(to, tag))
        if channel.in_flight is None:
            self._dispatch(channel, message)
        else:
            self._comm_stats.overwritten += channel.next is not None
            channel.next = message
        return channel

    def done(self, to: int, tag: str, number: int) -> SendChannel | None:
        """Handles the credit for a message. Returns its channel if another message is in flight now."""
        channel = self._channels.get((to, tag))
        if channel is None or channel.in_flight is None or channel.in_flight.number != number:
            return None
        channel.in_flight = None
        message, channel.next = channel.next, None
        if message is not None:
            self._dispatch(channel, message)
        return channel if channel.in_flight else None

    def busy(self, to: int) -> list[SendChannel]:
        """Returns the channels that have a message in flight."""
        return [c for c in self._channels.values() if c.to == to and c.in_flight]

    def again(self, to: int) -> list[SendChannel]:
        """Returns the channels whose message must be sent from its beginning on a new connection."""
        channels = self.busy(to)
        for channel in channels:
            channel.sent = 0
        return channels

    def drop(self, to: int) -> None:
        """Drops all messages to a dead learner."""
        self._channels = {key: channel for key, channel in self._channels.items() if channel.to != to}

    def _dispatch(self, channel: SendChannel, message: OutgoingMessage) -> None:
        comm_stats = self._comm_stats
        comm_stats.messages_sent += 1
        comm_stats.bytes_sent[channel.to] += message.numbers.nbytes
        channel.sent = 0
        if channel.tag not in self._reliable:
            if self._message_faults.loses(comm_stats):
                return
            message.due = self._message_faults.due(comm_stats, channel.tag)
        channel.in_flight = message


def lengths_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def fill(numbers: np.ndarray, tensors: Sequence[Tensor]) -> Iterator[int]:
    """Copies tensors end to end into `numbers`, as float32. Yields the count so far, first and after each stride."""
    begin = 0
    yield begin
    for tensor in tensors:
        numbers_N = tensor.detach().reshape(-1)
        if numbers_N.is_cuda:
            numbers_N = numbers_N.cpu()  # synchronizes with the GPU once, not for each stride
        for part in numbers_N.split(STRIDE):
            torch.from_numpy(numbers[begin : begin + len(part)]).copy_(part)
            begin += len(part)
            yield begin


class Credit(NamedTuple):
    """Credit for a message that was received or rejected: this incarnation of its sender may send the next."""

    incarnation: int
    tag: str
    seq: int


class Phase(Enum):
    FILLING = auto()
    READY = auto()
    DONE = auto()


@dataclass
class ReceiveStream:
    """Messages of one tag from one incarnation of a learner, which arrive one at a time.

    Attributes:
        head: header of the first chunk of the newest message.
        phase: state of the newest message.
        clock: clock of the newest message that was complete.
        numbers: tensors of the newest message, end to end.
        filled: how many of `numbers` have arrived.
    """

    head: WireHeader
    phase: Phase
    clock: int
    numbers: np.ndarray
    filled: int = 0


EMPTY = np.empty(0, np.float32)


class Receiver:
    """Incoming messages of one learner.

    Counts rejections in `CommStats.rejected`: once for each message, and for each frame that is part of none.

    Attributes:
        credits: credits to send, by rank. A credit is added at the moment in which a task receives the message, so that
            it is sent before all messages that are sent later.
    """

    def __init__(
        self, run: bytes, membership: Membership, wait_monitor: WaitMonitor, comm_stats: CommStats, buffers: BufferPool
    ) -> None:
        self._run, self._membership, self._wait_monitor, self._comm_stats = run, membership, wait_monitor, comm_stats
        self._buffers = buffers
        self._accepted: dict[str, tuple[int, ...]] = {}
        self._streams: dict[tuple[int, str], ReceiveStream] = {}
        self._ready: list[tuple[int, str]] = []  # in the order in which they became complete
        self.credits: dict[int, deque[Credit]] = {rank: deque() for rank in range(membership.size)}

    def register_tag(self, tag: str, lengths: tuple[int, ...]) -> None:
        self._accepted[tag] = lengths

    def take(self, tag: str, source: int | None) -> Message | None:
        """Returns the message `tag` that was complete first, from `source` if given, or None."""
        for index, (sender, name) in enumerate(self._ready):
            if name == tag and source in (None, sender):
                stream = self._streams[self._ready.pop(index)]
                tensors = _split(stream.numbers, stream.head.lengths)
                stream.phase, stream.numbers = Phase.DONE, EMPTY
                self.credits[sender].append(_credit(stream.head))
                return Message(sender, tag, stream.head.clock, tensors)
        return None

    def reject(self) -> None:
        self._comm_stats.rejected += 1

    def is_known(self, header: WireHeader) -> bool:
        """Returns whether a frame is of this run and of another learner's current incarnation. Rejects it if not."""
        other = header.source < self._membership.size and header.source != self._membership.rank
        known = header.run == self._run and other and header.incarnation == self._membership[header.source].incarnation
        if not known:
            self.reject()
        return known

    def on_chunk(self, header: WireHeader, payload: memoryview) -> None:
        """Adds a chunk to the message that it belongs to."""
        stream = self._streams.get((header.source, header.tag))
        if header.offset == 0:
            self._begin(stream, header, payload)
        elif stream is None or header.seq > stream.head.seq:
            self.reject()
        elif (header.seq, header.conn_epoch) != (stream.head.seq, stream.head.conn_epoch):
            pass  # of a message that a broken connection has cut off
        elif stream.phase is not Phase.FILLING:
            pass  # the rest of a message that was rejected
        elif header.offset != stream.filled or header.lengths != stream.head.lengths:
            self._reject_message(stream, header)
        else:
            self._fill(stream, payload)

    def requeue_credits(self, source: int) -> None:
        """Queues the last credits to `source` again: they may have been lost with its last connection."""
        with self._wait_monitor.change():
            streams = [stream for (sender, _), stream in self._streams.items() if sender == source]
            self.credits[source] = deque(_credit(stream.head) for stream in streams if stream.phase is Phase.DONE)

    def forget(self, rank: int) -> None:
        """Rejects the messages of an earlier incarnation of a restarted learner."""
        with self._wait_monitor.change():
            self._comm_stats.rejected += sum(source == rank for source, _ in self._ready)
            self._ready = [key for key in self._ready if key[0] != rank]
            self._streams = {key: stream for key, stream in self._streams.items() if key[0] != rank}
            self.credits[rank].clear()

    def _begin(self, old: ReceiveStream | None, header: WireHeader, payload: memoryview) -> None:
        clock = old.clock if old else FIRST_CLOCK
        if old and header.seq == old.head.seq and header.conn_epoch > old.head.conn_epoch:
            old.head = header  # its sender could not know that it had arrived
            if old.phase is Phase.DONE:
                self.credits[header.source].append(_credit(header))
            if old.phase is not Phase.FILLING:
                return
        elif old and (header.seq <= old.head.seq or old.phase is Phase.READY):
            self.reject()
            self.credits[header.source].append(_credit(header))
            return
        elif not shapes_match(header.lengths, self._accepted.get(header.tag)) or header.clock < clock:
            self._reject_message(old, header)
            return
        stream = ReceiveStream(header, Phase.FILLING, clock, self._buffers.acquire(sum(header.lengths)))
        self._streams[header.source, header.tag] = stream
        self._fill(stream, payload)

    def _fill(self, stream: ReceiveStream, payload: memoryview) -> None:
        count = min(CHUNK, len(stream.numbers) - stream.filled)
        if len(payload) != 4 * count:
            self._reject_message(stream, stream.head)
            return
        stream.numbers[stream.filled : stream.filled + count] = np.frombuffer(payload, "<f4")
        stream.filled += count
        if stream.filled == len(stream.numbers):
            with self._wait_monitor.change():
                stream.phase, stream.clock = Phase.READY, stream.head.clock
                self._ready.append((stream.head.source, stream.head.tag))

    def _reject_message(self, old: ReceiveStream | None, header: WireHeader) -> None:
        """Counts a rejected message, and lets its sender send the next."""
        self.reject()
        clock = old.clock if old else FIRST_CLOCK
        self._streams[header.source, header.tag] = ReceiveStream(header, Phase.DONE, clock, EMPTY)
        self.credits[header.source].append(_credit(header))


def _credit(header: WireHeader) -> Credit:
    return Credit(header.incarnation, header.tag, header.seq)


def _split(numbers: np.ndarray, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Returns tensors of the given lengths that share the memory of `numbers`."""
    ends = np.cumsum(lengths).tolist()
    return tuple(torch.from_numpy(numbers[end - n : end]) for end, n in zip(ends, lengths, strict=True))
