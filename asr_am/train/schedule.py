"""Learning rates over a run.

Zhang et al. (ICASSP 2019, section 3.1), epochs counted from 1: a constant rate, annealed by 1/sqrt(2) per epoch from
epoch 11; for a batch that is r times larger, first a linear warm-up from the base rate to r times it over 10 epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asr_am.errors import InputError


@dataclass(frozen=True)
class Schedule:
    """base: the rate before annealing, for batch_ratio 1. batch_ratio: the peak is base x batch_ratio, reached by a
    linear warm-up over `warmup_epochs` that moves with every batch (0 = at once). anneal_from: epoch, counted from 1,
    from which the rate is multiplied by `anneal` in each epoch. warmup_batches: updates (batches of all learners
    together) over which the rate also rises from zero.
    """

    base: float = 0.1
    batch_ratio: float = 1.0
    warmup_epochs: float = 0.0
    anneal_from: int = 11
    anneal: float = 1.0 / math.sqrt(2.0)
    warmup_batches: int = 0

    def __post_init__(self) -> None:
        """InputError where a value is out of range."""
        for name in ("base", "batch_ratio", "anneal"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"schedule.{name}={getattr(self, name)}: must be above 0")
        if self.warmup_epochs < 0 or self.warmup_batches < 0:
            raise InputError("schedule.warmup_epochs and schedule.warmup_batches must not be negative")

    def after(self, losses: Sequence[float]) -> Schedule:
        """The schedule of the epoch that follows those with these held-out losses: this one, which ignores them."""
        return self

    def rate(self, epoch: int, share: float, updates: float) -> float:
        """The rate of a batch. epoch: from 0. share: of its batches handed out before. updates: of all learners
        together, in the run before it.

        It follows the share of the epoch and not a learner's own steps, so that it is the same for all learners.
        """
        rate = self.base * self.batch_ratio
        if epoch + share < self.warmup_epochs:
            rate = self.base * (1.0 + (self.batch_ratio - 1.0) * (epoch + share) / self.warmup_epochs)
        rate *= self.anneal ** max(0, epoch + 2 - self.anneal_from)
        if updates < self.warmup_batches:
            rate *= min(1.0, (updates + 1) / self.warmup_batches)
        return rate
