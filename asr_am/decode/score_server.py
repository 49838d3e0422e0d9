"""Scores of frames from the GPU: one process owns it, and the processes of the search ask that one for scores.

CUDA cannot be used after a fork, and each process that uses it takes memory of the GPU. The search needs processes, so
that the utterances of a set are searched on all cores. A request is the name of an utterance. The answer is a number of
frames, a number of pdfs and the scores as float32, or an error.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np
import torch

from asr_am.decode.scorer import MeanSource, NeuralSource, Scorer, ScoreSource
from asr_am.errors import InputError
from asr_am.signals import signal_on_parent_death

log = logging.getLogger(__name__)

SHAPE = struct.Struct("<cqq")
SCORES, ERROR = b"s", b"e"
START_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class ServedScorer:
    """Scores from a server's socket at `address`."""

    address: str

    @cached_property
    def _server(self) -> Connection:
        return Client(self.address, "AF_UNIX")

    def log_likelihoods(self, utterance: str) -> np.ndarray:
        try:
            self._server.send_bytes(utterance.encode())
            answer = self._server.recv_bytes()
        except (OSError, EOFError) as error:
            raise RuntimeError("the process that scores frames on the GPU has ended, see its message") from error
        kind, frames, pdfs = SHAPE.unpack_from(answer)
        if kind == ERROR:
            raise InputError(answer[SHAPE.size :].decode())
        return np.frombuffer(answer, np.float32, offset=SHAPE.size).reshape(frames, pdfs).copy()


@dataclass(frozen=True)
class ServedSource:
    """A source whose scorer asks the server at `address`."""

    address: str

    def load(self) -> ServedScorer:
        return ServedScorer(self.address)


@contextmanager
def scores_from_gpu(source: ScoreSource, device: str = "auto") -> Iterator[ScoreSource]:
    """Context in which a network's scores come from a process that owns the GPU. Otherwise yields `source` itself.

    Args:
        device: auto takes the GPU if there is one. cuda takes it, and cpu does not. `test` serves scores of the CPU.
    """
    gpu = device == "cuda" or (device == "auto" and torch.cuda.device_count() > 0)  # starts no CUDA in this process
    if not isinstance(source, NeuralSource | MeanSource) or not (gpu or device == "test"):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="scores-") as folder:  # which no other user can enter
        address, context = str(Path(folder) / "socket"), multiprocessing.get_context("fork")
        ready, told = context.Pipe(duplex=False)
        server = context.Process(
            target=_serve, args=(source, address, "cuda" if gpu else "cpu", os.getpid(), told), daemon=True
        )
        server.start()
        told.close()
        try:
            if not ready.poll(START_TIMEOUT) or not (message := _received(ready)):
                raise RuntimeError("the process that scores frames on the GPU has not started, see its message")
            if message != b"ready":
                raise InputError(message.decode())
            yield ServedSource(address)
        finally:
            server.kill()
            server.join()


def _received(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except EOFError:
        return b""


def _serve(source: NeuralSource | MeanSource, address: str, device: str, parent: int, told: Connection) -> None:
    """Serves scores until this process is killed, at the latest with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    torch.set_num_threads(1)  # as in the processes of the search
    try:
        scorer = source.load()
        scorer.model.to(device)
    except InputError as error:
        told.send_bytes(str(error).encode())
        return
    gpu = threading.Lock()
    with Listener(address, "AF_UNIX", backlog=128) as listener:
        told.send_bytes(b"ready")
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), scorer, gpu), daemon=True).start()


def _answer(client: Connection, scorer: Scorer, gpu: threading.Lock) -> None:
    """Answers one process of the search until it ends."""
    while request := _received(client):
        try:
            with gpu:
                scores_TP = scorer.log_likelihoods(request.decode())
            head, content = (SCORES, *scores_TP.shape), scores_TP.astype(np.float32, order="C").tobytes()
        except InputError as error:
            head, content = (ERROR, 0, 0), str(error).encode()
        client.send_bytes(SHAPE.pack(*head) + content)
