"""What a distributed training algorithm is to the training loop.

A strategy owns the step: it is handed the gradient as a closure, so that its file reads like the pseudo-code of its
paper, and one strategy can be built out of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from asr_am.distributed.flat_params import FlatParams, OnBucket
from asr_am.distributed.optimizer import Optimizer
from asr_am.distributed.team import Team


@dataclass(frozen=True)
class Stats:
    """What one batch told. The sums are tensors, so that a GPU need not be waited for.

    batch: its number in the epoch. weight: what its gradient, a mean, counts for (frames). examples: chunks in it.
    lr: learning rate of the step. applied: False where the algorithm dropped the gradient.
    """

    batch: int
    weight: float
    examples: int
    lr: float
    loss_sum: Tensor
    correct: Tensor
    applied: bool = True


Gradient = Callable[[OnBucket | None], Stats | None]
"""Leases a batch, runs forward and backward, fills `params.g` with the mean over its frames; None: no data left."""


@dataclass
class Traffic:
    """What a run is measured by, beside its accuracy. staleness: updates by the staleness of their gradient."""

    staleness: Counter[int] = field(default_factory=Counter)
    bytes_sent: int = 0
    waiting_seconds: float = 0.0
    consensus_distance: float = 0.0


class Strategy(ABC):
    """One algorithm at one learner."""

    name: str

    def __init__(self, params: FlatParams, optimizer: Optimizer, team: Team) -> None:
        self.params, self.optimizer, self.team = params, optimizer, team
        self.traffic = Traffic()

    @abstractmethod
    def step(self, gradient: Gradient) -> Stats | None:
        """Do one update; None when this learner has no data left in the epoch."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Idle until every lease is done, then rest (drain messages, agree)."""

    @abstractmethod
    def consensus(self) -> Tensor:
        """The weights [N] to validate, checkpoint and export. Never written back."""

    @abstractmethod
    def serve(self) -> None:
        """What a server does instead of stepping."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values from which `load_state_dict` continues with the same bits."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Give back connections and threads."""
