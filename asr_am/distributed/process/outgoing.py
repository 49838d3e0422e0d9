"""Letters that go out: at most one of a tag under way to a learner, and one more that waits for it.

All is called inside `Waiting.change`, by tasks that post and by the mail thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.process.faults import Fates
from asr_am.distributed.process.wire import PIECE
from asr_am.distributed.team import Usage

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
