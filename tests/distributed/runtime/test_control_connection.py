"""The socket between learners and their supervisor: who is admitted, what is counted, and its loss."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import pytest
import zmq

from asr_am.distributed.launch_spec import LaunchSpec
from asr_am.distributed.runtime import control_server
from asr_am.distributed.runtime.control_client import ControlClient
from asr_am.distributed.runtime.control_server import ControlServer
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.launcher import make_supervisor
from asr_am.distributed.team import CommStats
from asr_am.errors import ConnectionLost

TIMEOUT = 30.0  # seconds after which a test fails


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def client_of(context: zmq.Context, url: str) -> zmq.Socket[bytes]:
    client = context.socket(zmq.DEALER)
    client.connect(url)
    return client


def test_a_learner_of_another_run_is_not_admitted(context: zmq.Context) -> None:
    supervisor = make_supervisor(LaunchSpec([sys.executable, "-c", ""], 1, synchronous=False))
    url, run = supervisor._addresses["supervisor"], supervisor._run
    clients = [client_of(context, url) for _ in range(2)]
    hello = {"op": "hello", "rank": 0, "incarnation": 0, "address": "tcp://127.0.0.1:1"}
    for client, name in zip(clients, ("0" * 32, run), strict=True):
        client.send(json.dumps({**hello, "run": name}).encode())
    deadline = time.monotonic() + TIMEOUT
    while not clients[1].poll(0) and time.monotonic() < deadline:
        supervisor._poll()
    supervisor._poll()
    assert json.loads(clients[1].recv(zmq.NOBLOCK))["news"] == "peers"
    assert not clients[0].poll(100) and supervisor._server.rejected == 1
    supervisor._server.close()


def test_garbage_is_counted_and_what_is_too_long_is_not_read(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "MAX_FRAME_BYTES", 1000)
    server = ControlServer(None, None)

    def receive_until_end(*messages: bytes) -> list[object]:
        client, found, deadline = client_of(context, server.url), [], time.monotonic() + TIMEOUT
        for message in (*messages, b'{"op": "end"}'):
            client.send(message)
        while {"op": "end"} not in found and time.monotonic() < deadline:
            found += [message for _, message in server.receive(0.1)]
        return found

    assert receive_until_end(b"no JSON", b"[1]") == [{"op": "end"}]
    assert server.connection_monitor.rejected == 2
    too_long = client_of(context, server.url)
    too_long.send(json.dumps({"text": "x" * 1000}).encode())
    assert receive_until_end() == [{"op": "end"}] and not list(server.receive(0.3))
    server.close()


def test_the_loss_of_the_supervisor_is_noticed() -> None:
    wait_monitor = WaitMonitor(CommStats())
    event_loop = EventLoop(wait_monitor)
    server = ControlServer(None, None)
    control = ControlClient(event_loop, server.url, wait_monitor, None, lambda message: None)
    event_loop.start()
    control.notify("hello")
    assert next(iter(server.receive(TIMEOUT)))[1] == {"op": "hello"}
    server.close()
    with pytest.raises(ConnectionLost, match="lost the connection to the supervisor"):
        wait_monitor.wait_for(lambda: False, TIMEOUT)
    event_loop.stop()
