"""The "min-rate newbob" schedule of Ladkat et al. (Interspeech 2019, section 3.2).

The rate of an epoch follows from the held-out losses of the epochs before it, which are in every checkpoint and which
the coordinator tells to all learners: so it is the same for all of them, and after any resume.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from asr_am.errors import InputError
from asr_am.train.schedule import Schedule


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
