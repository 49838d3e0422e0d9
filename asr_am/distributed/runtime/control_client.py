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

from asr_am.distributed.control_plane import QueueLeases
from asr_am.distributed.leases import (
    Completion,
    Lease,
    Leases,
    LossSums,
    Segment,
    SegmentRecord,
    StaleSegment,
)
from asr_am.distributed.runtime.event_loop import EventLoop, WaitMonitor
from asr_am.distributed.runtime.messaging import Transport
from asr_am.distributed.runtime.security import next_event, open_socket, watch
from asr_am.distributed.team import Group
from asr_am.errors import InputError

log = logging.getLogger(__name__)

OnEvent = Callable[[dict[str, Any]], None]


class ControlClient:
    """address: the supervisor's, as tcp://host:port. on_news: called by the mail thread, in the order of the news."""

    def __init__(
        self, event_loop: EventLoop, address: str, wait_monitor: WaitMonitor, key: str | None, on_event: OnEvent
    ) -> None:
        self._event_loop, self._address, self._wait_monitor, self._on_peer_event = (
            event_loop,
            address,
            wait_monitor,
            on_event,
        )
        self._numbers = count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._socket = open_socket(event_loop.context, zmq.DEALER, key)
        self._monitor = watch(self._socket)
        self._socket.connect(address)
        event_loop.attach(self._socket, self._receive)
        event_loop.attach(self._monitor, self._watch)
        event_loop.at_stop(self._close)

    def request(self, op: str, timeout: float | None = None, **fields: object) -> Any:
        """The supervisor's answer, however long that takes.

        Outdated and InputError as it says; InputError after `timeout` seconds, and where the supervisor is gone.
        """
        number = next(self._numbers)
        self._send({"op": op, "id": number, **fields})
        if not self._wait_monitor.wait_for(lambda: number in self._answers, timeout):
            raise InputError(f"the supervisor at {self._address} has not answered within {timeout:g} s; is it running?")
        answer = self._answers.pop(number)
        if "error" in answer:
            raise ERRORS.get(answer.get("kind", ""), RuntimeError)(answer["error"])
        return answer["value"]

    def notify(self, op: str, **fields: object) -> None:
        """Something that needs no answer; if the supervisor objects, the training task's next call raises it."""
        self._send({"op": op, **fields})

    def _send(self, message: dict[str, object]) -> None:
        data = json.dumps(message).encode()
        self._event_loop.call(lambda: self._socket.send(data, zmq.NOBLOCK))

    def _receive(self) -> None:
        while True:
            try:
                message = json.loads(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if "id" in message:
                with self._wait_monitor.change():
                    self._answers[message["id"]] = message
            elif "error" in message:
                self._wait_monitor.fail(RuntimeError(message["error"]))
            else:
                self._on_peer_event(message)

    def _watch(self) -> None:
        while (event := next_event(self._monitor)) is not None:
            if event == zmq.EVENT_DISCONNECTED:
                self._wait_monitor.fail(InputError(f"the supervisor at {self._address} is gone, and with it this run"))

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=500)


ERRORS: dict[str, type[Exception]] = {"outdated": StaleSegment, "input": InputError}


class RemoteLeases:
    """Lease queue of one segment at the supervisor (`control_plane.LeaseService`), for the learner of this process."""

    def __init__(self, control: ControlClient, segment: Segment) -> None:
        self._control, self._segment = control, segment

    def lease(self, rank: int, incarnation: int) -> Lease | None:
        value = self._control.request("lease")
        return None if value is None else Lease(**value)

    def complete(self, completion: Completion, sums: LossSums) -> None:
        self._control.notify(
            "complete", batch=completion.batch, examples=completion.examples, applied=completion.applied,
            totals=[sums.loss, sums.correct, sums.frames, sums.batches],
        )  # fmt: skip

    def totals(self, rank: int) -> LossSums:
        return LossSums(*self._control.request("totals"))

    def record(self, rank: int) -> SegmentRecord:
        value = self._control.request("record")
        completions = tuple(Completion(*row) for row in value["completions"])
        return SegmentRecord(self._segment, completions, tuple((batch, owner) for batch, owner in value["released"]))


def segment_to_json(segment: Segment) -> dict[str, Any]:
    return {**vars(segment), "frames": list(segment.frames)}


SHARE, MEAN = "share", "mean"
RELIABLE = (SHARE, MEAN)  # tags that injected faults spare


class CoordinatedBackend:
    def __init__(self, line: ControlClient, transport: Transport, rank: int, incarnation: int) -> None:
        self._control, self._transport, self._rank, self._incarnation = line, transport, rank, incarnation
        self._averages = 0

    @property
    def world(self) -> Group:
        raise RuntimeError("this team has mail only, no collectives")

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        return self.world

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        """Outdated where a restarted learner is behind the others."""
        if synchronous:
            raise RuntimeError("a supervised team does not move in step")
        self._control.request("open", segment=segment_to_json(segment))
        return QueueLeases(RemoteLeases(self._control, segment), self._rank, self._incarnation)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        return self._meet("gather", values.detach().double().reshape(-1).tolist())

    def average(self, x: Tensor) -> Tensor:
        """Everybody sends x [N] to the first, which answers with the mean; once more where it dies over that.

        A restarted learner that comes when the others have done it already gets its own x.
        """
        own = x.detach().to("cpu", torch.float32)
        self._transport.register_tag(SHARE, (own.numel(),))
        self._transport.register_tag(MEAN, (own.numel(),))
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
            self._transport.send(first, SHARE, self._averages, (own,))
            return self._from(first, MEAN)
        total, count = torch.zeros_like(own), 0
        for member in members:
            share = own if member == self._rank else self._from(member, SHARE)
            if share is not None:
                total += share
                count += 1
        mean = total.div_(count)
        for member in members[1:]:
            self._transport.send(member, MEAN, self._averages, (mean,))
        return mean

    def _from(self, source: int, tag: str) -> Tensor | None:
        """What another sends for this average; None where it dies first."""
        while (message := self._transport.recv(tag, source, None)) is not None:
            if message.clock == self._averages:
                return message.tensors[0]
        return None

    def _meet(self, kind: str, values: list[float]) -> dict[int, Tensor]:
        rows = self._control.request("gather", kind=kind, values=values)
        return {int(rank): torch.tensor(row, dtype=torch.float64) for rank, row in rows.items()}

    def close(self) -> None:
        self._control.notify("bye")
