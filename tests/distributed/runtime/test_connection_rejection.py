"""Connections and bytes of clients that are not of the run, at the ports of encrypted transports."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from asr_am.distributed.runtime import security as sockets
from asr_am.distributed.runtime.control_client import ControlClient
from asr_am.distributed.runtime.control_server import MAX_MESSAGES_PER_TURN, ControlServer
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.security import FRAME_BYTES, new_key
from asr_am.distributed.runtime.wire import Kind, WireHeader
from asr_am.distributed.runtime.worker_process import free_port
from asr_am.distributed.team import CommStats
from tests.support.tcp_proxy import TcpProxy, send_raw, split
from tests.support.transport_fixtures import RUN, TransportHarness, UnauthenticatedClient, transports

MESSAGE = WireHeader(Kind.CHUNK, RUN, 1, 0, clock=5, tag="w", seq=1, lengths=(2,))
TWO = np.array([1, 2], np.float32).tobytes()
GREETINGS = {
    "random": os.urandom(4096),
    "HTTP": b"GET / HTTP/1.0\r\n\r\n",
    "ZMTP 1": b"\x01\x00\x06\x00secret",
    "ZMTP 2": b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0\0\x06secret",
    "ZMTP 3, PLAIN": b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00PLAIN".ljust(64, b"\0") + b"\x04\x08\x05HELLO\0\0",
    "ZMTP 3, CURVE": b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE".ljust(64, b"\0") + b"\x04\xc8\x05HELLO" + bytes(194),
}


@contextmanager
def two_and_a_tap(
    key: str | None, change: Callable[[bytes], bytes] = bytes
) -> Iterator[tuple[TransportHarness, TransportHarness, TcpProxy]]:
    """Connects learner 1 to learner 0 through a recording proxy."""
    with transports(2, key=key) as (a, b):
        tap = TcpProxy(a.transport.address, change)
        b.event_loop.call(lambda: b.transport.on_peer_started(0, 1, tap.address))
        a.transport._hello = replace(a.transport._hello, incarnation=1)
        while b.membership[0].incarnation == 0:
            time.sleep(0.001)
        a.transport.register_tag("w", (2,))
        yield a, b, tap
        tap.close()


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS.keys())
def test_bytes_that_are_no_greeting_are_counted_and_logged_once(
    greeting: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with transports(2, key=new_key()) as (a, b):
        a.transport.register_tag("w", (2,))
        for _ in range(3):
            send_raw(a.transport.address, greeting)
        a.until("rejected == 3")
        b.transport.send(0, "w", 5, (torch.ones(2),))
        assert a.recv("w").clock == 5
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2 and "learner 0 rejected a connection" in said[0] and "rejected 3" in said[1], said


def test_bytes_that_are_no_greeting_do_no_harm_where_nothing_is_encrypted() -> None:
    with transports(2) as (a, b):
        a.transport.register_tag("w", (2,))
        for greeting in GREETINGS.values():
            send_raw(a.transport.address, greeting)
        b.transport.send(0, "w", 5, (torch.ones(2),))
        assert a.recv("w").clock == 5 and a.transport.recv("w", None, 0.1) is None


def test_a_recorded_connection_opens_nothing() -> None:
    with two_and_a_tap(new_key()) as (a, b, tap):
        b.transport.send(0, "w", 5, (torch.ones(2),))
        assert a.recv("w").clock == 5 and sum(map(len, tap.tape)) > 500
        for count in range(1, 4):
            send_raw(a.transport.address, *tap.tape)
            a.until(f"rejected == {count}")
        b.transport.send(0, "w", 6, (torch.ones(2),))
        assert a.recv("w").clock == 6 and a.transport.recv("w", None, 0.1) is None
    with two_and_a_tap(None) as (a, b, tap):  # so that the test can fail: in clear, it is heard
        b.transport.send(0, "w", 5, (torch.ones(2),))
        a.recv("w")
        send_raw(a.transport.address, *tap.tape)
        a.until("rejected == 1")  # by its number, as a message that came before
        assert a.transport._connection_monitor.rejected == 0, "to whoever could record it, this door was open"


def test_a_message_repeated_on_its_own_connection_ends_that_and_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT", 0.5)
    repeated = threading.Event()

    def repeat(data: bytes) -> bytes:
        """Sends the first data after a message was read twice."""
        if not armed.is_set() or repeated.is_set():
            return data
        repeated.set()
        return data + data

    armed = threading.Event()
    with two_and_a_tap(new_key(), repeat) as (a, b, tap):
        for clock in range(5, 9):
            b.transport.send(0, "w", clock, (torch.full((2,), float(clock)),))
            message = a.recv("w")
            assert message.clock == clock and message.tensors[0].tolist() == [clock] * 2
            armed.set()
        a.until("rejected == 1")
        assert repeated.is_set() and tap.connections == 2, "made again, after ZeroMQ ended it"
        assert a.transport._connection_monitor.rejected == 1 and a.transport.recv("w", None, 0.1) is None


def test_a_bit_that_was_changed_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT", 0.5)
    changed = threading.Event()

    def change(data: bytes) -> bytes:
        if not armed.is_set() or changed.is_set():
            return data
        changed.set()
        return data[:-1] + bytes([data[-1] ^ 1])

    armed = threading.Event()
    with two_and_a_tap(new_key(), change) as (a, b, tap):
        for clock in range(5, 8):
            b.transport.send(0, "w", clock, (torch.full((2,), float(clock)),))
            assert a.recv("w").tensors[0].tolist() == [clock] * 2
            armed.set()
        assert changed.is_set() and tap.connections == 2 and a.transport._connection_monitor.rejected == 1


def test_a_flood_of_malformed_messages_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with transports(2) as (a, _):
        client = UnauthenticatedClient(a)
        for count in range(200):
            client.send(os.urandom(count), b"x")
        a.until("rejected == 200")
        client.close()
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2 and "a message: a header has" in said[0] and "rejected 200" in said[1]


def resident_memory() -> int:
    """Returns the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_a_message_of_many_frames_fills_memory_only_where_nothing_is_encrypted() -> None:
    """A limit on frames bounds no message of frames without end. Nobody gets that far without the key."""
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    frame = b"\x03" + (1 << 20).to_bytes(8, "big") + b"x" * (1 << 20)  # and more will follow
    for key in (None, new_key()):
        with transports(2, key=key) as (a, _):
            before = resident_memory()
            with socket.create_connection(split(a.transport.address)) as client, suppress(OSError):
                client.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
                for _ in range(100):
                    client.sendall(frame)
                if key is None:
                    while resident_memory() - before < 80:  # so that the test can fail
                        time.sleep(0.01)
            if key is not None:
                a.until("rejected == 1")
                assert resident_memory() - before < 20


def test_a_flood_does_not_keep_the_supervisor_from_its_other_work(caplog: pytest.LogCaptureFixture) -> None:
    server = ControlServer(f"127.0.0.1:{free_port('127.0.0.1')}", None)
    monitor = server.connection_monitor
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.SNDHWM, 0)
    client.connect(server.url)
    for _ in range(20_000):
        client.send(b"garbage")
    turns = []
    while monitor.rejected < 20_000:
        before = monitor.rejected
        assert list(server.receive(30.0)) == [] and monitor.rejected > before
        turns.append(monitor.rejected - before)
    assert max(turns) <= MAX_MESSAGES_PER_TURN
    context.destroy(linger=0)
    server.close()
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2 and "the supervisor rejected a message that is not a JSON object" in said[0], said
    assert "rejected 20000" in said[1]


def test_large_control_messages_pass_the_limit_on_frames() -> None:
    key = new_key()
    server = ControlServer(f"127.0.0.1:{free_port('127.0.0.1')}", key)
    monitor = WaitMonitor(CommStats())
    event_loop = EventLoop(monitor)
    control = ControlClient(event_loop, server.url, monitor, key, lambda _: None)
    event_loop.start()
    text = "x" * (3 * FRAME_BYTES)
    control.notify("open", segment=text)
    ((_, message),) = server.receive(30)
    assert message == {"op": "open", "segment": text}
    event_loop.stop()
    server.close()


def test_waiting_in_the_handshake_keeps_nobody_out() -> None:
    with (
        transports(2, key=new_key()) as (a, b),
        socket.create_connection(("127.0.0.1", int(a.transport.address.split(":")[2]))),
    ):
        a.transport.register_tag("w", (2,))
        b.transport.send(0, "w", 5, (torch.ones(2),))
        assert a.recv("w").clock == 5
        send_raw(a.transport.address, GREETINGS["random"])
        a.until("rejected == 1")
