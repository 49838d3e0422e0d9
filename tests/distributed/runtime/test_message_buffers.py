"""Messages through the memory that learners of one host share."""

from __future__ import annotations

import errno
import os
import resource
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.runtime import message_buffers
from asr_am.distributed.runtime.message_buffers import MAX_FREE, MAX_SEGMENTS, MIN_SHARED, SharedSegment
from asr_am.distributed.runtime.private_dir import first_on_host, private_dir
from asr_am.distributed.runtime.wire import Kind
from tests.distributed.runtime.test_messaging import message_header
from tests.support.tcp_proxy import TcpProxy, cut_once
from tests.support.transport_fixtures import TransportHarness, UnauthenticatedClient, transports

COUNT = MIN_SHARED // 4 + 3  # numbers of a message that is shared


def segments(peer: TransportHarness) -> list[SharedSegment]:
    pool = peer.transport._shared
    return [*pool._lent, *(segment for free in pool._free.values() for segment in free)]


def wait_until(condition: object) -> None:
    end = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_large_message_arrives_in_memory_that_is_used_again() -> None:
    with transports(2, one_host=True) as (a, b):
        b.transport.register_tag("w", (COUNT, 0, 2))
        x = torch.arange(COUNT, dtype=torch.float32)
        for clock in range(20):
            a.transport.send(1, "w", clock, (x + clock, torch.zeros(0), torch.tensor([1.0, 2.0])))
            message = b.recv("w")
            assert message.clock == clock and torch.equal(message.tensors[0], x + clock)
            assert message.tensors[2].tolist() == [1, 2]
        first = message.tensors[0].data_ptr()
        mapped = [line for line in Path("/proc/self/maps").read_text("utf-8").splitlines() if "/memfd:asr_am" in line]
        assert any(int(line.split("-")[0], 16) <= first < int(line.split()[0].split("-")[1], 16) for line in mapped)
        assert 1 <= len(segments(a)) <= 3
        assert a.comm_stats.bytes_sent == {1: 20 * 4 * (COUNT + 2)}, "counted as before"


def test_a_small_message_and_one_to_another_host_are_not_shared() -> None:
    with transports(2, one_host=True) as (a, b):
        b.transport.register_tag("w", (COUNT - 4,))
        a.transport.send(1, "w", 0, (torch.ones(COUNT - 4),))
        assert (b.recv("w").tensors[0] == 1).all() and not segments(a)
    with transports(2) as (a, b):
        b.transport.register_tag("w", (COUNT,))
        a.transport.send(1, "w", 0, (torch.ones(COUNT),))
        assert (b.recv("w").tensors[0] == 1).all() and not segments(a)


def test_messages_that_a_receiver_keeps_stay_as_they_are_and_cannot_exhaust_the_sender() -> None:
    with transports(2, one_host=True) as (a, b):
        b.transport.register_tag("w", (COUNT,))
        kept = []
        for clock in range(MAX_SEGMENTS + 6):
            a.transport.send(1, "w", clock, (torch.full((COUNT,), float(clock)),))
            kept.append(b.recv("w").tensors[0][1:])
        assert all((x == clock).all() for clock, x in enumerate(kept))
        assert len(segments(a)) == MAX_SEGMENTS
        del kept
        a.transport.send(1, "w", 1000, (torch.zeros(COUNT),))
        assert (b.recv("w").tensors[0] == 0).all()
        assert len(segments(a)) == MAX_FREE, "the others were closed"
        a.transport.send(1, "w", 1000, (torch.zeros(COUNT),))
        b.recv("w")
        assert len(b.transport._receiver._mappings._mapped) <= MAX_FREE, "and unmapped"


@pytest.mark.parametrize("after", (300, 1000, 2000, 3000))
def test_a_broken_connection_loses_and_doubles_nothing(after: int) -> None:
    with transports(2, one_host=True) as (a, b):
        line = TcpProxy(b.transport.address, cut_once(after))
        a.event_loop.call(lambda: a.transport.on_peer_started(1, 1, line.address))
        b.transport._hello = replace(b.transport._hello, incarnation=1)
        wait_until(lambda: a.membership[1].incarnation)
        b.transport.register_tag("w", (COUNT,))
        for clock in range(20):
            a.transport.send(1, "w", clock, (torch.full((COUNT,), float(clock)),))
            message = b.recv("w")
            assert message.clock == clock and (message.tensors[0] == clock).all()
        assert line.connections == 2 and b.comm_stats.rejected == 0 and a.comm_stats.messages_sent == 20
        assert b.transport.recv("w", None, 0.05) is None and len(segments(a)) <= 4
        line.close()


def test_memory_of_lost_overwritten_and_rejected_messages_is_used_again() -> None:
    with transports(2, faults=Faults(lost_share=0.5), one_host=True) as (a, b):
        b.transport.register_tag("w", (COUNT,))
        for clock in range(100):
            a.transport.send(1, "w", clock, (torch.ones(COUNT),))
        assert a.comm_stats.lost + a.comm_stats.overwritten > 50 and len(segments(a)) <= 4
        for clock in range(30):
            before = b.comm_stats.rejected + a.comm_stats.lost
            a.transport.send(1, "unknown", clock, (torch.ones(COUNT),))
            wait_until(lambda before=before: b.comm_stats.rejected + a.comm_stats.lost > before)
        assert b.comm_stats.rejected > 5 and len(segments(a)) <= 8


def test_a_dead_receiver_gives_its_memory_back_and_the_next_incarnation_maps_anew() -> None:
    with transports(2, one_host=True) as (a, b):
        b.transport.register_tag("w", (COUNT,))
        kept = []
        for clock in range(5):
            a.transport.send(1, "w", clock, (torch.full((COUNT,), float(clock)),))
            kept.append(b.recv("w").tensors[0])
        b.event_loop.stop()
        again = TransportHarness(1, 2, incarnation=1, neighbours=[0])
        again.membership.fill({0: (0, a.transport.address)})
        again.transport.register_tag("w", (COUNT,))
        again.event_loop.start()
        a.event_loop.call(lambda: a.transport.on_peer_died(1, 0))
        wait_until(lambda: not a.membership[1].alive)
        assert not segments(a)
        a.event_loop.call(lambda: a.transport.on_peer_started(1, 1, again.transport.address))
        wait_until(lambda: a.membership[1].alive)
        a.transport.send(1, "w", 0, (torch.full((COUNT,), 9.0),))
        assert (again.recv("w").tensors[0] == 9).all() and len(segments(a)) == 1
        assert all((x == clock).all() for clock, x in enumerate(kept))
        again.event_loop.stop()


def test_without_memory_messages_go_through_the_socket_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with private_dir() as folder, transports(3, one_host=True) as team:
        for peer in team:
            peer.transport.register_tag("w", (COUNT,))
            peer.transport._shared._address = f"ipc://{folder}/learner"
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIN_SHARED, limits[1]))
        try:
            for clock in range(3):
                for peer in team:
                    peer.transport.send((peer.rank + 1) % 3, "w", clock, (torch.full((COUNT,), float(clock)),))
                assert all((peer.recv("w").tensors[0] == clock).all() for peer in team)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.message for record in caplog.records] == [
        "learner 0 cannot make shared memory of 0 MiB (File too large): messages go through sockets, which is slower"
    ]


def test_a_receiver_that_cannot_map_gets_the_message_through_the_socket(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(place: bytes) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such process, as in a container of its own")

    monkeypatch.setattr(message_buffers, "_map", cannot)
    with transports(2, one_host=True) as (a, b):
        b.transport.register_tag("w", (COUNT,))
        for clock in range(3):
            a.transport.send(1, "w", clock, (torch.full((COUNT,), float(clock)),))
            message = b.recv("w")
            assert message.clock == clock and (message.tensors[0] == clock).all()
        assert b.comm_stats.rejected == 0 and a.comm_stats.messages_sent == 3
        a.transport.send(1, "w", 3, (torch.zeros(COUNT),))
        wait_until(lambda: all(segment.free for segment in segments(a)))  # the communication thread lets go of them
    assert len(caplog.records) == 1 and "learner 1 cannot map the shared memory of learner 0" in caplog.text


def test_no_file_of_the_user_is_mapped_whatever_a_message_says(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes([7]) * (2 * MIN_SHARED))
    with path.open("r+b") as file, transports(2, one_host=True) as (a, _):
        a.transport.register_tag("w", (COUNT,))
        place = struct.pack("<IIQ", os.getpid(), file.fileno(), os.fstat(file.fileno()).st_ino)
        client = UnauthenticatedClient(a)
        client.send(message_header(kind=Kind.SHARED, seq=1, lengths=(COUNT,)), place)
        assert a.transport.recv("w", None, 0.2) is None
        client.send(message_header(kind=Kind.SHARED, seq=1, lengths=(COUNT,)), place[1:])
        a.until("rejected == 1")
        segment = SharedSegment(MIN_SHARED - 4)
        client.send(message_header(kind=Kind.SHARED, seq=2, lengths=(COUNT,)), segment.place)  # too small
        other = segment.place[:8] + struct.pack("<Q", 1)
        client.send(message_header(kind=Kind.SHARED, seq=3, lengths=(COUNT,)), other)
        assert a.transport.recv("w", None, 0.2) is None
        client.close()
    assert path.read_bytes() == bytes([7]) * (2 * MIN_SHARED)


def test_the_first_process_of_a_host_is_found_in_its_private_directory(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/learner-0-0"
    assert [first_on_host(address, "a"), first_on_host(address, "a"), first_on_host(address, "b")] == [
        True,
        False,
        True,
    ]
    assert first_on_host("tcp://127.0.0.1:1", "a") and first_on_host("tcp://127.0.0.1:1", "a")
