"""Letters of a virtual team: credits, links, late and lost ones, and what a receiver refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.simulator.network import Network
from asr_am.distributed.simulator.scheduler import Scheduler, Signal
from asr_am.distributed.simulator.sim_learner import Member
from asr_am.distributed.team import Letter, fits

FLOAT_BYTES = 4


@dataclass
class Channel:
    """Letters of one tag from one incarnation of a learner to one of another.

    busy: a letter is under way or not collected yet. next: the letter that is sent when it is.
    """

    source: int
    to: int
    tag: str
    incarnations: tuple[int, int]
    busy: bool = False
    next: Letter | None = None


@dataclass
class Inbox:
    """letters: in the order in which they arrived. accepted: lengths of the tensors by tag. awaited: learners whose
    letters somebody waits for.
    """

    arrived: Signal
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    letters: list[tuple[Channel, Letter]] = field(default_factory=list)
    awaited: list[int | None] = field(default_factory=list)

    def take(self, tag: str, source: int | None) -> tuple[Channel, Letter] | None:
        for place, (channel, letter) in enumerate(self.letters):
            if letter.tag == tag and source in (None, letter.source):
                del self.letters[place]
                return channel, letter
        return None


class Mail:
    """modelled: bytes that stand for so many real ones. streams: random numbers for each learner's faults."""

    def __init__(
        self,
        scheduler: Scheduler,
        members: Sequence[Member],
        network: Network,
        modelled: Callable[[int], float],
        faults: Faults,
        streams: Sequence[np.random.Generator],
    ) -> None:
        self._scheduler, self._members, self._network, self._modelled = scheduler, members, network, modelled
        self._faults, self._streams = faults, streams
        self._inboxes = [Inbox(Signal(scheduler)) for _ in members]
        self._channels: dict[tuple[int, int, str], Channel] = {}

    def accept(self, rank: int, tag: str, lengths: tuple[int, ...]) -> None:
        self._inboxes[rank].accepted[tag] = lengths

    def post(self, source: int, to: int, tag: str, clock: int, tensors: Sequence[Tensor]) -> None:
        sender, receiver = self._members[source], self._members[to]
        if not (sender.alive and receiver.alive):
            return
        letter = Letter(source, tag, clock, tuple(snapshot(tensor) for tensor in tensors))
        key = (source, to, tag)
        if key not in self._channels:
            self._channels[key] = Channel(*key, (sender.incarnation, receiver.incarnation))
        channel = self._channels[key]
        if not channel.busy:
            self._send(channel, letter)
        else:
            sender.usage.superseded += channel.next is not None
            channel.next = letter

    def collect(self, rank: int, tag: str, source: int | None, timeout: float | None) -> Letter | None:
        inbox = self._inboxes[rank]
        found: tuple[Channel, Letter] | None = None

        def ready() -> bool:
            nonlocal found
            found = inbox.take(tag, source)
            return found is not None or (source is not None and not self._members[source].alive)

        sender = "anybody" if source is None else f"learner {source}"
        inbox.awaited.append(source)
        try:
            inbox.arrived.wait_for(ready, f"a letter {tag!r} from {sender}", timeout)
        finally:
            inbox.awaited.remove(source)
        if found is None:
            return None
        channel, letter = found
        self._free(channel)
        return letter

    def lose(self, rank: int) -> None:
        """Drop what waits for or in a dead learner, and let nobody wait for its letters."""
        for key, channel in list(self._channels.items()):
            if rank in (channel.source, channel.to):
                channel.next = None
                del self._channels[key]
        self._inboxes[rank].letters.clear()
        self._inboxes[rank].accepted.clear()
        for inbox in self._inboxes:
            if rank in inbox.awaited:
                inbox.arrived.wake()

    def restart(self, rank: int) -> None:
        """Refuse what an earlier incarnation has left in others' inboxes."""
        for member, inbox in zip(self._members, self._inboxes, strict=True):
            kept = [entry for entry in inbox.letters if entry[0].source != rank]
            member.usage.refused += len(inbox.letters) - len(kept)
            inbox.letters[:] = kept

    def _send(self, channel: Channel, letter: Letter) -> None:
        channel.busy = True
        sender = self._members[channel.source]
        usage = sender.usage
        count = sum(len(tensor) for tensor in letter.tensors) * FLOAT_BYTES
        modelled = self._modelled(count)
        usage.letters += 1
        usage.bytes_sent[channel.to] += count
        usage.modelled_bytes += modelled
        arrival = self._network.deliver(self._scheduler.now, sender.host, self._members[channel.to].host, modelled)
        may_be_late = self._faults.late_tag in (None, channel.tag)
        if may_be_late and self._fails(channel.source, "late", self._faults.late_share):
            arrival += self._faults.late_seconds
        if self._fails(channel.source, "lost", self._faults.lost_share):
            usage.lost += 1
            self._scheduler.call_at(arrival, partial(self._free, channel))
        else:
            self._scheduler.call_at(arrival, partial(self._arrive, channel, letter))

    def _fails(self, rank: int, kind: str, share: float) -> bool:
        fails = share > 0 and self._streams[rank].random() < share
        if fails:
            self._members[rank].usage.faults[kind] += 1
        return fails

    def _arrive(self, channel: Channel, letter: Letter) -> None:
        sender, receiver = self._members[channel.source], self._members[channel.to]
        inbox = self._inboxes[channel.to]
        if not receiver.alive or receiver.incarnation != channel.incarnations[1]:
            return
        lengths = tuple(len(tensor) for tensor in letter.tensors)
        if sender.incarnation != channel.incarnations[0] or not fits(lengths, inbox.accepted.get(letter.tag)):
            receiver.usage.refused += 1
            self._free(channel)
            return
        inbox.letters.append((channel, letter))
        inbox.arrived.wake()

    def _free(self, channel: Channel) -> None:
        """The letter under way is no more: send the next."""
        channel.busy = False
        if channel.next is not None:
            letter, channel.next = channel.next, None
            self._send(channel, letter)


def snapshot(tensor: Tensor) -> Tensor:
    """A copy as it goes over the wire: float32, on the CPU."""
    return tensor.detach().to("cpu", torch.float32, copy=True)
