"""An encrypted run of real processes while clients without the key try every port: none is admitted or does harm."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.security import make_key_file, new_key, open_socket
from asr_am.distributed.runtime.wire import Kind, WireHeader, encode
from asr_am.distributed.runtime.worker_process import free_port
from tests.support.attack import Attack
from tests.support.egs_examples import write_examples
from tests.support.tcp_proxy import TcpProxy, send_raw
from tests.support.toy_runs import lease_log

LEARNERS = 4
HELLO = json.dumps({"op": "hello", "rank": 2, "incarnation": 0, "address": "tcp://127.0.0.1:1"}).encode()
MESSAGE = encode(WireHeader(Kind.CHUNK, bytes(16), 1, 0, clock=1 << 40, tag="weights", seq=1 << 40, lengths=(2,)))
RAW = [os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n", b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0\0\x06secret"]


class PortAttack(Attack):
    """Attacks the launcher's port and every learner's message port, once all learners have connected.

    Attributes:
        answers: attackers that received an answer.
        done: True when every port has been tried.
    """

    def __init__(self, out: Path, supervisor: str, tap: TcpProxy) -> None:
        super().__init__(out)
        self.answers, self.done = 0, False
        self._supervisor, self._tap = supervisor, tap

    def attack(self) -> None:
        self.wait_until(lambda: len(list(self.out.glob("*.address"))) == LEARNERS)
        addresses = [self._supervisor, *(path.read_text() for path in self.out.glob("*.address"))]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        clients = [self._client(context, address, key) for address in addresses for key in (None, new_key())]
        for address in addresses:
            for data in RAW:
                send_raw(address, data)
            send_raw(address, *self._tap.tape)
        time.sleep(0.5)
        self.answers = sum(bool(client.poll(0)) for client in clients)
        context.destroy(linger=0)
        self.done = True

    def _client(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str | None) -> zmq.Socket[bytes]:
        """Makes a client that speaks the protocol with no key or a wrong one, and sends a message."""
        client = open_socket(context, zmq.DEALER, key)
        client.connect(address)
        if address == self._supervisor:
            client.send(HELLO)
        else:
            client.send_multipart([MESSAGE, np.full(2, np.nan, np.float32).tobytes()])
        return client


def refusals(text: str, monitor: str) -> int:
    """Returns the number of rejections that a connection monitor has logged, in two messages."""
    first, total = [line for line in text.splitlines() if f"{monitor} rejected" in line]
    assert "further rejections are only counted" in first
    found = re.search(r"rejected (\d+) connections and messages in total", total)
    assert found is not None
    return int(found[1])


def finite(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return all(finite(part) for part in inner)


def test_clients_without_the_key_are_rejected_and_do_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    egs_dir = write_examples(tmp_path / "egs", frames_U=(60,) * 12)
    out = tmp_path / "out"
    out.mkdir()
    make_key_file(tmp_path / "team.key")
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    tap = TcpProxy(f"tcp://{address}")
    command = [sys.executable, "-m", "tests.support.intruder_worker", "adpsgd", str(egs_dir), str(out), tap.address]
    with PortAttack(out, f"tcp://{address}", tap) as attack:
        launch(command, LEARNERS, synchronous=False, address=address, key_file=str(tmp_path / "team.key"))
    tap.close()
    assert attack.done and attack.answers == 0

    least = 2 + len(RAW) + 1
    assert refusals(caplog.text, "the supervisor") >= least
    logged = capfd.readouterr().err
    counts = [refusals(logged, f"learner {rank}") for rank in range(LEARNERS)]
    assert min(counts) >= least

    summary = json.loads((out / "summary.json").read_text())
    assert sum(counts) <= summary["rejected"] and summary["restarts"] == 0 and "SIG" not in caplog.text
    log = lease_log(out)
    done = Counter((record["epoch"], batch) for record in log for batch in record["batch"])
    assert set(done.values()) == {1} and sum(done.values()) == sum(summary["batches_per_learner"].values())
    assert not any(record["released"] for record in log)
    assert all(loss < 2.5 for loss in summary["heldout_loss"])
    states = sorted((out / "checkpoints").glob("checkpoint-*/learner-*.pt"))
    assert len(states) >= LEARNERS and all(finite(torch.load(path, weights_only=True)) for path in states)
    assert b"weights" not in b"".join(tap.tape) and b'"op"' not in b"".join(tap.tape), "everything was encrypted"
