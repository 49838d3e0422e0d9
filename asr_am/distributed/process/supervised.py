"""Learners on mail alone: leases and meetings by the supervisor, averages by mail through the first of the living."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr_am.distributed.leases import Leases, Segment
from asr_am.distributed.process.control import ControlLine, SharedLeases, segment_to_json
from asr_am.distributed.process.mail import PostOffice
from asr_am.distributed.team import Group

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
