"""The learner's line to its supervisor: requests and answers as JSON, and news of who dies and who is born."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq

from asr_am.distributed.leases import (
    Completion,
    Lease,
    Outcome,
    Outdated,
    Record,
    Segment,
    Totals,
    outcome_totals,
)
from asr_am.distributed.process.reactor import Reactor
from asr_am.distributed.process.sockets import next_event, open_socket, watch
from asr_am.distributed.process.waiting import Waiting
from asr_am.errors import InputError

log = logging.getLogger(__name__)

News = Callable[[dict[str, Any]], None]


class ControlLine:
    """address: the supervisor's, as tcp://host:port. on_news: called by the mail thread, in the order of the news."""

    def __init__(self, reactor: Reactor, address: str, waiting: Waiting, key: str | None, on_news: News) -> None:
        self._reactor, self._address, self._waiting, self._on_news = reactor, address, waiting, on_news
        self._numbers = count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._socket = open_socket(reactor.context, zmq.DEALER, key)
        self._monitor = watch(self._socket)
        self._socket.connect(address)
        reactor.attach(self._socket, self._receive)
        reactor.attach(self._monitor, self._watch)
        reactor.at_stop(self._close)

    def ask(self, op: str, timeout: float | None = None, **fields: object) -> Any:
        """The supervisor's answer, however long that takes.

        Outdated and InputError as it says; InputError after `timeout` seconds, and where the supervisor is gone.
        """
        number = next(self._numbers)
        self._send({"op": op, "id": number, **fields})
        if not self._waiting.wait_for(lambda: number in self._answers, timeout):
            raise InputError(f"the supervisor at {self._address} has not answered within {timeout:g} s; is it running?")
        answer = self._answers.pop(number)
        if "error" in answer:
            raise ERRORS.get(answer.get("kind", ""), RuntimeError)(answer["error"])
        return answer["value"]

    def tell(self, op: str, **fields: object) -> None:
        """Something that needs no answer; if the supervisor objects, the training task's next call raises it."""
        self._send({"op": op, **fields})

    def _send(self, message: dict[str, object]) -> None:
        data = json.dumps(message).encode()
        self._reactor.call(lambda: self._socket.send(data, zmq.NOBLOCK))

    def _receive(self) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if "id" in message:
                with self._waiting.change():
                    self._answers[message["id"]] = message
            elif "error" in message:
                self._waiting.fail(RuntimeError(message["error"]))
            else:
                self._on_news(message)

    def _watch(self) -> None:
        while (event := next_event(self._monitor)) is not None:
            if event == zmq.EVENT_DISCONNECTED:
                self._waiting.fail(InputError(f"the supervisor at {self._address} is gone, and with it this run"))

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=500)


ERRORS: dict[str, type[Exception]] = {"outdated": Outdated, "input": InputError}


class SharedLeases:
    """One learner's view of the table at the supervisor (`leases.Leases`)."""

    ahead = False

    def __init__(self, line: ControlLine, segment: Segment, rank: int, incarnation: int) -> None:
        self._line, self._segment, self._rank, self._incarnation = line, segment, rank, incarnation

    def lease(self) -> Lease | None:
        value = self._line.ask("lease")
        return None if value is None else Lease(**value)

    def complete(self, outcome: Outcome) -> None:
        totals = outcome_totals(outcome)
        self._line.tell(
            "complete", batch=outcome.lease.batch, examples=outcome.examples, applied=outcome.applied,
            totals=[totals.loss, totals.correct, totals.frames, totals.batches],
        )  # fmt: skip

    def totals(self) -> Totals:
        return Totals(*self._line.ask("totals"))

    def record(self) -> Record:
        value = self._line.ask("record")
        completions = tuple(Completion(*row) for row in value["completions"])
        return Record(self._segment, completions, tuple((batch, owner) for batch, owner in value["released"]))


def segment_to_json(segment: Segment) -> dict[str, Any]:
    return {**vars(segment), "frames": list(segment.frames)}
