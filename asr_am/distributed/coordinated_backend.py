"""The learner's side of the control plane: requests to the supervisor, and averages by messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from asr_am.distributed.leases import (
    Completion,
    Lease,
    Leases,
    LossSums,
    Segment,
    SegmentRecord,
    StaleSegment,
    StepResult,
)
from asr_am.distributed.team import Group, Message
from asr_am.errors import InputError


class ControlClient(Protocol):
    """Connection to the supervisor (`runtime.control_client`)."""

    def request(self, op: str, timeout: float | None = None, **fields: object) -> Any: ...
    def notify(self, op: str, **fields: object) -> None: ...


def answer_value(answer: Mapping[str, Any]) -> Any:
    """Returns the value in the supervisor's answer to a request. Raises the error that it reports instead."""
    if "error" in answer:
        raise ERRORS.get(answer.get("kind", ""), RuntimeError)(answer["error"])
    return answer["value"]


ERRORS: dict[str, type[Exception]] = {"outdated": StaleSegment, "input": InputError}


class Transport(Protocol):
    """Messages to other learners (`runtime.messaging`)."""

    def register_tag(self, tag: str, lengths: tuple[int, ...]) -> None: ...
    def send(self, to: int, tag: str, clock: int, tensors: tuple[Tensor, ...]) -> None: ...
    def recv(self, tag: str, source: int | None, timeout: float | None) -> Message | None: ...


class QueueLeases:
    """This learner's access to the lease queue of a segment at the supervisor (`leases.Leases`)."""

    ahead = False

    def __init__(self, control: ControlClient, segment: Segment) -> None:
        self._control, self._segment = control, segment

    def lease(self) -> Lease | None:
        value = self._control.request("lease")
        return None if value is None else Lease(**value)

    def complete(self, step_result: StepResult) -> None:
        """Marks the batch of a step as completed. Waits for the GPU."""
        assert step_result.lease.batch is not None, "a lease queue has no idle turns"
        self._control.notify(
            "complete", batch=step_result.lease.batch, examples=step_result.examples, applied=step_result.applied,
            digest=step_result.digest,
            totals=[float(step_result.loss_sum), float(step_result.correct), step_result.num_frames, 1],
        )  # fmt: skip

    def totals(self) -> LossSums:
        return LossSums(*self._control.request("totals"))

    def stop(self, steps: int) -> None:
        self._control.request("stop")

    def record(self) -> SegmentRecord:
        value = self._control.request("record")
        segment = self._segment if value["end"] == self._segment.end else self._segment.until(value["end"])
        completions = value["completions"]
        if not isinstance(completions, tuple):  # it came as JSON, and not from the supervisor in this process
            completions = tuple(Completion(*row) for row in completions)
        released, lost = (tuple((a, b) for a, b in value[key]) for key in ("released", "lost"))
        return SegmentRecord(segment, completions, released, lost)


SHARE, MEAN = "share", "mean"
RELIABLE = (SHARE, MEAN)  # tags without injected faults


class CoordinatedBackend:
    """Backend of learners without collectives.

    The supervisor serves leases and barriers. Averages go by messages through the first live learner.
    """

    waits_on_host = True

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
        self._control.request("open", segment=dict(vars(segment)))
        return QueueLeases(self._control, segment)

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        return self._gather("gather", values.detach().double().reshape(-1).tolist())

    def average(self, x: Tensor) -> Tensor:
        """Averages x [N] over live learners: all send it to the first, which sends the mean back.

        Tries again if a learner has not received the mean because the first one died. A restarted learner that calls
        after the others have averaged gets its own x. The numbers travel as int32, so that they are not rounded.
        """
        local = x.detach().to("cpu", torch.float32)
        self._transport.register_tag(SHARE, (local.numel(),))
        self._transport.register_tag(MEAN, (local.numel(),))
        while True:
            members = self._gather("average", [float(self._averages), float(self._incarnation)])
            self._averages = 1 + int(max(float(row[0]) for row in members.values()))
            # an earlier incarnation may have taken part, which the others do not wait for any more
            takes_part = self._rank in members and members[self._rank][1] == self._incarnation
            mean = self._reduce_via_first(local, list(members)) if takes_part else local
            success = self._gather("averaged", [float(mean is not None)])
            if mean is not None and all(row[0] == 1 for row in success.values()):
                return mean.to(x.device, x.dtype, copy=True)

    def _reduce_via_first(self, local: Tensor, members: list[int]) -> Tensor | None:
        first = members[0]
        if self._rank != first:
            self._transport.send(first, SHARE, self._averages, (local.view(torch.int32),))
            return self._recv_from(first, MEAN)
        total, count = torch.zeros_like(local), 0
        for member in members:
            share = local if member == self._rank else self._recv_from(member, SHARE)
            if share is not None:
                total += share
                count += 1
        mean = total.div_(count)
        for member in members[1:]:
            self._transport.send(member, MEAN, self._averages, (mean.view(torch.int32),))
        return mean

    def _recv_from(self, source: int, tag: str) -> Tensor | None:
        """Returns what another learner sends for this average, or None if it dies first."""
        while (message := self._transport.recv(tag, source, None)) is not None:
            if message.clock == self._averages:
                return message.tensors[0].view(torch.float32)
        return None

    def _gather(self, kind: str, values: list[float]) -> dict[int, Tensor]:
        rows = self._control.request("gather", kind=kind, values=values)
        return {int(rank): torch.tensor(row, dtype=torch.float64) for rank, row in rows.items()}

    def restart_team(self, reason: str, lost: int | None) -> NoReturn:
        self._control.request("restart", reason=reason, lost=lost)  # not answered: the supervisor ends this process
        raise RuntimeError("the supervisor has answered a request to restart the team")

    def confirm(self) -> None:
        self._control.request("confirm")

    def close(self) -> None:
        self._control.notify("bye")
