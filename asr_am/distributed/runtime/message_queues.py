"""Queues of the transport: outgoing messages (`Sender`) and incoming ones (`Receiver`).

Each message is identified by its sender and number. Per tag and receiver at most one message is in flight, and at most
one more waits for it: a newer one overwrites the waiting one. The receiver returns a credit when a task has received
the message or when it is rejected, and the sender may then send the next.

`Sender` is called inside `WaitMonitor.change`, by sending tasks and in callbacks of the event loop. `Receiver` is
called in these callbacks only, except for `register_tag` and `take`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.membership import Membership
from asr_am.distributed.runtime.event_loop import WaitMonitor
from asr_am.distributed.runtime.fault_injection import MessageFaults
from asr_am.distributed.runtime.message_buffers import PLACE_BYTES, BufferPool, SharedMappings, SharedSegment
from asr_am.distributed.runtime.wire import CHUNK, FIRST_CLOCK, Kind, WireHeader
from asr_am.distributed.team import CommStats, Message, shapes_match
from asr_am.distributed.wire_dtype import num_words, rounded

STRIDE = 4 * CHUNK  # words that are copied before the first chunks of a large message are sent


@dataclass
class OutgoingMessage:
    """A message to send.

    Attributes:
        clock: clock of the message.
        lengths: lengths of its tensors.
        dtypes: their types.
        words: its tensors, end to end, each from a word on.
        segment: the shared memory that `words` are in, or None if they are sent as chunks.
        number: its number at this sender.
        filled: how many of `words` are copied.
        due: earliest time at which it may be sent (`time.monotonic`).
    """

    clock: int
    lengths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    words: np.ndarray
    segment: SharedSegment | None = None
    number: int = 0
    filled: int = 0
    due: float = 0.0

    @property
    def exact(self) -> int:
        """Bits of the tensors that are int32."""
        return sum(1 << k for k, dtype in enumerate(self.dtypes) if dtype == torch.int32)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the others."""
        return next((dtype for dtype in self.dtypes if dtype != torch.int32), torch.float32)

    @property
    def complete(self) -> bool:
        return self.filled == len(self.words)

    def num_ready_chunks(self) -> int:
        """Returns how many frames can be sent: filled chunks, or the place of shared memory."""
        if self.segment is not None:
            return int(self.complete)
        return max(-(-self.filled // CHUNK), 1) if self.complete else self.filled // CHUNK


@dataclass
class SendChannel:
    """Messages of one tag to one learner.

    Attributes:
        to: rank of the receiver.
        tag: tag of the messages.
        in_flight: the message that the receiver has neither received nor rejected yet.
        next: the message that is sent after it.
        sent: number of frames of the message in flight that were handed to ZeroMQ.
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

    def unshare(self, to: int, tag: str, number: int) -> SendChannel | None:
        """Makes a message in shared memory one that is sent as chunks. Returns its channel if it is in flight."""
        channel = self._channels.get((to, tag))
        if channel is None or channel.in_flight is None or channel.in_flight.number != number:
            return None
        segment, channel.in_flight.segment, channel.sent = channel.in_flight.segment, None, 0
        if segment is not None:
            segment.sent = False
        return channel

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
        comm_stats.bytes_sent[channel.to] += message.words.nbytes
        channel.sent = 0
        if channel.tag not in self._reliable:
            if self._message_faults.loses(comm_stats):
                return
            message.due = self._message_faults.due(comm_stats, channel.tag)
        channel.in_flight = message


def lengths_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def fill(words: np.ndarray, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Iterator[int]:
    """Copies tensors of these types end to end into `words`. Yields the words so far, first and after each stride.

    One of a GPU is copied as a whole, because each copy waits for all that the GPU has to do.
    """
    begin = 0
    yield begin
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        numbers_N = tensor.detach().reshape(-1)
        stride = STRIDE * 4 // dtype.itemsize
        for part in numbers_N.split(max(len(numbers_N), 1) if numbers_N.is_cuda else stride):
            end = begin + num_words([len(part)], [dtype])
            torch.from_numpy(words[begin:end]).view(dtype)[: len(part)].copy_(part)
            begin = end
            yield begin


class Credit(NamedTuple):
    """Answer to a message.

    Attributes:
        kind: ACK, a credit: it was received or rejected, and this incarnation of its sender may send the next. Or
            UNSHARED: its shared memory cannot be mapped, send it as chunks.
    """

    incarnation: int
    tag: str
    seq: int
    kind: Kind = Kind.ACK


class Phase(Enum):
    FILLING = auto()
    READY = auto()
    DONE = auto()
    UNSHARED = auto()  # its shared memory cannot be mapped. It will come again as chunks


@dataclass
class ReceiveStream:
    """Messages of one tag from one incarnation of a learner, which arrive one at a time.

    Attributes:
        head: header of the first chunk of the newest message.
        phase: state of the newest message.
        clock: clock of the newest message that was complete.
        words: tensors of the newest message, end to end.
        filled: how many of `words` have arrived.
    """

    head: WireHeader
    phase: Phase
    clock: int
    words: np.ndarray
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
        self._buffers, self._mappings = buffers, SharedMappings()
        self._accepted: dict[str, tuple[int, ...]] = {}
        self._streams: dict[tuple[int, str], ReceiveStream] = {}
        self._ready: list[tuple[int, str]] = []  # in the order in which they became complete
        self.credits: dict[int, deque[Credit]] = {rank: deque() for rank in range(membership.size)}

    def register_tag(self, tag: str, lengths: tuple[int, ...]) -> None:
        self._accepted[tag] = lengths

    def recv(self, tag: str, source: int | None, timeout: float | None) -> Message | None:
        """Waits for a message. Also returns None if `source` dies or restarts, and has left no message."""
        message: Message | None = None
        first = self._membership[source] if source is not None else None

        def ready() -> bool:
            nonlocal message
            message = self.take(tag, source)
            peer_gone = source is not None and (not self._membership[source].alive or self._membership[source] != first)
            return message is not None or peer_gone

        self._wait_monitor.wait_for(ready, timeout)
        if message is None:
            return None
        return replace(message, tensors=tuple(rounded(tensor, tensor.dtype) for tensor in message.tensors))

    def take(self, tag: str, source: int | None) -> Message | None:
        """Returns the message `tag` that was complete first, from `source` if given, or None.

        Its tensors have the types in which they were sent.
        """
        for index, (sender, name) in enumerate(self._ready):
            if name == tag and source in (None, sender):
                stream = self._streams[self._ready.pop(index)]
                tensors = _split(stream.words, stream.head)
                stream.phase, stream.words = Phase.DONE, EMPTY
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
            if self._is_new(stream, header) and self._fits(stream, header):
                self._fill(self._begin(stream, header, self._buffers.acquire(header.words)), payload)
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

    def on_shared(self, header: WireHeader, place: bytes) -> None:
        """Adds a message in shared memory."""
        stream = self._streams.get((header.source, header.tag))
        if len(place) != PLACE_BYTES:
            self._reject_message(stream, header)
        elif self._is_new(stream, header):
            try:
                words = self._mappings.open(header.source, place, header.words)
            except OSError:
                self._begin(stream, header, EMPTY).phase = Phase.UNSHARED
                self.credits[header.source].append(_credit(header, Kind.UNSHARED))
                return
            if self._fits(stream, header):  # if not, deleting `words` gives the memory back
                self._finish(self._begin(stream, header, words))

    def on_message(self, header: WireHeader, words: np.ndarray) -> None:
        """Adds a message that has arrived as a whole."""
        stream = self._streams.get((header.source, header.tag))
        if self._is_new(stream, header) and self._fits(stream, header):
            self._finish(self._begin(stream, header, words))

    def requeue_credits(self, source: int) -> None:
        """Queues the last credits to `source` again: they may have been lost with its last connection."""
        with self._wait_monitor.change():
            streams = [stream for (sender, _), stream in self._streams.items() if sender == source]
            self.credits[source] = deque(
                _credit(stream.head, ANSWERS[stream.phase]) for stream in streams if stream.phase in ANSWERS
            )

    def forget(self, rank: int) -> None:
        """Rejects the messages of an earlier incarnation of a restarted learner."""
        with self._wait_monitor.change():
            self._comm_stats.rejected += sum(source == rank for source, _ in self._ready)
            self._ready = [key for key in self._ready if key[0] != rank]
            self._streams = {key: stream for key, stream in self._streams.items() if key[0] != rank}
            self.credits[rank].clear()

    def unmap(self, rank: int) -> None:
        """Unmaps the memory of a dead learner, except for messages that have arrived."""
        self._mappings.forget(rank)

    def _is_new(self, old: ReceiveStream | None, header: WireHeader) -> bool:
        """Returns whether the first frame of a message is one that has not arrived yet."""
        if old and header.seq == old.head.seq and old.phase is Phase.UNSHARED:
            return True
        if old and header.seq == old.head.seq and header.conn_epoch > old.head.conn_epoch:
            old.head = header  # its sender could not know that it had arrived
            if old.phase is Phase.DONE:
                self.credits[header.source].append(_credit(header))
            return old.phase is Phase.FILLING
        if old and (header.seq <= old.head.seq or old.phase is Phase.READY):
            self.reject()
            self.credits[header.source].append(_credit(header))
            return False
        return True

    def _fits(self, old: ReceiveStream | None, header: WireHeader) -> bool:
        """Returns whether a message has registered lengths, and no earlier clock than the last. Rejects it if not."""
        clock = old.clock if old else FIRST_CLOCK
        fits = shapes_match(header.lengths, self._accepted.get(header.tag)) and header.clock >= clock
        if not fits:
            self._reject_message(old, header)
        return fits

    def _begin(self, old: ReceiveStream | None, header: WireHeader, words: np.ndarray) -> ReceiveStream:
        stream = ReceiveStream(header, Phase.FILLING, old.clock if old else FIRST_CLOCK, words)
        self._streams[header.source, header.tag] = stream
        return stream

    def _fill(self, stream: ReceiveStream, payload: memoryview) -> None:
        count = min(CHUNK, len(stream.words) - stream.filled)
        if len(payload) != 4 * count:
            self._reject_message(stream, stream.head)
            return
        stream.words[stream.filled : stream.filled + count] = np.frombuffer(payload, "<f4")
        stream.filled += count
        if stream.filled == len(stream.words):
            self._finish(stream)

    def _finish(self, stream: ReceiveStream) -> None:
        with self._wait_monitor.change():
            stream.phase, stream.clock = Phase.READY, stream.head.clock
            self._ready.append((stream.head.source, stream.head.tag))

    def _reject_message(self, old: ReceiveStream | None, header: WireHeader) -> None:
        """Counts a rejected message, and lets its sender send the next."""
        self.reject()
        clock = old.clock if old else FIRST_CLOCK
        self._streams[header.source, header.tag] = ReceiveStream(header, Phase.DONE, clock, EMPTY)
        self.credits[header.source].append(_credit(header))


ANSWERS = {Phase.DONE: Kind.ACK, Phase.UNSHARED: Kind.UNSHARED}


def _credit(header: WireHeader, kind: Kind = Kind.ACK) -> Credit:
    return Credit(header.incarnation, header.tag, header.seq, kind)


def _split(words: np.ndarray, header: WireHeader) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a message, which share the memory of `words`."""
    tensors, begin = [], 0
    for length, dtype in zip(header.lengths, header.dtypes, strict=True):
        end = begin + num_words([length], [dtype])
        tensors.append(torch.from_numpy(words[begin:end]).view(dtype)[:length])
        begin = end
    return tuple(tensors)
