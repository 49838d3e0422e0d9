"""Learning rates over a run.

Zhang et al. (ICASSP 2019, section 3.1), epochs counted from 1: a constant rate, annealed by 1/sqrt(2) per epoch from
epoch 11; for a batch that is r times larger, first a linear warm-up from the base rate to r times it over 10 epochs.


The "min-rate newbob" schedule of Ladkat et al. (Interspeech 2019, section 3.2).

The rate of an epoch follows from the held-out losses of the epochs before it, which are in every checkpoint and which
the coordinator tells to all learners: so it is the same for all of them, and after any resume.
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True)
class Newbob:
    """The rate is `base` until an epoch lowers the held-out loss by less than `threshold` (a share of it), and is
    then multiplied by `factor` for every epoch. Training ends before the first epoch with a rate below `minimum`, or
    after train.epochs. warmup_batches: as of `Schedule`.
    """

    base: float = 0.1
    minimum: float = 0.001
    threshold: float = 0.05
    factor: float = 0.5
    warmup_batches: int = 0

    def __post_init__(self) -> None:
        """InputError where a value is out of range."""
        if not 0 < self.minimum <= self.base < math.inf:
            raise InputError(f"schedule.minimum={self.minimum}: must be above 0 and at most schedule.base={self.base}")
        if not 0 < self.factor < 1:
            raise InputError(f"schedule.factor={self.factor}: must be between 0 and 1")
        if not 0 <= self.threshold < 1:
            raise InputError(f"schedule.threshold={self.threshold}: must be at least 0 and below 1")
        if self.warmup_batches < 0:
            raise InputError(f"schedule.warmup_batches={self.warmup_batches}: must not be negative")

    def after(self, losses: Sequence[float]) -> Schedule | None:
        """The schedule of the epoch that follows those with these held-out losses; None where training has ended."""
        slow = [1 - now / before < self.threshold for before, now in itertools.pairwise(losses)]
        halvings = len(slow) - slow.index(True) if True in slow else 0
        rate = self.base * self.factor**halvings
        if rate < self.minimum * (1 - 1e-9):  # 0.01 x 0.7 is to reach 0.007
            return None
        return Schedule(base=rate, anneal=1.0, warmup_batches=self.warmup_batches)
