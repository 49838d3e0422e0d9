"""A real run of real processes, encrypted, while strangers try every port: none gets in, and training is unharmed."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
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
from tests.support.egs_examples import write_examples
from tests.support.tcp_proxy import TcpProxy, send_raw
from tests.train.test_simulate import lease_log

LEARNERS = 4
HELLO = json.dumps({"op": "hello", "rank": 2, "incarnation": 0, "address": "tcp://127.0.0.1:1"}).encode()
LETTER = encode(WireHeader(Kind.CHUNK, bytes(16), 1, 0, clock=1 << 40, tag="weights", seq=1 << 40, lengths=(2,)))
RAW = [os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n", b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0\0\x06secret"]


class Siege:
    """Of the supervisor's port and all mail, from when all learners have come to when each port has been tried."""

    def __init__(self, out: Path, supervisor: str, tap: TcpProxy) -> None:
        self.answers, self.done = 0, False
        self._out, self._supervisor, self._tap = out, supervisor, tap
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Siege:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        (self._out / "over").touch()
        self._thread.join()

    def _run(self) -> None:
        try:
            while len(list(self._out.glob("*.mail"))) < LEARNERS and not (self._out / "over").exists():
                time.sleep(0.05)
            addresses = [self._supervisor, *(path.read_text() for path in self._out.glob("*.mail"))]
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            strangers = [self._stranger(context, address, key) for address in addresses for key in (None, new_key())]
            for address in addresses:
                for data in RAW:
                    send_raw(address, data)
                send_raw(address, *self._tap.tape)
            time.sleep(0.5)
            self.answers = sum(bool(stranger.poll(0)) for stranger in strangers)
            context.destroy(linger=0)
            self.done = True
        finally:
            (self._out / "over").touch()

    def _stranger(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str | None) -> zmq.Socket[bytes]:
        """Speaks the protocol, but has no key, or another one."""
        stranger = open_socket(context, zmq.DEALER, key)
        stranger.connect(address)
        if address == self._supervisor:
            stranger.send(HELLO)
        else:
            stranger.send_multipart([LETTER, np.full(2, np.nan, np.float32).tobytes()])
        return stranger


def refusals(text: str, connection_monitor: str) -> int:
    """How many `door` has logged, in two messages."""
    first, total = [line for line in text.splitlines() if f"{connection_monitor} refused" in line]
    assert "more of the kind are counted only" in first
    found = re.search(r"refused (\d+) connections and messages in all", total)
    assert found is not None
    return int(found[1])


def finite(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return all(finite(part) for part in inner)


def test_nobody_without_the_key_gets_in_nor_disturbs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    egs_dir = write_examples(tmp_path / "egs", frames_U=(60,) * 12)
    out = tmp_path / "out"
    out.mkdir()
    make_key_file(tmp_path / "team.key")
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    tap = TcpProxy(f"tcp://{address}")
    command = [sys.executable, "-m", "tests.support.intruder_worker", str(egs_dir), str(out), tap.address]
    with Siege(out, f"tcp://{address}", tap) as siege:
        launch(command, LEARNERS, synchronous=False, address=address, key_file=str(tmp_path / "team.key"))
    tap.close()
    assert siege.done and siege.answers == 0

    least = 2 + len(RAW) + 1
    assert refusals(caplog.text, "the supervisor") >= least
    said = capfd.readouterr().err
    counts = [refusals(said, f"the mail of learner {rank}") for rank in range(LEARNERS)]
    assert min(counts) >= least

    summary = json.loads((out / "summary.json").read_text())
    assert sum(counts) <= summary["refused"] and summary["restarts"] == 0 and "SIG" not in caplog.text
    log = lease_log(out)
    done = Counter((record["epoch"], batch) for record in log for batch in record["batch"])
    assert set(done.values()) == {1} and sum(done.values()) == sum(summary["batches_per_learner"].values())
    assert not any(record["released"] for record in log)
    assert all(loss < 2.5 for loss in summary["heldout_loss"])
    states = sorted((out / "checkpoints").glob("checkpoint-*/learner-*.pt"))
    assert len(states) >= LEARNERS and all(finite(torch.load(path, weights_only=True)) for path in states)
    assert b"weights" not in b"".join(tap.tape) and b'"op"' not in b"".join(tap.tape), "all of it was encrypted"
