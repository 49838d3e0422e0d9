"""Messages of a virtual team: flow control, transfer times, late and lost messages, and rejection by receivers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.coordinated_backend import RELIABLE
from asr_am.distributed.membership import Membership
from asr_am.distributed.simulator.network import SimNetwork
from asr_am.distributed.simulator.scheduler import Condition, Scheduler, SimTask
from asr_am.distributed.simulator.sim_learner import SimLearner
from asr_am.distributed.team import Message, shapes_match
from asr_am.distributed.wire_dtype import num_words, rounded, travels_as

FLOAT_BYTES = 4


@dataclass
class LinkChannel:
    """Messages of one tag from one incarnation of a learner to one incarnation of another.

    Attributes:
        incarnations: incarnations of the sender and the receiver.
        busy: a message is in flight, or has arrived and was not received.
        next: the message that is sent after it.
        clock: clock of the last message that arrived. A lower one is rejected.
    """

    source: int
    to: int
    tag: str
    incarnations: tuple[int, int]
    busy: bool = False
    next: Message | None = None
    clock: float = -math.inf


@dataclass
class SimInbox:
    """Messages that have arrived at one learner.

    Attributes:
        arrived: condition that is woken by arrivals, and by the death of a learner.
        accepted: lengths of the tensors, by registered tag.
        receiving: tasks that wait for a message, by tag. An arrival wakes those of its tag only.
        messages: channel and message, in the order of arrival.
    """

    arrived: Condition
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    receiving: defaultdict[str, list[SimTask]] = field(default_factory=lambda: defaultdict(list))
    messages: list[tuple[LinkChannel, Message]] = field(default_factory=list)

    def take(self, tag: str, source: int | None) -> tuple[LinkChannel, Message] | None:
        for index, (channel, message) in enumerate(self.messages):
            if message.tag == tag and source in (None, message.source):
                del self.messages[index]
                return channel, message
        return None


class SimMessaging:
    """Point-to-point messages between virtual learners.

    At most one message per tag and pair of learners is in flight, and at most one more waits for it.

    Args:
        modelled: maps bytes of the trained model to bytes of the workload.
        streams: random stream of each learner's faults.
        wire: type in which float32 tensors are sent.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        learners: Sequence[SimLearner],
        network: SimNetwork,
        modelled: Callable[[int], float],
        faults: Faults,
        streams: Sequence[np.random.Generator],
        wire: torch.dtype,
    ) -> None:
        self._scheduler, self._learners, self._network, self._modelled = scheduler, learners, network, modelled
        self._faults, self._streams, self._wire = faults, streams, wire
        self._inboxes = [SimInbox(Condition(scheduler)) for _ in learners]
        self._channels: dict[tuple[int, int, str], LinkChannel] = {}
        self._channels_of: list[list[tuple[int, int, str]]] = [[] for _ in learners]  # keys, also of dropped ones

    def register_tag(self, rank: int, tag: str, lengths: tuple[int, ...]) -> None:
        self._inboxes[rank].accepted[tag] = lengths

    def send(self, source: int, to: int, tag: str, clock: int, tensors: Sequence[Tensor]) -> None:
        sender, receiver = self._learners[source], self._learners[to]
        if not (sender.alive and sender.membership[to].alive and receiver.alive):
            return
        message = Message(source, tag, clock, tuple(snapshot(tensor, self._wire) for tensor in tensors))
        key = (source, to, tag)
        if key not in self._channels:
            self._channels[key] = LinkChannel(*key, (sender.incarnation, receiver.incarnation))
            self._channels_of[source].append(key)
            self._channels_of[to].append(key)
        channel = self._channels[key]
        if not channel.busy:
            self._send(channel, message)
        else:
            sender.comm_stats.overwritten += channel.next is not None
            channel.next = message

    def recv(self, rank: int, tag: str, source: int | None, timeout: float | None) -> Message | None:
        inbox, membership = self._inboxes[rank], self._learners[rank].membership
        first = None if source is None else membership[source]
        found: tuple[LinkChannel, Message] | None = None

        def ready() -> bool:
            nonlocal found
            found = inbox.take(tag, source)
            peer_gone = source is not None and (not membership[source].alive or membership[source] != first)
            return found is not None or peer_gone

        sender = "any learner" if source is None else f"learner {source}"
        task = self._scheduler.current
        assert task is not None, "only tasks wait"
        inbox.receiving[tag].append(task)
        try:
            inbox.arrived.wait_for(ready, f"a message {tag!r} from {sender}", timeout)
        finally:
            inbox.receiving[tag].remove(task)
        if found is None:
            return None
        channel, message = found
        self._free(channel)
        return message

    def end(self, rank: int) -> RankMessages:
        """Returns one learner's end."""
        return RankMessages(self, rank)

    def peers(self, rank: int) -> PeerUpdates:
        """Returns what changes one learner's view of the others."""
        return PeerUpdates(self._learners[rank].membership, self._inboxes[rank].arrived)

    def lose(self, rank: int) -> None:
        """Drops the messages to and from a dead learner that have not arrived."""
        for key in self._channels_of[rank]:
            channel = self._channels.pop(key, None)
            if channel is not None:
                channel.next = None
        self._channels_of[rank].clear()
        self._inboxes[rank].messages.clear()
        self._inboxes[rank].accepted.clear()

    def restart(self, rank: int) -> None:
        """Rejects the messages of an earlier incarnation that have not been received."""
        for learner, inbox in zip(self._learners, self._inboxes, strict=True):
            kept = [entry for entry in inbox.messages if entry[0].source != rank]
            learner.comm_stats.rejected += len(inbox.messages) - len(kept)
            inbox.messages[:] = kept

    def _send(self, channel: LinkChannel, message: Message) -> None:
        channel.busy = True
        sender = self._learners[channel.source]
        comm_stats = sender.comm_stats
        lengths = [tensor.numel() for tensor in message.tensors]
        count = FLOAT_BYTES * num_words(lengths, [travels_as(tensor, self._wire) for tensor in message.tensors])
        modelled = self._modelled(count)
        comm_stats.messages_sent += 1
        comm_stats.bytes_sent[channel.to] += count
        comm_stats.modelled_bytes += modelled
        arrived: Callable[[], None] = partial(self._arrive, channel, message)
        reliable = channel.tag in RELIABLE
        may_be_late = self._faults.late_tag in (None, channel.tag) and not reliable
        late = may_be_late and self._fails(channel.source, "late", self._faults.late_share)
        if not reliable and self._fails(channel.source, "lost", self._faults.lost_share):
            comm_stats.lost += 1
            arrived = partial(self._free, channel)
        if late:
            arrived = partial(self._call_later, self._faults.late_seconds, arrived)
        self._network.deliver(
            sender.host, self._learners[channel.to].host, modelled, arrived, (channel.source, channel.to)
        )

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._scheduler.call_at(self._scheduler.now + seconds, callback)

    def _fails(self, rank: int, kind: str, share: float) -> bool:
        fails = share > 0 and self._streams[rank].random() < share
        if fails:
            self._learners[rank].comm_stats.faults[kind] += 1
        return fails

    def _arrive(self, channel: LinkChannel, message: Message) -> None:
        sender, receiver = self._learners[channel.source], self._learners[channel.to]
        inbox = self._inboxes[channel.to]
        if not receiver.alive or receiver.incarnation != channel.incarnations[1]:
            return
        lengths = tuple(tensor.numel() for tensor in message.tensors)
        if (
            sender.run != receiver.run or sender.incarnation != channel.incarnations[0]
            or message.clock < channel.clock or not shapes_match(lengths, inbox.accepted.get(message.tag))
        ):  # fmt: skip
            receiver.comm_stats.rejected += 1
            self._free(channel)
            return
        channel.clock = message.clock
        # a restarted learner may be heard before the supervisor has announced it
        receiver.membership.add(sender.rank, sender.incarnation, "")
        inbox.messages.append((channel, message))
        inbox.arrived.wake(inbox.receiving[message.tag])

    def _free(self, channel: LinkChannel) -> None:
        """Ends the message in flight, and sends the next one."""
        channel.busy = False
        if channel.next is not None:
            message, channel.next = channel.next, None
            self._send(channel, message)


@dataclass(frozen=True)
class PeerUpdates:
    """Changes one learner's view of the others (`membership.Peers`)."""

    membership: Membership
    arrived: Condition

    def on_peer_started(self, rank: int, incarnation: int, address: str) -> None:
        self.membership.add(rank, incarnation, address)

    def on_peer_died(self, rank: int, incarnation: int) -> None:
        if self.membership.mark_dead(rank, incarnation):
            self.arrived.wake()


@dataclass(frozen=True)
class RankMessages:
    """One learner's messages (`coordinated_backend.Transport`)."""

    messaging: SimMessaging
    rank: int

    def register_tag(self, tag: str, lengths: tuple[int, ...]) -> None:
        self.messaging.register_tag(self.rank, tag, lengths)

    def send(self, to: int, tag: str, clock: int, tensors: tuple[Tensor, ...]) -> None:
        self.messaging.send(self.rank, to, tag, clock, tensors)

    def recv(self, tag: str, source: int | None, timeout: float | None) -> Message | None:
        return self.messaging.recv(self.rank, tag, source, timeout)


def snapshot(tensor: Tensor, wire: torch.dtype) -> Tensor:
    """Returns a copy of a tensor as its receiver has it, on the CPU."""
    if tensor.dtype == torch.int32 or wire == torch.float32:
        return tensor.detach().to("cpu", travels_as(tensor, wire), copy=True)
    return rounded(tensor.detach().to("cpu"), wire)
