"""Memory for letters that is used again once nobody holds it any more.

Fresh memory of the size of a model costs more than to copy the model there: the system has to clear each page first.


Letters that go out: at most one of a tag under way to a learner, and one more that waits for it.

All is called inside `Waiting.change`, by tasks that post and by the mail thread.


Letters that come in: which are refused, how their pieces become tensors, and where they wait to be collected.

Only the mail thread calls this, but for `accept` and `take`.
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

from asr_am.distributed.runtime.event_loop import WaitMonitor
from asr_am.distributed.runtime.fault_injection import MessageFaults
from asr_am.distributed.runtime.membership import Membership
from asr_am.distributed.runtime.wire import CHUNK, FIRST_CLOCK, WireHeader
from asr_am.distributed.team import CommStats, Message, shapes_match

MIN_POOLED = 1 << 16  # numbers; below, the allocator does the same
MAX_FREE = 4  # buffers of a size that nobody holds
STEPS_PER_OCTAVE = (
    4  # from one power of two to the next; if every length had its own, letters of ever new ones would fill memory
)


class BufferPool:
    """May be used by several threads."""

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=MAX_FREE))

    def acquire(self, count: int) -> np.ndarray:
        """A float32 array [count], not cleared. It is free again when it and all views of it are gone."""
        if count < MIN_POOLED:
            return np.empty(count, np.float32)
        step = (1 << count.bit_length() - 1) // STEPS_PER_OCTAVE
        size = -(-count // step) * step
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.float32)
        # through a memoryview: views of it then refer to it, not to memory
        lent = np.frombuffer(memory.data, np.float32, count)
        weakref.finalize(lent, free.append, memory).atexit = False
        return lent


STRIDE = 4 * CHUNK  # numbers of a large letter that are copied before the first of them are sent


@dataclass
class OutgoingMessage:
    """A letter. numbers: its tensors end to end, of which `filled` are there. due: when it may be sent, in seconds of
    `time.monotonic`.
    """

    clock: int
    lengths: tuple[int, ...]
    numbers: np.ndarray
    number: int = 0
    filled: int = 0
    due: float = 0.0

    def num_ready_chunks(self) -> int:
        """How many can be sent."""
        whole = self.filled == len(self.numbers)
        return max(-(-self.filled // CHUNK), 1) if whole else self.filled // CHUNK


@dataclass
class SendChannel:
    """To one learner, of one tag. under_way: until the receiver has it collected or refused. next: sent after it.
    sent: pieces of the letter under way that were handed to ZeroMQ.
    """

    to: int
    tag: str
    in_flight: OutgoingMessage | None = None
    next: OutgoingMessage | None = None
    sent: int = 0


class Sender:
    """reliable: tags that no injected fault touches."""

    def __init__(self, comm_stats: CommStats, message_faults: MessageFaults, reliable: Sequence[str]) -> None:
        self._comm_stats, self._message_faults, self._reliable = comm_stats, message_faults, frozenset(reliable)
        self._channels: dict[tuple[int, str], SendChannel] = {}
        self._count = 0

    def put(self, to: int, tag: str, message: OutgoingMessage) -> SendChannel:
        """Take a letter over, and number it."""
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
        """The receiver is done with a letter; the channel, if its next letter is under way now."""
        channel = self._channels.get((to, tag))
        if channel is None or channel.in_flight is None or channel.in_flight.number != number:
            return None
        channel.in_flight = None
        message, channel.next = channel.next, None
        if message is not None:
            self._dispatch(channel, message)
        return channel if channel.in_flight else None

    def busy(self, to: int) -> list[SendChannel]:
        """The channels that have a letter under way."""
        return [c for c in self._channels.values() if c.to == to and c.in_flight]

    def again(self, to: int) -> list[SendChannel]:
        """There is a new connection: the channels whose letter has to be sent from its beginning."""
        channels = self.busy(to)
        for channel in channels:
            channel.sent = 0
        return channels

    def drop(self, to: int) -> None:
        """The receiver died."""
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
    """Copy tensors end to end into `numbers`, as float32. Yields how far it has come, first and after each stride."""
    begin = 0
    yield begin
    for tensor in tensors:
        numbers_N = tensor.detach().reshape(-1)
        if numbers_N.is_cuda:
            numbers_N = numbers_N.cpu()  # waits for the GPU once, not for each stride
        for part in numbers_N.split(STRIDE):
            torch.from_numpy(numbers[begin : begin + len(part)]).copy_(part)
            begin += len(part)
            yield begin


class Credit(NamedTuple):
    """For a letter that was collected, or refused: its sender, of this incarnation, may send the next."""

    incarnation: int
    tag: str
    seq: int


class Phase(Enum):
    FILLING = auto()
    READY = auto()
    DONE = auto()


@dataclass
class ReceiveStream:
    """The letters of one tag from one incarnation of a learner, which come one at a time.

    head: the first piece's header of the newest one. clock: of the newest one that was complete.
    """

    head: WireHeader
    phase: Phase
    clock: int
    numbers: np.ndarray
    filled: int = 0


EMPTY = np.empty(0, np.float32)


class Receiver:
    """Counts in `usage.refused`: a letter once, and every message that is part of none.

    owed: credits to give back, by learner. They are here from the moment in which a letter is collected, so that the
    mail thread can send them before whatever is posted after that.
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
        """The letter `tag` that was complete first, from `source` if given. Called inside `Waiting.wait_for`."""
        for place, (sender, name) in enumerate(self._ready):
            if name == tag and source in (None, sender):
                stream = self._streams[self._ready.pop(place)]
                tensors = _split(stream.numbers, stream.head.lengths)
                stream.phase, stream.numbers = Phase.DONE, EMPTY
                self.credits[sender].append(_credit(stream.head))
                return Message(sender, tag, stream.head.clock, tensors)
        return None

    def reject(self) -> None:
        self._comm_stats.rejected += 1

    def is_known(self, header: WireHeader) -> bool:
        """Whether a message is of this run, from another learner's present or last incarnation; if not, refuse it."""
        other = header.source < self._membership.size and header.source != self._membership.rank
        known = header.run == self._run and other and header.incarnation == self._membership[header.source].incarnation
        if not known:
            self.reject()
        return known

    def on_chunk(self, header: WireHeader, payload: memoryview) -> None:
        """Put a piece of a known learner's letter where it belongs."""
        stream = self._streams.get((header.source, header.tag))
        if header.offset == 0:
            self._begin(stream, header, payload)
        elif stream is None or header.seq > stream.head.seq:
            self.reject()
        elif (header.seq, header.conn_epoch) != (stream.head.seq, stream.head.conn_epoch):
            pass  # of a letter that a broken connection has cut
        elif stream.phase is not Phase.FILLING:
            pass  # the rest of a letter that was refused
        elif header.offset != stream.filled or header.lengths != stream.head.lengths:
            self._reject_message(stream, header)
        else:
            self._fill(stream, payload)

    def requeue_credits(self, source: int) -> None:
        """A connection to `source` is made: credits may have been lost with the one before."""
        with self._wait_monitor.change():
            streams = [stream for (sender, _), stream in self._streams.items() if sender == source]
            self.credits[source] = deque(_credit(stream.head) for stream in streams if stream.phase is Phase.DONE)

    def forget(self, rank: int) -> None:
        """A learner was born anew: refuse what its last incarnation has left."""
        with self._wait_monitor.change():
            self._comm_stats.rejected += sum(source == rank for source, _ in self._ready)
            self._ready = [key for key in self._ready if key[0] != rank]
            self._streams = {key: stream for key, stream in self._streams.items() if key[0] != rank}
            self.credits[rank].clear()

    def _begin(self, old: ReceiveStream | None, header: WireHeader, payload: memoryview) -> None:
        clock = old.clock if old else FIRST_CLOCK
        if old and header.seq == old.head.seq and header.conn_epoch > old.head.conn_epoch:
            old.head = header  # its sender could not know that it had come
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
        """Count it, and let its sender send the next."""
        self.reject()
        clock = old.clock if old else FIRST_CLOCK
        self._streams[header.source, header.tag] = ReceiveStream(header, Phase.DONE, clock, EMPTY)
        self.credits[header.source].append(_credit(header))


def _credit(header: WireHeader) -> Credit:
    return Credit(header.incarnation, header.tag, header.seq)


def _split(numbers: np.ndarray, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors of the given lengths, which share the memory of `numbers`."""
    ends = np.cumsum(lengths).tolist()
    return tuple(torch.from_numpy(numbers[end - n : end]) for end, n in zip(ends, lengths, strict=True))
