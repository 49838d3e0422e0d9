"""The learner's line to its supervisor: requests and answers as JSON, and news of who dies and who is born.

Learners on mail alone: leases and meetings by the supervisor, averages by mail through the first of the living."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
import zmq
from torch import Tensor

from asr_am.distributed.leases import (
    Completion,
    Lease,
    Leases,
    Outdated,
    Record,
    Segment,
    Stats,
    Totals,
    outcome_totals,
)
from asr_am.distributed.runtime.event_loop import Reactor, Waiting
from asr_am.distributed.runtime.messaging import PostOffice
from asr_am.distributed.runtime.security import next_event, open_socket, watch
from asr_am.distributed.team import Group
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

    def complete(self, outcome: Stats) -> None:
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


SHARE, MEAN = "share", "mean"
RELIABLE = (SHARE, MEAN)  # tags that injected faults spare


class Supervised:
    def __init__(self, line: ControlLine, office: PostOffice, rank: int, incarnation: int) -> None:
        self._line, self._office, self._rank, self._incarnation = line, office, rank, incarnation
        self._averages = 0

    @property
    def everybody(self) -> Group:
        raise RuntimeError("this team has mail only, no collectives")

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        return self.everybody

    def leases(self, segment: Segment, in_step: bool) -> Leases:
        """Outdated where a restarted learner is behind the others."""
        if in_step:
            raise RuntimeError("a supervised team does not move in step")
        self._line.ask("open", segment=segment_to_json(segment))
        return SharedLeases(self._line, segment, self._rank, self._incarnation)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        return self._meet("gather", values.detach().double().reshape(-1).tolist())

    def average(self, x: Tensor) -> Tensor:
        """Everybody sends x [N] to the first, which answers with the mean; once more where it dies over that.

        A restarted learner that comes when the others have done it already gets its own x.
        """
        own = x.detach().to("cpu", torch.float32)
        self._office.accept(SHARE, (own.numel(),))
        self._office.accept(MEAN, (own.numel(),))
        while True:
            members = self._meet("average", [float(self._averages)])
            self._averages = 1 + int(max(float(count) for count in members.values()))
            mean = self._star(own, list(members)) if self._rank in members else own
            told = self._meet("averaged", [float(mean is not None)])
            if mean is not None and all(row[0] == 1 for row in told.values()):
                return mean.to(x.device, x.dtype, copy=True)

    def _star(self, own: Tensor, members: list[int]) -> Tensor | None:
        first = members[0]
        if self._rank != first:
            self._office.post(first, SHARE, self._averages, (own,))
            return self._from(first, MEAN)
        total, count = torch.zeros_like(own), 0
        for member in members:
            share = own if member == self._rank else self._from(member, SHARE)
            if share is not None:
                total += share
                count += 1
        mean = total.div_(count)
        for member in members[1:]:
            self._office.post(member, MEAN, self._averages, (mean,))
        return mean

    def _from(self, source: int, tag: str) -> Tensor | None:
        """What another sends for this average; None where it dies first."""
        while (letter := self._office.collect(tag, source, None)) is not None:
            if letter.clock == self._averages:
                return letter.tensors[0]
        return None

    def _meet(self, kind: str, values: list[float]) -> dict[int, Tensor]:
        rows = self._line.ask("gather", kind=kind, values=values)
        return {int(rank): torch.tensor(row, dtype=torch.float64) for rank, row in rows.items()}

    def close(self) -> None:
        self._line.tell("bye")
