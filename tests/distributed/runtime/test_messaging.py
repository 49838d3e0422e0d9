from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import zmq

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.runtime.message_buffers import MIN_POOLED, BufferPool
from asr_am.distributed.runtime.message_queues import Credit
from asr_am.distributed.runtime.messaging import MAX_FRAME_BYTES
from asr_am.distributed.runtime.wire import CHUNK, Kind, WireHeader, decode, encode
from tests.support.tcp_proxy import TcpProxy, cut_once
from tests.support.transport_fixtures import RUN, TransportHarness, UnauthenticatedClient, transports

LARGE = 2 * CHUNK + 17  # three chunks


def message_header(**fields: object) -> WireHeader:
    """Returns the header of the only chunk of a message `w` [2] from learner 1 to learner 0."""
    header = WireHeader(Kind.CHUNK, RUN, 1, 0, clock=5, tag="w", seq=0, lengths=(2,))
    return replace(header, **fields)  # type: ignore[arg-type]


TWO = np.array([1, 2], np.float32).tobytes()


def test_messages_go_both_ways_as_they_were_when_sent() -> None:
    with transports(2) as (a, b):
        for peer in (a, b):
            peer.transport.register_tag("w", (LARGE, 0, 3))
        x = torch.arange(LARGE, dtype=torch.float32)
        a.transport.send(1, "w", 3, (x, torch.zeros(0), torch.tensor([7.0, 8.0, 9.0])))
        b.transport.send(0, "w", -4, (x.double(), torch.zeros(0), torch.ones(3)))
        x.zero_()
        message = b.recv("w")
        assert (message.source, message.tag, message.clock) == (0, "w", 3)
        assert torch.equal(message.tensors[0], torch.arange(LARGE, dtype=torch.float32))
        assert message.tensors[1].shape == (0,) and message.tensors[2].tolist() == [7, 8, 9]
        assert torch.equal(a.recv("w", 1).tensors[0], message.tensors[0])
        assert (
            a.comm_stats.bytes_sent == {1: 4 * (LARGE + 3)}
            and a.comm_stats.messages_sent == 1
            and b.comm_stats.rejected == 0
        )


def test_a_message_that_waits_for_the_one_before_is_overwritten() -> None:
    with transports(2) as (a, b):
        b.transport.register_tag("w", (1,))
        b.transport.register_tag("other", ())
        for clock in range(5):
            a.transport.send(1, "w", clock, (torch.tensor([float(clock)]),))
        a.transport.send(1, "other", 9, ())
        assert b.recv("other").clock == 9  # tags do not wait for each other
        assert [b.recv("w").clock for _ in range(2)] == [0, 4]
        assert b.transport.recv("w", None, 0.05) is None
        assert a.comm_stats.overwritten == 3 and a.comm_stats.messages_sent == 3


def test_learners_synchronous_never_overtake_a_message() -> None:
    """Who has heard from a learner that had collected its message may send the next, and nothing is overwritten."""
    steps = 300
    with transports(3) as team:
        for peer in team:
            peer.transport.register_tag("w", (1,))
        clocks: dict[int, list[int]] = {peer.rank: [] for peer in team}

        def exchange(peer: TransportHarness) -> None:
            others = [other for other in range(3) if other != peer.rank]
            for step in range(steps):
                for other in others:
                    peer.transport.send(other, "w", step, (torch.ones(1),))
                clocks[peer.rank] += [peer.recv("w", other).clock for other in others]

        threads = [threading.Thread(target=exchange, args=(peer,)) for peer in team]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [step for step in range(steps) for _ in range(2)]
        assert all(found == expected for found in clocks.values())
        assert [peer.comm_stats.overwritten for peer in team] == [0, 0, 0]


def test_from_any_source_in_the_order_of_arrival_or_from_one() -> None:
    with transports(3) as (a, b, c):
        a.transport.register_tag("w", (1,))
        b.transport.send(0, "w", 1, (torch.ones(1),))
        while not a.transport._receiver._ready:
            time.sleep(0.001)
        c.transport.send(0, "w", 2, (torch.ones(1),))
        assert a.transport.recv("w", 2, 30.0) is not None
        c.transport.send(0, "w", 3, (torch.ones(1),))
        assert [a.recv("w").source for _ in range(2)] == [1, 2]


def test_dead_learners_are_not_waited_for_and_nothing_is_sent_to_them() -> None:
    with transports(3) as (a, b, c):
        a.transport.register_tag("w", (1,))
        b.transport.send(0, "w", 1, (torch.ones(1),))
        c.transport.send(0, "w", 1, (torch.ones(1),))
        assert a.recv("w", 1).clock == 1
        threading.Timer(0.1, lambda: a.event_loop.call(lambda: a.transport.on_peer_died(1, 0))).start()
        assert a.transport.recv("w", 1, None) is None
        a.transport.send(1, "w", 1, (torch.ones(1),))
        assert a.membership.live_ranks() == (0, 2) and a.comm_stats.messages_sent == 0
        a.event_loop.call(lambda: a.transport.on_peer_died(2, 0))
        assert a.transport.recv("w", 2, None) is not None, "what it left is still there"
        assert a.transport.recv("w", 2, None) is None


WRONG = {
    "garbage": [b"garbage"],
    "empty": [b""],
    "three frames": [encode(message_header()), TWO, TWO],
    "another run": [encode(message_header(run=bytes(16))), TWO],
    "from oneself": [encode(message_header(source=0)), TWO],
    "from nobody": [encode(message_header(source=2)), TWO],
    "unborn incarnation": [encode(message_header(incarnation=1)), TWO],
    "unknown tag": [encode(message_header(tag="unknown")), TWO],
    "wrong length": [encode(message_header(lengths=(3,))), TWO + TWO[:4]],
    "wrong lengths": [encode(message_header(lengths=(1, 1))), TWO],
    "payload too short": [encode(message_header()), TWO[:-1]],
    "payload too long": [encode(message_header()), TWO + TWO],
    "no payload": [encode(message_header())],
    "no beginning": [encode(message_header(offset=1)), TWO[:4]],
    "credit for another incarnation": [encode(message_header(kind=Kind.ACK, clock=1))],
    "farewell under a supervisor": [encode(message_header(kind=Kind.GOODBYE))],
    "greeting, bad address": [encode(message_header(kind=Kind.HELLO, incarnation=1)), b"tcp://somewhere:1"],
    "greeting, another run": [
        encode(message_header(kind=Kind.HELLO, run=bytes(16), incarnation=1)),
        b"tcp://127.0.0.1:1",
    ],
    "greeting from nobody": [encode(message_header(kind=Kind.HELLO, source=9, incarnation=1)), b"tcp://127.0.0.1:1"],
}


@pytest.mark.parametrize("frames", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_message_for_this_learner_is_rejected_and_counted(frames: list[bytes]) -> None:
    with transports(2) as (a, b):
        a.transport.register_tag("w", (2,))
        client = UnauthenticatedClient(a)
        client.send(*frames)
        a.until("rejected == 1")
        assert a.transport.recv("w", None, 0.0) is None
        b.transport.send(0, "w", 0, (torch.tensor([1.0, 2.0]),))
        assert a.recv("w").tensors[0].tolist() == [1, 2] and a.comm_stats.rejected == 1
        client.close()


def test_a_clock_or_a_message_that_goes_back_is_rejected() -> None:
    with transports(2) as (a, b):
        a.transport.register_tag("w", (2,))
        b.transport.send(0, "w", 5, (torch.ones(2),))
        a.recv("w")
        b.transport.send(0, "w", 4, (torch.ones(2),))
        a.until("rejected == 1")
        b.transport.send(0, "w", 5, (torch.full((2,), 3.0),))
        assert a.recv("w").tensors[0].tolist() == [3, 3], "the sender was given its credit back"
        client = UnauthenticatedClient(a)
        client.send(message_header(seq=2), TWO)
        a.until("rejected == 2")
        client.close()


def test_a_message_whose_chunks_do_not_fit_is_rejected_once() -> None:
    with transports(2) as (a, b):
        a.transport.register_tag("w", (LARGE,))
        client = UnauthenticatedClient(a)
        first = message_header(lengths=(LARGE,))
        piece = bytes(4 * CHUNK)
        client.send(first, piece)
        client.send(replace(first, offset=2 * CHUNK), piece)
        a.until("rejected == 1")
        client.send(replace(first, offset=CHUNK), piece)  # the rest of a message that was rejected
        client.send(replace(first, seq=2), piece)
        client.send(replace(first, seq=2, offset=CHUNK, lengths=(LARGE, 1)), piece)
        a.until("rejected == 2")
        for rejected in (3, 4):  # learner 1's own messages have numbers that a client has used up
            b.transport.send(0, "w", 7, (torch.ones(LARGE),))
            a.until(f"rejected == {rejected}")
        b.transport.send(0, "w", 7, (torch.ones(LARGE),))
        assert a.recv("w").clock == 7 and a.comm_stats.rejected == 4, "refused, but never stuck"
        client.close()


def test_a_message_larger_than_any_chunk_is_not_even_read() -> None:
    with transports(2) as (a, b):
        a.transport.register_tag("w", (2,))
        client = UnauthenticatedClient(a)
        client.send(bytes(MAX_FRAME_BYTES + 1))
        b.transport.send(0, "w", 0, (torch.ones(2),))
        assert a.recv("w").clock == 0
        client.close()


def test_a_message_that_was_received_is_credited_again_when_it_is_sent_again() -> None:
    """Its credit was on the way when the connection broke, so its sender does not know that it has arrived."""
    with transports(2) as (a, _):
        receiver = a.transport._receiver
        receiver.register_tag("w", (2,))
        receiver.on_chunk(message_header(seq=3), memoryview(TWO))
        assert receiver.take("w", 1) is not None and receiver.credits[1].pop() == Credit(0, "w", 3)
        receiver.on_chunk(message_header(seq=3, conn_epoch=1), memoryview(TWO))
        assert receiver.take("w", 1) is None and list(receiver.credits[1]) == [Credit(0, "w", 3)]
        receiver.credits[1].clear()


@contextmanager
def cut_line(a: TransportHarness, b: TransportHarness) -> Iterator[TcpProxy]:
    """Cuts the connection from `a` to `b` once, in the second chunk of a message."""
    line = TcpProxy(b.transport.address, cut_once(after=6 * CHUNK))
    a.event_loop.call(lambda: a.transport.on_peer_started(1, 1, line.address))
    b.transport._hello = replace(b.transport._hello, incarnation=1)
    while a.membership[1].incarnation == 0:
        time.sleep(0.001)
    yield line
    line.close()


def test_a_message_in_flight_is_sent_again_by_whatever_makes_the_next_connection() -> None:
    with transports(2) as (a, b), cut_line(a, b) as line:
        b.transport.register_tag("w", (4 * CHUNK,))
        b.transport.register_tag("v", (1,))
        a.transport.send(1, "w", 0, (torch.zeros(4 * CHUNK),))
        while 1 not in a.transport.broken:
            time.sleep(0.0001)
        a.transport.send(1, "v", 1, (torch.ones(1),))  # before the connection would be made again
        assert b.recv("v").clock == 1 and b.recv("w").clock == 0
        assert line.connections == 2


def test_a_broken_connection_loses_and_doubles_nothing() -> None:
    with transports(2) as (a, b), cut_line(a, b) as line:
        b.transport.register_tag("w", (4 * CHUNK,))
        for clock in range(3):
            a.transport.send(1, "w", clock, (torch.full((4 * CHUNK,), float(clock)),))
            message = b.recv("w")
            assert message.clock == clock and (message.tensors[0] == clock).all()
        assert line.connections == 2 and b.comm_stats.rejected == 0 and a.comm_stats.messages_sent == 3
        assert b.transport.recv("w", None, 0.05) is None


def test_the_next_incarnation_is_heard_and_the_last_one_is_not_any_more() -> None:
    with transports(3) as (a, b, c):
        a.transport.register_tag("w", (2,))
        for peer in (b, c):
            peer.transport.send(0, "w", 9, (torch.ones(2),))
        while len(a.transport._receiver._ready) < 2:
            time.sleep(0.001)
        again = TransportHarness(1, 3, incarnation=1)
        again.membership.fill({0: (0, a.transport.address)})
        again.transport.register_tag("w", (2,))
        again.event_loop.start()
        again.transport.send(0, "w", 1, (torch.zeros(2),))  # its greeting tells that it is there, and where
        a.until("rejected == 1")  # what the last one had left
        message = a.recv("w", 1)
        assert message.clock == 1 and message.tensors[0].tolist() == [0, 0]
        b.transport.send(0, "w", 10, (torch.ones(2),))
        client = UnauthenticatedClient(a)
        client.send(message_header(seq=7, clock=20), TWO)
        a.until("rejected == 2")
        a.transport.send(1, "w", 0, (torch.full((2,), 5.0),))
        assert again.recv("w", 0).tensors[0].tolist() == [5, 5]
        assert a.recv("w", 2).clock == 9, "others' messages are left alone"
        client.close()
        again.event_loop.stop()


def test_a_wait_for_a_learner_ends_with_its_incarnation() -> None:
    with transports(2) as (a, _):
        a.transport.register_tag("w", (2,))
        threading.Timer(
            0.1, lambda: a.event_loop.call(lambda: a.transport.on_peer_started(1, 1, "tcp://127.0.0.1:1"))
        ).start()
        assert a.transport.recv("w", 1, None) is None


def test_late_and_lost_messages() -> None:
    with transports(2, faults=Faults(late_share=1.0, late_seconds=0.3)) as (a, b):
        b.transport.register_tag("w", ())
        begin = time.monotonic()
        a.transport.send(1, "w", 0, ())
        b.recv("w")
        assert time.monotonic() - begin >= 0.3 and a.comm_stats.faults == {"late": 1}
    with transports(2, faults=Faults(lost_share=0.5)) as (a, b):
        b.transport.register_tag("w", ())
        came = 0
        for clock in range(40):
            a.transport.send(1, "w", clock, ())
            while came + a.comm_stats.lost == clock:
                message = b.transport.recv("w", None, 0.01)
                came += message is not None and message.clock == clock
        assert 0 < came < 40 and a.comm_stats.faults == {"lost": 40 - came} and a.comm_stats.lost == 40 - came


def test_encrypted_transport_is_closed_to_those_without_the_key() -> None:
    key, other = (zmq.curve_keypair()[1].decode() for _ in range(2))
    with transports(2, key=key) as (a, b):
        a.transport.register_tag("large", (LARGE,))
        b.transport.send(0, "large", 0, (torch.ones(LARGE),))
        assert (a.recv("large").tensors[0] == 1).all()
        a.transport.register_tag("w", (2,))
        strangers = [UnauthenticatedClient(a), UnauthenticatedClient(a, other)]
        for client in strangers:
            client.send(message_header(), TWO)
        b.transport.send(0, "w", 0, (torch.ones(2),))
        assert a.recv("w").clock == 0
        assert a.transport.recv("w", None, 0.2) is None and a.comm_stats.rejected >= 2
        friend = UnauthenticatedClient(a, key)
        friend.send(message_header(seq=9), TWO)
        assert a.recv("w").clock == 5
        for client in (*strangers, friend):
            client.close()


def test_a_learner_whose_connection_breaks_for_good_is_lost_and_one_that_leaves_is_not() -> None:
    team = [TransportHarness(rank, 3) for rank in range(3)]
    for peer in team:
        peer.transport._on_loss, peer.transport._grace = lambda rank, _, o=peer: o.lost.append(rank), 0.3
        peer.membership.fill({other.rank: (0, other.transport.address) for other in team if other is not peer})
    for peer in team:
        peer.transport.connect_all()
        peer.event_loop.start()
    a, b, c = team
    for peer in team:
        assert peer.wait_monitor.wait_for(lambda o=peer: not o.transport.broken, 30.0)
    b.transport.send_goodbye(None)
    b.event_loop.stop()
    assert a.wait_monitor.wait_for(lambda: a.membership.left == [1], 30.0)
    c.event_loop.stop()  # without a goodbye
    assert a.wait_monitor.wait_for(lambda: a.membership.live_ranks() == (0,), 30.0)
    while not a.lost:
        time.sleep(0.01)
    assert a.lost == [2]
    a.event_loop.stop()


def test_memory_is_lent_again_only_when_nobody_holds_it() -> None:
    buffers = BufferPool()
    first = buffers.acquire(MIN_POOLED)
    address = first.ctypes.data
    tensor = torch.from_numpy(first[10:20])
    view = tensor[2:]
    del first, tensor
    assert buffers.acquire(MIN_POOLED).ctypes.data != address, "a tensor still shows it"
    del view
    seen = {array.ctypes.data for array in [buffers.acquire(MIN_POOLED) for _ in range(3)]}
    assert address in seen


def test_messages_of_many_lengths_share_memory() -> None:
    buffers = BufferPool()
    addresses = set()
    for count in range(MIN_POOLED, 2 * MIN_POOLED, 997):
        lent = buffers.acquire(count)
        assert len(lent) == count
        addresses.add(lent.ctypes.data)
        del lent
    assert len(addresses) <= 5


def test_the_format_says_what_it_is() -> None:
    assert decode(encode(message_header())).tag == "w" and encode(message_header())[:5] == b"asrm\x01"
