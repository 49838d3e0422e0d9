"""This process' connection to another learner's mail.

A learner's mail: what its tasks ask of the mail thread, and what that does with messages.

Everything comes in at one ROUTER and goes out through a DEALER for each other learner: letters, and credits for those
that were collected. On one connection they stay in order, so that whoever hears from a learner that has collected its
letter already has the credit for it. A connection that breaks is made again, and the letter under way is sent again
from its beginning: the receiver knows letters by their number.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import zmq
from torch import Tensor

from asr_am.distributed.runtime.event_loop import Reactor, Waiting
from asr_am.distributed.runtime.fault_injection import Fates
from asr_am.distributed.runtime.membership import Roster
from asr_am.distributed.runtime.message_queues import (
    Buffers,
    Channel,
    Credit,
    Inbox,
    Outbox,
    Outgoing,
    fill,
    lengths_of,
)
from asr_am.distributed.runtime.security import Door, next_event, open_socket, watch
from asr_am.distributed.runtime.wire import PIECE, Header, Kind, Malformed, check_tag, decode, encode
from asr_am.distributed.team import Letter, Usage

PIECES_AHEAD = 64  # that ZeroMQ holds for a connection


class Link:
    """me: this learner's HELLO, sent first, with its own address. attempt: connections that were made before it. owed:
    credits for that learner.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str | None, me: Header, own: str,
        attempt: int, owed: deque[Credit],
    ) -> None:  # fmt: skip
        self._me, self._owed, self.attempt = me, owed, attempt
        self.socket = open_socket(context, zmq.DEALER, key)
        self.socket.setsockopt(zmq.SNDHWM, PIECES_AHEAD)
        self.monitor = watch(self.socket)
        self.socket.connect(address)
        self.socket.send_multipart([encode(me), own.encode()])

    def send_credits(self) -> bool:
        """False where ZeroMQ does not take them all at present."""
        while self._owed:
            credit = self._owed[0]
            header = replace(
                self._me, kind=Kind.TAKEN, clock=credit.incarnation, tag=credit.tag, letter=credit.letter
            )  # fmt: skip
            try:
                self.socket.send(encode(header), zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._owed.popleft()
        return True

    def send(self, channel: Channel) -> bool:
        """Hand the letter under way to ZeroMQ, as much as it takes, after all credits that are owed at present; False
        where that was not all.
        """
        letter = channel.under_way
        if not self.send_credits():
            return False
        if letter is None or letter.due > time.monotonic():
            return True
        while channel.sent < letter.pieces():
            offset = channel.sent * PIECE
            header = replace(
                self._me, kind=Kind.PIECE, clock=letter.clock, tag=channel.tag, letter=letter.number,
                attempt=self.attempt, offset=offset, lengths=letter.lengths,
            )  # fmt: skip
            piece = letter.numbers[offset : offset + PIECE].data
            try:
                self.socket.send_multipart([encode(header), piece], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            channel.sent += 1
        return True

    def leave(self, lost: int) -> None:
        """Say goodbye: as the last message, which need not arrive."""
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.send(encode(replace(self._me, kind=Kind.LEAVE, clock=lost)), zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


log = logging.getLogger(__name__)

GRACE = 2.0
RECONNECT = 0.2  # seconds before a broken connection is made again
PIECES_WAITING = 16  # of one sender, before TCP makes it wait
LARGEST = 4 * PIECE + 64  # bytes of a frame, what encryption adds included
MESSAGES_AT_ONCE = 64  # read from one socket before the others have their turn
ADDRESS = re.compile(rb"tcp://[0-9.]{7,15}:[0-9]{1,5}")


class PostOffice:
    """host: this machine's address, which others reach it at. me: this learner's HELLO. reliable: tags that injected
    faults spare. on_loss: told who died and how, where this post office has to find out itself (`connect_all`): whose
    connection broke and cannot be made again for `grace` seconds. If None, a supervisor knows, and `born` and `died`
    are called.
    """

    def __init__(
        self, reactor: Reactor, me: Header, host: str, roster: Roster, waiting: Waiting, usage: Usage, fates: Fates,
        key: str | None, reliable: tuple[str, ...] = (), on_loss: Callable[[int, str], None] | None = None,
        grace: float = GRACE,
    ) -> None:  # fmt: skip
        self._reactor, self._me, self._roster, self._waiting, self._key = reactor, me, roster, waiting, key
        self._on_loss, self._grace = on_loss, grace
        self._buffers = Buffers()
        self._inbox = Inbox(me.run, roster, waiting, usage, self._buffers)
        self._outbox = Outbox(usage, fates, reliable)
        self._router = open_socket(reactor.context, zmq.ROUTER, key)
        self._router.setsockopt(zmq.RCVHWM, PIECES_WAITING)
        self._router.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self._door = Door(self._router, f"the mail of learner {me.source}", self._inbox.refuse)
        self.address = f"tcp://{host}:{self._router.bind_to_random_port(f'tcp://{host}')}"
        self._links: dict[int, Link] = {}
        self._attempts = 0
        self.broken: dict[int, float] = {}  # since when, by learner
        reactor.attach(self._router, self._receive)
        reactor.attach(self._door.monitor, self._door.look)
        reactor.at_stop(self._close)

    # for the learner's tasks

    def accept(self, tag: str, lengths: tuple[int, ...]) -> None:
        check_tag(tag)
        self._inbox.accept(tag, lengths)

    def post(self, to: int, tag: str, clock: int, tensors: tuple[Tensor, ...]) -> None:
        self._waiting.check()
        check_tag(tag)
        if not self._roster[to].alive:
            return
        lengths = lengths_of(tensors)
        letter = Outgoing(clock, lengths, self._buffers.take(sum(lengths)))
        with self._waiting.change():
            channel = self._outbox.put(to, tag, letter)
        for end in fill(letter.numbers, tensors):
            letter.filled = end
            self._reactor.call(partial(self._push, channel))

    def collect(self, tag: str, source: int | None, timeout: float | None) -> Letter | None:
        """None also where the incarnation of `source` that lives at the call dies, and leaves no letter."""
        letter: Letter | None = None
        first = self._roster[source] if source is not None else None

        def ready() -> bool:
            nonlocal letter
            letter = self._inbox.take(tag, source)
            gone = source is not None and (not self._roster[source].alive or self._roster[source] != first)
            return letter is not None or gone

        self._waiting.wait_for(ready, timeout)
        if letter is not None:
            self._reactor.call(partial(self._pay, letter.source))
        return letter

    def leave(self, lost: int | None) -> None:
        """Tell all that this learner goes, because it lost another one or in order."""
        if self._on_loss is None:
            return  # the supervisor tells
        rank = self._me.source if lost is None else lost

        def say() -> None:
            for link in self._links.values():
                link.leave(rank)

        self._reactor.call(say)

    # for the mail thread

    def connect_all(self) -> None:
        """Make the connections to all the living, and notice from now on when one breaks."""
        for rank in self._roster.alive():
            if rank != self._me.source:
                self.broken[rank] = time.monotonic()
                self._link(rank)

    def born(self, rank: int, incarnation: int, address: str) -> None:
        if incarnation > self._roster[rank].incarnation:
            self._drop(rank)
            self._inbox.forget(rank)
            with self._waiting.change():
                self._roster.born(rank, incarnation, address)

    def died(self, rank: int, incarnation: int) -> None:
        with self._waiting.change():
            news = self._roster.died(rank, incarnation)
        if news:
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        with self._waiting.change():
            self._outbox.drop(rank)
        self.broken.pop(rank, None)
        self._close_link(rank)

    def _close(self) -> None:
        for rank in list(self._links):
            self._close_link(rank)
        self._door.close()
        self._router.close()

    # letters that go out

    def _push(self, channel: Channel) -> None:
        """Send what can be sent of a channel's letter."""
        letter = channel.under_way
        if letter is None or not self._roster[channel.to].alive:
            return
        late = letter.due - time.monotonic()
        if late > 0:
            self._reactor.after(late, lambda: self._push(channel))
            return
        link = self._links.get(channel.to) or self._link(channel.to)
        if not link.send(channel):
            self._reactor.want_to_send(link.socket, True)

    def _pay(self, rank: int) -> None:
        """Give back the credits that are owed."""
        if self._roster[rank].alive:
            link = self._links.get(rank) or self._link(rank)
            if not link.send_credits():
                self._reactor.want_to_send(link.socket, True)

    def _link(self, rank: int) -> Link:
        """Make a connection, and send all letters under way to this learner from their beginning."""
        address = self._roster[rank].address
        self._inbox.owe_again(rank)
        owed = self._inbox.owed[rank]
        link = Link(self._reactor.context, address, self._key, self._me, self.address, self._attempts, owed)
        self._attempts += 1
        self._links[rank] = link
        self._reactor.attach(link.socket, lambda: self._on_link(rank, link))
        self._reactor.attach(link.monitor, lambda: self._on_event(rank, link))
        link.send_credits()
        with self._waiting.change():
            channels = self._outbox.again(rank)
        for channel in channels:
            self._push(channel)
        return link

    def _close_link(self, rank: int) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            self._reactor.detach(link.socket)
            self._reactor.detach(link.monitor)
            link.close()

    def _on_link(self, rank: int, link: Link) -> None:
        """There is room again."""
        for _ in _messages(link.socket):
            self._refuse()  # nothing is expected on this way
        self._reactor.want_to_send(link.socket, not link.send_credits())
        with self._waiting.change():
            busy = self._outbox.busy(rank)
        for channel in busy:
            self._push(channel)

    def _on_event(self, rank: int, link: Link) -> None:
        """A connection is ready, or broken."""
        while (event := next_event(link.monitor)) is not None:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                with self._waiting.change():
                    self.broken.pop(rank, None)
                continue
            log.info("the connection to learner %d broke; it is made again", rank)
            self._close_link(rank)
            if rank not in self.broken:
                self.broken[rank] = time.monotonic()
                self._reactor.after(self._grace, partial(self._give_up, rank, self.broken[rank]))
            self._reactor.after(RECONNECT, lambda: self._reconnect(rank))
            return

    def _reconnect(self, rank: int) -> None:
        if self._roster[rank].alive and rank not in self._links:
            self._link(rank)

    def _give_up(self, rank: int, since: float) -> None:
        if self._on_loss is not None and self._roster[rank].alive and self.broken.get(rank) == since:
            self._lose(rank, "died, or cannot be reached any more")

    def _lose(self, rank: int, reason: str) -> None:
        self.died(rank, self._roster[rank].incarnation)
        assert self._on_loss is not None
        self._on_loss(rank, reason)

    # messages that come in

    def _receive(self) -> None:
        for _, *frames in _messages(self._router):
            header = self._decode(frames[0].bytes) if 1 <= len(frames) <= 2 else self._refuse()
            if header is None:
                continue
            payload = frames[1].buffer if len(frames) == 2 else memoryview(b"")
            if header.kind is Kind.HELLO:
                self._hello(header, bytes(payload))
            elif not self._inbox.knows(header):
                continue
            elif header.kind is Kind.PIECE:
                self._inbox.piece(header, payload)
                if self._inbox.owed[header.source]:
                    self._pay(header.source)
            elif header.kind is Kind.TAKEN and header.clock == self._me.incarnation:
                self._taken(header)
            elif header.kind is Kind.LEAVE and self._on_loss is not None:
                self._leaves(header)
            else:
                self._refuse()

    def _hello(self, header: Header, address: bytes) -> None:
        """A learner that was restarted may write before the supervisor's news of it have come."""
        new = header.run == self._me.run and self._roster.is_new(header.source, header.incarnation)
        if new and self._on_loss is None and ADDRESS.fullmatch(address):
            self.born(header.source, header.incarnation, address.decode())
        else:
            self._inbox.knows(header)

    def _leaves(self, header: Header) -> None:
        lost = header.clock
        if lost not in (header.source, self._me.source) and 0 <= lost < self._roster.size:
            self._lose(lost, f"died, or cannot be reached any more by learner {header.source}")
        with self._waiting.change():
            self._roster.leaves(header.source)
        self._drop(header.source)

    def _taken(self, header: Header) -> None:
        with self._waiting.change():
            channel = self._outbox.done(header.source, header.tag, header.letter)
        if channel is not None:
            self._push(channel)

    def _decode(self, data: bytes) -> Header | None:
        try:
            return decode(data)
        except Malformed as error:
            self._door.refuse(f"a message: {error}")
            return None

    def _refuse(self) -> Header | None:
        self._inbox.refuse()
        return None


def _messages(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """What can be read from a socket now, up to a limit."""
    for _ in range(MESSAGES_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
