"""Letters that come in: which are refused, how their pieces become tensors, and where they wait to be collected.

Only the mail thread calls this, but for `accept` and `take`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch

from asr_am.distributed.process.buffers import Buffers
from asr_am.distributed.process.roster import Roster
from asr_am.distributed.process.waiting import Waiting
from asr_am.distributed.process.wire import FIRST_CLOCK, PIECE, Header
from asr_am.distributed.team import Letter, Usage, fits


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
