"""Transport of a learner: point-to-point messages between processes.

All frames arrive at one ROUTER socket and leave through one DEALER socket for each other learner. These frames are
chunks of messages, and credits (ACKs) for messages that were received. One connection keeps them in order, so a learner
that hears from another which has received its message already has the credit for it. A broken connection is made again,
and the message in flight is sent again from its beginning. The receiver identifies messages by their number. A large
message between learners of one host is in shared memory (`message_buffers`), and a single frame tells where.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

import torch
import zmq
from torch import Tensor

from asr_am.distributed.membership import Membership
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.fault_injection import MessageFaults
from asr_am.distributed.runtime.message_buffers import BufferPool, SharedPool
from asr_am.distributed.runtime.message_queues import (
    Credit,
    OutgoingMessage,
    Receiver,
    SendChannel,
    Sender,
    fill,
    lengths_of,
)
from asr_am.distributed.runtime.security import MAX_FRAME_BYTES, ConnectionMonitor, next_event, open_socket, watch
from asr_am.distributed.runtime.wire import CHUNK, Kind, Malformed, WireHeader, check_tag, decode, encode
from asr_am.distributed.team import CommStats, Message
from asr_am.distributed.wire_dtype import num_words, travels_as

MAX_CHUNKS_AHEAD = 64  # chunks that ZeroMQ queues for one connection


class Connection:
    """Connection of this process to another learner's transport.

    Args:
        context: ZeroMQ context.
        address: address of the other transport.
        key: secret for encryption, or None.
        hello: HELLO header of this learner, sent first.
        local_address: address of this learner's transport, sent with HELLO.
        conn_epoch: number of connections made before this one.
        credits: credits to send to the other learner.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str | None, hello: WireHeader,
        local_address: str, conn_epoch: int, credits: deque[Credit],
    ) -> None:  # fmt: skip
        self._hello, self._credits, self.conn_epoch = hello, credits, conn_epoch
        self.socket = open_socket(context, zmq.DEALER, key)
        self.socket.setsockopt(zmq.SNDHWM, MAX_CHUNKS_AHEAD)
        self.monitor = watch(self.socket)
        self.socket.connect(address)
        self.socket.send_multipart([encode(hello), local_address.encode()])

    def send_credits(self) -> bool:
        """Sends the credits that are due. Returns False if ZeroMQ does not accept all of them now."""
        while self._credits:
            credit = self._credits[0]
            header = replace(
                self._hello, kind=credit.kind, clock=credit.incarnation, tag=credit.tag, seq=credit.seq
            )  # fmt: skip
            try:
                self.socket.send(encode(header), zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._credits.popleft()
        return True

    def send(self, channel: SendChannel) -> bool:
        """Sends all credits, then as much of the message in flight as ZeroMQ accepts.

        Returns:
            False if something is left to send.
        """
        message = channel.in_flight
        if not self.send_credits():
            return False
        if message is None or message.due > time.monotonic():
            return True
        while channel.sent < message.num_ready_chunks():
            offset, segment = channel.sent * CHUNK, message.segment
            header = replace(
                self._hello, kind=Kind.CHUNK if segment is None else Kind.SHARED, clock=message.clock, tag=channel.tag,
                seq=message.number, conn_epoch=self.conn_epoch, offset=offset, lengths=message.lengths,
                exact=message.exact, dtype=message.dtype,
            )  # fmt: skip
            payload = message.words[offset : offset + CHUNK].data if segment is None else segment.place
            try:
                self.socket.send_multipart([encode(header), payload], zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            channel.sent += 1
            if segment is not None:
                segment.sent = True
        return True

    def send_goodbye(self, lost: int) -> None:
        """Sends GOODBYE as the last frame. It may get lost."""
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.send(encode(replace(self._hello, kind=Kind.GOODBYE, clock=lost)), zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


log = logging.getLogger(__name__)

RECONNECT_GRACE = 2.0  # seconds after which a learner is lost that cannot be reached again
RECONNECT_INTERVAL = 0.2  # seconds before a broken connection is made again
MAX_QUEUED_CHUNKS = 16  # chunks of one sender that are queued before TCP blocks it
MAX_FRAMES_PER_POLL = 64  # messages read from one socket before the others are served
ADDRESS = re.compile(rb"tcp://[0-9.]{7,15}:[0-9]{1,5}|ipc:///[^\0]{1,106}")


class Transport:
    """Sends and receives the messages of one learner.

    Without `on_loss`, the supervisor detects deaths, and `on_peer_started` and `on_peer_died` must be called. With it,
    the transport detects them: a learner is lost if its connection breaks and cannot be made again for `grace` seconds.

    Args:
        event_loop: the communication thread.
        hello: HELLO header of this learner.
        listen: where others reach this learner, tcp://host for a free port of that address, or ipc://path.
        membership: state of the other learners.
        wait_monitor: wakes the learner's tasks.
        comm_stats: statistics of this learner.
        message_faults: injected faults.
        key: secret for encryption, or None.
        reliable: tags without injected faults.
        neighbours: ranks of the other learners of this host.
        on_loss: called with the rank of a lost learner, and the reason.
        grace: seconds in which a broken connection must be made again.
        wire: type in which float32 tensors are sent.

    Attributes:
        address: address of this transport, tcp://host:port or ipc://path.
        broken: time since when each unreachable learner is unreachable, by rank.
    """

    def __init__(
        self, event_loop: EventLoop, hello: WireHeader, listen: str, membership: Membership, wait_monitor: WaitMonitor,
        comm_stats: CommStats, message_faults: MessageFaults, key: str | None, reliable: tuple[str, ...] = (),
        neighbours: Collection[int] = (), on_loss: Callable[[int, str], None] | None = None,
        grace: float = RECONNECT_GRACE, wire: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self._event_loop, self._hello, self._key = event_loop, hello, key
        self._membership, self._wait_monitor = membership, wait_monitor
        self._on_loss, self._grace, self._wire = on_loss, grace, wire
        self._buffers = BufferPool()
        self._receiver = Receiver(hello.run, membership, wait_monitor, comm_stats, self._buffers)
        self._sender = Sender(comm_stats, message_faults, reliable)
        self._router = open_socket(event_loop.context, zmq.ROUTER, key)
        self._router.setsockopt(zmq.RCVHWM, MAX_QUEUED_CHUNKS)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._connection_monitor = ConnectionMonitor(self._router, f"learner {hello.source}", self._receiver.reject)
        if listen.startswith("ipc:"):
            self._router.bind(listen)
            self.address = listen
        else:
            self.address = f"{listen}:{self._router.bind_to_random_port(listen)}"
        self._shared = SharedPool(hello.source, neighbours, self.address)
        self._connections_by_rank: dict[int, Connection] = {}
        self._num_connections = 0
        self.broken: dict[int, float] = {}
        event_loop.attach(self._router, self._receive)
        event_loop.attach(self._connection_monitor.monitor, self._connection_monitor.poll)
        event_loop.at_stop(self._close)

    # called by the learner's tasks

    def register_tag(self, tag: str, lengths: tuple[int, ...]) -> None:
        check_tag(tag)
        self._receiver.register_tag(tag, lengths)

    def send(self, to: int, tag: str, clock: int, tensors: tuple[Tensor, ...]) -> None:
        self._wait_monitor.check()
        check_tag(tag)
        if not self._membership[to].alive:
            return
        lengths = lengths_of(tensors)
        dtypes = tuple(travels_as(tensor, self._wire) for tensor in tensors)
        count = num_words(lengths, dtypes)
        segment = self._shared.acquire(to, count)
        words = self._buffers.acquire(count) if segment is None else segment.words(count)
        message = OutgoingMessage(clock, lengths, dtypes, words, segment)
        with self._wait_monitor.change():
            channel = self._sender.put(to, tag, message)
        for end in fill(words, tensors, dtypes):
            message.filled = end
            if segment is None or message.complete:
                self._event_loop.call(partial(self._push, channel))

    def recv(self, tag: str, source: int | None, timeout: float | None) -> Message | None:
        message = self._receiver.recv(tag, source, timeout)
        if message is not None:
            self._event_loop.call(partial(self._send_credits, message.source))
        return message

    def send_goodbye(self, lost: int | None) -> None:
        """Tells all others that this learner leaves: because it lost another one, or in good order (None)."""
        if self._on_loss is None:
            return  # the supervisor announces it
        rank = self._hello.source if lost is None else lost

        def send_all() -> None:
            for connection in self._connections_by_rank.values():
                connection.send_goodbye(rank)

        self._event_loop.call(send_all)

    # called by the communication thread

    def connect_all(self) -> None:
        """Connects to all live learners. Broken connections are detected from now on."""
        for rank in self._membership.live_ranks():
            if rank != self._hello.source:
                self.broken[rank] = time.monotonic()
                self._connect(rank)

    def on_peer_started(self, rank: int, incarnation: int, address: str) -> None:
        if incarnation > self._membership[rank].incarnation:
            self._drop(rank)
            self._receiver.forget(rank)
            with self._wait_monitor.change():
                self._membership.add(rank, incarnation, address)

    def on_peer_died(self, rank: int, incarnation: int) -> None:
        with self._wait_monitor.change():
            is_new = self._membership.mark_dead(rank, incarnation)
        if is_new:
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        with self._wait_monitor.change():
            self._sender.drop(rank)
        self._shared.forget(rank)
        self._receiver.unmap(rank)
        self.broken.pop(rank, None)
        self._close_connection(rank)

    def _close(self) -> None:
        for rank in list(self._connections_by_rank):
            self._close_connection(rank)
        self._connection_monitor.close()
        self._router.close()

    # outgoing frames

    def _push(self, channel: SendChannel) -> None:
        """Sends as much of a channel's message in flight as possible."""
        message = channel.in_flight
        if message is None or not self._membership[channel.to].alive:
            return
        delay = message.due - time.monotonic()
        if delay > 0:
            self._event_loop.after(delay, lambda: self._push(channel))
            return
        connection = self._connections_by_rank.get(channel.to) or self._connect(channel.to)
        if not connection.send(channel):
            self._event_loop.want_to_send(connection.socket, True)

    def _send_credits(self, rank: int) -> None:
        """Sends the credits that are due."""
        if self._receiver.credits[rank] and self._membership[rank].alive:
            connection = self._connections_by_rank.get(rank) or self._connect(rank)
            if not connection.send_credits():
                self._event_loop.want_to_send(connection.socket, True)

    def _connect(self, rank: int) -> Connection:
        """Makes a connection, and sends all messages in flight to this learner from their beginning."""
        address = self._membership[rank].address
        self._receiver.requeue_credits(rank)
        credits = self._receiver.credits[rank]
        connection = Connection(
            self._event_loop.context, address, self._key, self._hello, self.address, self._num_connections, credits
        )
        self._num_connections += 1
        self._connections_by_rank[rank] = connection
        self._event_loop.attach(connection.socket, lambda: self._on_writable(rank, connection))
        self._event_loop.attach(connection.monitor, lambda: self._on_event(rank, connection))
        connection.send_credits()
        with self._wait_monitor.change():
            channels = self._sender.again(rank)
        for channel in channels:
            self._push(channel)
        return connection

    def _close_connection(self, rank: int) -> None:
        connection = self._connections_by_rank.pop(rank, None)
        if connection is not None:
            self._event_loop.detach(connection.socket)
            self._event_loop.detach(connection.monitor)
            connection.close()

    def _on_writable(self, rank: int, connection: Connection) -> None:
        """Continues sending: ZeroMQ accepts frames again."""
        for _ in _messages(connection.socket):
            self._reject()  # no answers are expected on this connection
        self._event_loop.want_to_send(connection.socket, not connection.send_credits())
        with self._wait_monitor.change():
            busy = self._sender.busy(rank)
        for channel in busy:
            self._push(channel)

    def _on_event(self, rank: int, connection: Connection) -> None:
        """Notes that a connection is ready, or makes a broken one again."""
        while (event := next_event(connection.monitor)) is not None:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                with self._wait_monitor.change():
                    self.broken.pop(rank, None)
                continue
            log.debug("the connection to learner %d broke: reconnecting", rank)  # also when a run ends
            self._close_connection(rank)
            if rank not in self.broken:
                self.broken[rank] = time.monotonic()
                self._event_loop.after(self._grace, partial(self._give_up, rank, self.broken[rank]))
            self._event_loop.after(RECONNECT_INTERVAL, lambda: self._reconnect(rank))
            return

    def _reconnect(self, rank: int) -> None:
        if self._membership[rank].alive and rank not in self._connections_by_rank:
            self._connect(rank)

    def _give_up(self, rank: int, since: float) -> None:
        if self._on_loss is not None and self._membership[rank].alive and self.broken.get(rank) == since:
            self._lose(rank, "died, or cannot be reached any more")

    def _lose(self, rank: int, reason: str) -> None:
        self.on_peer_died(rank, self._membership[rank].incarnation)
        assert self._on_loss is not None
        self._on_loss(rank, reason)

    # incoming frames

    def _receive(self) -> None:
        for _, *frames in _messages(self._router):
            header = self._decode(frames[0].bytes) if 1 <= len(frames) <= 2 else self._reject()
            if header is None:
                continue
            payload = frames[1].buffer if len(frames) == 2 else memoryview(b"")
            if header.kind is Kind.HELLO:
                self._on_hello(header, bytes(payload))
            elif not self._receiver.is_known(header):
                continue
            elif header.kind is Kind.CHUNK:
                self._receiver.on_chunk(header, payload)
                self._send_credits(header.source)
            elif header.kind is Kind.SHARED:
                self._receiver.on_shared(header, bytes(payload))
                self._send_credits(header.source)
            elif header.kind is Kind.ACK and header.clock == self._hello.incarnation:
                self._on_ack(header)
            elif header.kind is Kind.UNSHARED and header.clock == self._hello.incarnation:
                self._on_unshared(header)
            elif header.kind is Kind.GOODBYE and self._on_loss is not None:
                self._on_goodbye(header)
            else:
                self._reject()

    def _on_hello(self, header: WireHeader, address: bytes) -> None:
        """Adds a restarted learner that connects before the supervisor has announced it."""
        new = header.run == self._hello.run and self._membership.is_new(header.source, header.incarnation)
        if new and self._on_loss is None and ADDRESS.fullmatch(address):
            self.on_peer_started(header.source, header.incarnation, address.decode())
        else:
            self._receiver.is_known(header)

    def _on_goodbye(self, header: WireHeader) -> None:
        lost = header.clock
        if lost not in (header.source, self._hello.source) and 0 <= lost < self._membership.size:
            self._lose(lost, f"died, or cannot be reached any more by learner {header.source}")
        with self._wait_monitor.change():
            self._membership.mark_left(header.source)
        self._drop(header.source)

    def _on_ack(self, header: WireHeader) -> None:
        with self._wait_monitor.change():
            channel = self._sender.done(header.source, header.tag, header.seq)
        if channel is not None:
            self._push(channel)

    def _on_unshared(self, header: WireHeader) -> None:
        self._shared.refused_by(header.source)
        with self._wait_monitor.change():
            channel = self._sender.unshare(header.source, header.tag, header.seq)
        if channel is not None:
            self._push(channel)

    def _decode(self, data: bytes) -> WireHeader | None:
        try:
            return decode(data)
        except Malformed as error:
            self._connection_monitor.reject(f"a message: {error}")
            return None

    def _reject(self) -> WireHeader | None:
        self._receiver.reject()
        return None


def _messages(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yields the messages that can be read from a socket now, up to a limit."""
    for _ in range(MAX_FRAMES_PER_POLL):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
