"""Letters to other learners, and to tasks of the same learner, by the same calls."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from asr_am.distributed.team import Event, LearnerLost, Team


class Desk:
    """clock: of a letter, the step that it belongs to. Each tag has one task that receives it."""

    def __init__(self, team: Team, tags: Sequence[str]) -> None:
        self.team = team
        self._own: defaultdict[str, deque[tuple[Tensor, ...]]] = defaultdict(deque)
        self._came: dict[str, Event] = {tag: team.event() for tag in tags} if team.size > 1 else {}

    def send(self, to: int, tag: str, clock: int, *tensors: Tensor) -> None:
        if to != self.team.rank:
            self.team.post(to, tag, clock, *tensors)
            return
        self._own[tag].append(tuple(tensor.detach().to("cpu", torch.float32, copy=True) for tensor in tensors))
        if self._came:
            self._came[tag].set()

    def receive(self, tag: str, source: int) -> tuple[Tensor, ...]:
        """The next letter of a learner; LearnerLost where it died."""
        if source != self.team.rank:
            letter = self.team.collect(tag, source)
            if letter is None:
                raise LearnerLost(source, "died, and parallax needs the gradients and the rows of all")
            return letter.tensors
        waiting, came = self._own[tag], self._came[tag]
        while not waiting:
            came.clear()
            if not waiting:
                came.wait()
        return waiting.popleft()
