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

from asr_am.distributed.runtime.event_loop import Waiting
from asr_am.distributed.runtime.fault_injection import Fates
from asr_am.distributed.runtime.membership import Roster
from asr_am.distributed.runtime.wire import FIRST_CLOCK, PIECE, Header
from asr_am.distributed.team import Letter, Usage, fits

LEAST = 1 << 16  # numbers; below, the allocator does the same
KEPT = 4  # buffers of a size that nobody holds
SIZES = 4  # from one power of two to the next; if every length had its own, letters of ever new ones would fill memory


class Buffers:
    """May be used by several threads."""

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=KEPT))

    def take(self, count: int) -> np.ndarray:
        """A float32 array [count], not cleared. It is free again when it and all views of it are gone."""
        if count < LEAST:
            return np.empty(count, np.float32)
        step = (1 << count.bit_length() - 1) // SIZES
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


STRIDE = 4 * PIECE  # numbers of a large letter that are copied before the first of them are sent


@dataclass
class Outgoing:
    """A letter. numbers: its tensors end to end, of which `filled` are there. due: when it may be sent, in seconds of
    `time.monotonic`.
    """

    clock: int
    lengths: tuple[int, ...]
    numbers: np.ndarray
    number: int = 0
    filled: int = 0
    due: float = 0.0

    def pieces(self) -> int:
        """How many can be sent."""
        whole = self.filled == len(self.numbers)
        return max(-(-self.filled // PIECE), 1) if whole else self.filled // PIECE


@dataclass
class Channel:
    """To one learner, of one tag. under_way: until the receiver has it collected or refused. next: sent after it.
    sent: pieces of the letter under way that were handed to ZeroMQ.
    """

    to: int
    tag: str
    under_way: Outgoing | None = None
    next: Outgoing | None = None
    sent: int = 0


class Outbox:
    """reliable: tags that no injected fault touches."""

    def __init__(self, usage: Usage, fates: Fates, reliable: Sequence[str]) -> None:
        self._usage, self._fates, self._reliable = usage, fates, frozenset(reliable)
        self._channels: dict[tuple[int, str], Channel] = {}
        self._count = 0

    def put(self, to: int, tag: str, letter: Outgoing) -> Channel:
        """Take a letter over, and number it."""
        self._count += 1
        letter.number = self._count
        channel = self._channels.setdefault((to, tag), Channel(to, tag))
        if channel.under_way is None:
            self._dispatch(channel, letter)
        else:
            self._usage.superseded += channel.next is not None
            channel.next = letter
        return channel

    def done(self, to: int, tag: str, number: int) -> Channel | None:
        """The receiver is done with a letter; the channel, if its next letter is under way now."""
        channel = self._channels.get((to, tag))
        if channel is None or channel.under_way is None or channel.under_way.number != number:
            return None
        channel.under_way = None
        letter, channel.next = channel.next, None
        if letter is not None:
            self._dispatch(channel, letter)
        return channel if channel.under_way else None

    def busy(self, to: int) -> list[Channel]:
        """The channels that have a letter under way."""
        return [c for c in self._channels.values() if c.to == to and c.under_way]

    def again(self, to: int) -> list[Channel]:
        """There is a new connection: the channels whose letter has to be sent from its beginning."""
        channels = self.busy(to)
        for channel in channels:
            channel.sent = 0
        return channels

    def drop(self, to: int) -> None:
        """The receiver died."""
        self._channels = {key: channel for key, channel in self._channels.items() if channel.to != to}

    def _dispatch(self, channel: Channel, letter: Outgoing) -> None:
        usage = self._usage
        usage.letters += 1
        usage.bytes_sent[channel.to] += letter.numbers.nbytes
        channel.sent = 0
        if channel.tag not in self._reliable:
            if self._fates.loses(usage):
                return
            letter.due = self._fates.due(usage, channel.tag)
        channel.under_way = letter


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
    letter: int


class Phase(Enum):
    FILLING = auto()
    READY = auto()
    DONE = auto()


@dataclass
class Stream:
    """The letters of one tag from one incarnation of a learner, which come one at a time.

    head: the first piece's header of the newest one. clock: of the newest one that was complete.
    """

    head: Header
    phase: Phase
    clock: int
    numbers: np.ndarray
    filled: int = 0


NOTHING = np.empty(0, np.float32)


class Inbox:
    """Counts in `usage.refused`: a letter once, and every message that is part of none.

    owed: credits to give back, by learner. They are here from the moment in which a letter is collected, so that the
    mail thread can send them before whatever is posted after that.
    """

    def __init__(self, run: bytes, roster: Roster, waiting: Waiting, usage: Usage, buffers: Buffers) -> None:
        self._run, self._roster, self._waiting, self._usage = run, roster, waiting, usage
        self._buffers = buffers
        self._accepted: dict[str, tuple[int, ...]] = {}
        self._streams: dict[tuple[int, str], Stream] = {}
        self._ready: list[tuple[int, str]] = []  # in the order in which they became complete
        self.owed: dict[int, deque[Credit]] = {rank: deque() for rank in range(roster.size)}

    def accept(self, tag: str, lengths: tuple[int, ...]) -> None:
        self._accepted[tag] = lengths

    def take(self, tag: str, source: int | None) -> Letter | None:
        """The letter `tag` that was complete first, from `source` if given. Called inside `Waiting.wait_for`."""
        for place, (sender, name) in enumerate(self._ready):
            if name == tag and source in (None, sender):
                stream = self._streams[self._ready.pop(place)]
                tensors = _split(stream.numbers, stream.head.lengths)
                stream.phase, stream.numbers = Phase.DONE, NOTHING
                self.owed[sender].append(_credit(stream.head))
                return Letter(sender, tag, stream.head.clock, tensors)
        return None

    def refuse(self) -> None:
        self._usage.refused += 1

    def knows(self, header: Header) -> bool:
        """Whether a message is of this run, from another learner's present or last incarnation; if not, refuse it."""
        other = header.source < self._roster.size and header.source != self._roster.rank
        known = header.run == self._run and other and header.incarnation == self._roster[header.source].incarnation
        if not known:
            self.refuse()
        return known

    def piece(self, header: Header, payload: memoryview) -> None:
        """Put a piece of a known learner's letter where it belongs."""
        stream = self._streams.get((header.source, header.tag))
        if header.offset == 0:
            self._begin(stream, header, payload)
        elif stream is None or header.letter > stream.head.letter:
            self.refuse()
        elif (header.letter, header.attempt) != (stream.head.letter, stream.head.attempt):
            pass  # of a letter that a broken connection has cut
        elif stream.phase is not Phase.FILLING:
            pass  # the rest of a letter that was refused
        elif header.offset != stream.filled or header.lengths != stream.head.lengths:
            self._refuse_letter(stream, header)
        else:
            self._fill(stream, payload)

    def owe_again(self, source: int) -> None:
        """A connection to `source` is made: credits may have been lost with the one before."""
        with self._waiting.change():
            streams = [stream for (sender, _), stream in self._streams.items() if sender == source]
            self.owed[source] = deque(_credit(stream.head) for stream in streams if stream.phase is Phase.DONE)

    def forget(self, rank: int) -> None:
        """A learner was born anew: refuse what its last incarnation has left."""
        with self._waiting.change():
            self._usage.refused += sum(source == rank for source, _ in self._ready)
            self._ready = [key for key in self._ready if key[0] != rank]
            self._streams = {key: stream for key, stream in self._streams.items() if key[0] != rank}
            self.owed[rank].clear()

    def _begin(self, old: Stream | None, header: Header, payload: memoryview) -> None:
        clock = old.clock if old else FIRST_CLOCK
        if old and header.letter == old.head.letter and header.attempt > old.head.attempt:
            old.head = header  # its sender could not know that it had come
            if old.phase is Phase.DONE:
                self.owed[header.source].append(_credit(header))
            if old.phase is not Phase.FILLING:
                return
        elif old and (header.letter <= old.head.letter or old.phase is Phase.READY):
            self.refuse()
            self.owed[header.source].append(_credit(header))
            return
        elif not fits(header.lengths, self._accepted.get(header.tag)) or header.clock < clock:
            self._refuse_letter(old, header)
            return
        stream = Stream(header, Phase.FILLING, clock, self._buffers.take(sum(header.lengths)))
        self._streams[header.source, header.tag] = stream
        self._fill(stream, payload)

    def _fill(self, stream: Stream, payload: memoryview) -> None:
        count = min(PIECE, len(stream.numbers) - stream.filled)
        if len(payload) != 4 * count:
            self._refuse_letter(stream, stream.head)
            return
        stream.numbers[stream.filled : stream.filled + count] = np.frombuffer(payload, "<f4")
        stream.filled += count
        if stream.filled == len(stream.numbers):
            with self._waiting.change():
                stream.phase, stream.clock = Phase.READY, stream.head.clock
                self._ready.append((stream.head.source, stream.head.tag))

    def _refuse_letter(self, old: Stream | None, header: Header) -> None:
        """Count it, and let its sender send the next."""
        self.refuse()
        clock = old.clock if old else FIRST_CLOCK
        self._streams[header.source, header.tag] = Stream(header, Phase.DONE, clock, NOTHING)
        self.owed[header.source].append(_credit(header))


def _credit(header: Header) -> Credit:
    return Credit(header.incarnation, header.tag, header.letter)


def _split(numbers: np.ndarray, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors of the given lengths, which share the memory of `numbers`."""
    ends = np.cumsum(lengths).tolist()
    return tuple(torch.from_numpy(numbers[end - n : end]) for end, n in zip(ends, lengths, strict=True))
