"""The learner's side of the control plane: JSON requests to the supervisor, and the backend built on them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn

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
from asr_am.distributed.runtime.security import FRAME_BYTES, HEARTBEAT_TIMEOUT, next_event, open_socket, watch
from asr_am.distributed.team import Group
from asr_am.errors import ConnectionLost, InputError

log = logging.getLogger(__name__)

OnEvent = Callable[[dict[str, Any]], None]


class ControlClient:
    """Connection to the supervisor: requests with answers, notifications, and events of other learners.

    Args:
        event_loop: the communication thread.
        address: address of the supervisor, tcp://host:port or ipc://path.
        wait_monitor: wakes the learner's tasks.
        key: secret for encryption, or None.
        on_event: called in the communication thread with each event, in the order in which they were sent.
    """

    def __init__(
        self, event_loop: EventLoop, address: str, wait_monitor: WaitMonitor, key: str | None, on_event: OnEvent
    ) -> None:
        self._event_loop, self._address, self._wait_monitor = event_loop, address, wait_monitor
        self._on_peer_event = on_event
        self._request_ids = count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._socket = open_socket(event_loop.context, zmq.DEALER, key, heartbeats=False)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a supervisor that is stopped reads everything later
        self._monitor = watch(self._socket)
        self._socket.connect(address)
        event_loop.attach(self._socket, self._receive)
        event_loop.attach(self._monitor, self._watch)
        event_loop.at_stop(self._close)

    def start_heartbeats(self) -> None:
        """Tells the supervisor again and again that this process runs."""
        self._send({"op": "live"})
        self._event_loop.call(lambda: self._event_loop.after(HEARTBEAT_TIMEOUT / 5, self.start_heartbeats))

    def request(self, op: str, timeout: float | None = None, **fields: object) -> Any:
        """Sends a request, and waits for the answer.

        Args:
            op: name of the request.
            timeout: seconds, None to wait forever.
            fields: arguments of the request, as JSON values.

        Raises:
            StaleSegment: the supervisor says that this learner is behind the others.
            InputError: the supervisor does not answer within `timeout` seconds, or is gone.
            RuntimeError: the supervisor rejects the request.
        """
        request_id = next(self._request_ids)
        self._send({"op": op, "id": request_id, **fields})
        if not self._wait_monitor.wait_for(lambda: request_id in self._answers, timeout):
            raise InputError(
                f"the supervisor at {self._address} has not answered within {timeout:g} s: check that it is running"
            )
        answer = self._answers.pop(request_id)
        if "error" in answer:
            raise ERRORS.get(answer.get("kind", ""), RuntimeError)(answer["error"])
        return answer["value"]

    def notify(self, op: str, **fields: object) -> None:
        """Sends a message without an answer. If the supervisor rejects it, the training task's next call raises."""
        self._send({"op": op, **fields})

    def _send(self, message: dict[str, object]) -> None:
        data = json.dumps(message).encode()
        frames = [data[begin : begin + FRAME_BYTES] for begin in range(0, len(data), FRAME_BYTES)]

        def send() -> None:
            self._socket.send_multipart(frames, zmq.NOBLOCK)

        self._event_loop.call(send)

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
                self._wait_monitor.fail(
                    ConnectionLost(f"lost the connection to the supervisor at {self._address}: see its log")
                )

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
            digest=completion.digest, totals=[sums.loss, sums.correct, sums.frames, sums.batches],
        )  # fmt: skip

    def totals(self, rank: int) -> LossSums:
        return LossSums(*self._control.request("totals"))

    def record(self, rank: int) -> SegmentRecord:
        value = self._control.request("record")
        completions = tuple(Completion(*row) for row in value["completions"])
        released, lost = (tuple((a, b) for a, b in value[key]) for key in ("released", "lost"))
        return SegmentRecord(self._segment, completions, released, lost)


def segment_to_json(segment: Segment) -> dict[str, Any]:
    return {**vars(segment), "frames": list(segment.frames), "digests": list(segment.digests)}


SHARE, MEAN = "share", "mean"
RELIABLE = (SHARE, MEAN)  # tags without injected faults


class CoordinatedBackend:
    """Backend of learners without collectives.

    The supervisor serves leases and barriers. Averages go by messages through the first live learner.
    """

    def __init__(self, control: ControlClient, transport: Transport, rank: int, incarnation: int) -> None:
        self._control, self._transport, self._rank, self._incarnation = control, transport, rank, incarnation
        self._averages = 0

    @property
    def world(self) -> Group:
        raise RuntimeError("an asynchronous team has messages only, no collectives")

    def split(self, groups: Sequence[Sequence[int]]) -> Group | None:
        return self.world

    def leases(self, segment: Segment, synchronous: bool) -> Leases:
        """Opens a segment. Raises StaleSegment if this learner was restarted and is behind the others."""
        if synchronous:
            raise RuntimeError("an asynchronous team has no synchronous leases")
        self._control.request("open", segment=segment_to_json(segment))
        return QueueLeases(RemoteLeases(self._control, segment), self._rank, self._incarnation)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        return self._gather("gather", values.detach().double().reshape(-1).tolist())

    def average(self, x: Tensor) -> Tensor:
        """Averages x [N] over live learners: all send it to the first, which sends the mean back.

        Tries again if a learner has not received the mean because the first one died. A restarted learner that calls
        after the others have averaged gets its own x.
        """
        local = x.detach().to("cpu", torch.float32)
        self._transport.register_tag(SHARE, (local.numel(),))
        self._transport.register_tag(MEAN, (local.numel(),))
        while True:
            members = self._gather("average", [float(self._averages)])
            self._averages = 1 + int(max(float(count) for count in members.values()))
            mean = self._reduce_via_first(local, list(members)) if self._rank in members else local
            success = self._gather("averaged", [float(mean is not None)])
            if mean is not None and all(row[0] == 1 for row in success.values()):
                return mean.to(x.device, x.dtype, copy=True)

    def _reduce_via_first(self, local: Tensor, members: list[int]) -> Tensor | None:
        first = members[0]
        if self._rank != first:
            self._transport.send(first, SHARE, self._averages, (local,))
            return self._recv_from(first, MEAN)
        total, count = torch.zeros_like(local), 0
        for member in members:
            share = local if member == self._rank else self._recv_from(member, SHARE)
            if share is not None:
                total += share
                count += 1
        mean = total.div_(count)
        for member in members[1:]:
            self._transport.send(member, MEAN, self._averages, (mean,))
        return mean

    def _recv_from(self, source: int, tag: str) -> Tensor | None:
        """Returns what another learner sends for this average, or None if it dies first."""
        while (message := self._transport.recv(tag, source, None)) is not None:
            if message.clock == self._averages:
                return message.tensors[0]
        return None

    def _gather(self, kind: str, values: list[float]) -> dict[int, Tensor]:
        rows = self._control.request("gather", kind=kind, values=values)
        return {int(rank): torch.tensor(row, dtype=torch.float64) for rank, row in rows.items()}

    def restart_team(self, reason: str) -> NoReturn:
        self._control.request("restart", reason=reason)  # not answered: the supervisor ends this process
        raise RuntimeError("the supervisor has answered a request to restart the team")

    def close(self) -> None:
        self._control.notify("bye")
