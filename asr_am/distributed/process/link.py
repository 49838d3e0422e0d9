"""This process' connection to another learner's mail."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import zmq

from asr_am.distributed.process.incoming import Credit
from asr_am.distributed.process.outgoing import Channel
from asr_am.distributed.process.sockets import open_socket, watch
from asr_am.distributed.process.wire import PIECE, Header, Kind, encode

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
