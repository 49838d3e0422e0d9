"""Learning rates over a run. A schedule is a class whose options a configuration sets (conf/schedule).

`Anneal` (Zhang et al., ICASSP 2019, section 3.1, epochs counted from 1): a constant rate, annealed by 1/sqrt(2) per
epoch from epoch 11. For a batch r times larger, a linear warm-up from the base rate to r times it over 10 epochs.

`Newbob` ("min-rate newbob" of Ladkat et al., Interspeech 2019, section 3.2): the rate is halved when the held-out loss
falls too little. The losses are the same at all learners and in every checkpoint, and so is the rate after a resume.

`Plateau`: the rate falls after each epoch whose held-out loss is not the lowest so far.

`for_batch` gives a schedule without a rate the one that fits the total batch. Its class says how.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asr_am.errors import InputError
from asr_am.extensions import find_class
from asr_am.options import build

DEFAULT = "asr_am.train.schedule.Anneal"
ALIKE = (("sgd", "nesterov"), ("adam",), ("adagrad",))  # kinds of optimizer that take the same rates


def make_schedule(_target_: str = DEFAULT, **options: Any) -> Schedule:
    """Returns a schedule, given the values of a configuration.

    Args:
        _target_: full name of its class, in this module or an entry point `asr_am.schedules`.
        options: its options by name.

    Raises:
        InputError: the class is no schedule, or an option is unknown, of another type or out of range.
    """
    schedule: Schedule = build(_find(_target_), options, "schedule")
    return schedule


@dataclass(frozen=True)
class Schedule:
    """Base class: a constant rate. A subclass is a frozen dataclass of plain values, too.

    Attributes:
        base: the first rate.
    """

    base: float

    def after(self, losses: Sequence[float]) -> Schedule | None:
        """Returns the schedule of the epoch after those with these held-out losses, None if training has ended."""
        return self

    def rate(self, epoch: int, share: float, updates: float) -> float:
        """Returns the learning rate of a batch.

        The rate depends on the share of the epoch and not on a learner's own steps, so all learners have the same.

        Args:
            epoch: number of the epoch, from 0.
            share: share of the epoch's batches that were handed out before this one.
            updates: updates of the whole team in the run before it.
        """
        return self.base

    def idle_options(self, steps: int, epochs: int) -> list[str]:
        """Returns a warning, with a remedy, for each option that cannot act in so short a training.

        Args:
            steps: updates of an epoch.
            epochs: number of epochs.
        """
        return []

    @classmethod
    def scaled(cls, base: float, ratio: float, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options for another total batch than that of `Reference`.

        Args:
            base: the rate for the batch of the reference.
            ratio: the rate for the batch of the run, divided by `base`.
            given: options of the configuration other than `base`, which stay as they are.
        """
        return {**given, "base": base * ratio}


@dataclass(frozen=True)
class Anneal(Schedule):
    """A constant rate with warm-up and annealing.

    Attributes:
        base: the rate before annealing, for batch_ratio 1.
        batch_ratio: the peak rate is base x batch_ratio.
        warmup_epochs: epochs of a linear warm-up from base to the peak, which moves with every batch. 0: none.
        anneal_from: first epoch, counted from 1, whose rate is multiplied by `anneal`. Each later epoch is, too.
        anneal: factor per epoch.
        warmup_batches: updates (batches of all learners together) over which the rate rises from zero.
    """

    base: float = 0.1
    batch_ratio: float = 1.0
    warmup_epochs: float = 0.0
    anneal_from: int = 11
    anneal: float = 1.0 / math.sqrt(2.0)
    warmup_batches: int = 0

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        for name in ("base", "batch_ratio", "anneal"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"schedule.{name}={getattr(self, name)}: must be above 0 and finite")
        if self.warmup_epochs < 0 or self.warmup_batches < 0:
            raise InputError("schedule.warmup_epochs and schedule.warmup_batches must not be negative")

    def rate(self, epoch: int, share: float, updates: float) -> float:
        rate = self.base * self.batch_ratio
        if epoch + share < self.warmup_epochs:
            rate = self.base * (1.0 + (self.batch_ratio - 1.0) * (epoch + share) / self.warmup_epochs)
        rate *= self.anneal ** max(0, epoch + 2 - self.anneal_from)
        if updates < self.warmup_batches:
            rate *= min(1.0, (updates + 1) / self.warmup_batches)
        return rate

    def idle_options(self, steps: int, epochs: int) -> list[str]:
        found = _long_warmup(self.warmup_batches, steps * epochs)
        if self.warmup_epochs > epochs and self.batch_ratio != 1:
            reached = self.rate(epochs - 1, 1.0, math.inf)
            found.append(
                f"schedule.warmup_epochs={self.warmup_epochs:g}: training has {epochs} epochs, so that the rate "
                f"reaches {reached:.3g} of {self.base * self.batch_ratio:.3g}; lower it, or raise train.epochs"
            )
        return found

    @classmethod
    def scaled(cls, base: float, ratio: float, given: Mapping[str, Any]) -> dict[str, Any]:
        """A rate above that of the reference is reached by a linear warm-up from there (Zhang et al., section 3.1).

        The warm-up ends when annealing begins.
        """
        if ratio <= 1:
            return super().scaled(base, ratio, given)
        warmup = max(0, given.get("anneal_from", cls.anneal_from) - 1)
        return {"batch_ratio": ratio, "warmup_epochs": warmup, **given, "base": base}


@dataclass(frozen=True)
class Newbob(Schedule):
    """A constant rate until the held-out loss falls too little, then a smaller one in every epoch.

    Training ends before the first epoch with a rate below `minimum`, or after train.epochs.

    Attributes:
        base: the first rate.
        minimum: lowest rate to train with.
        threshold: share of the held-out loss, which must be positive. The first epoch that lowers the loss by less ends
            the constant rate.
        factor: factor per epoch from then on.
        warmup_batches: see `Anneal`.
    """

    base: float = 0.1
    minimum: float = 0.001
    threshold: float = 0.05
    factor: float = 0.5
    warmup_batches: int = 0

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if not 0 < self.minimum <= self.base < math.inf:
            raise InputError(f"schedule.minimum={self.minimum}: must be above 0 and at most schedule.base={self.base}")
        if not 0 < self.factor < 1:
            raise InputError(f"schedule.factor={self.factor}: must be between 0 and 1")
        if not 0 <= self.threshold < 1:
            raise InputError(f"schedule.threshold={self.threshold}: must be at least 0 and below 1")
        if self.warmup_batches < 0:
            raise InputError(f"schedule.warmup_batches={self.warmup_batches}: must not be negative")

    def after(self, losses: Sequence[float]) -> Schedule | None:
        slow = [before - now < self.threshold * before for before, now in itertools.pairwise(losses)]
        halvings = len(slow) - slow.index(True) if True in slow else 0
        rate = self.base * self.factor**halvings
        if rate < self.minimum * (1 - 1e-9):  # 0.01 x 0.7 is to reach 0.007
            return None
        return Anneal(base=rate, anneal=1.0, warmup_batches=self.warmup_batches)

    def idle_options(self, steps: int, epochs: int) -> list[str]:
        return _long_warmup(self.warmup_batches, steps * epochs)


@dataclass(frozen=True)
class Plateau(Schedule):
    """A rate that falls after each epoch that has not lowered the held-out loss.

    Attributes:
        base: the first rate.
        factor: factor on the rate after such an epoch.
        patience: number of such epochs in a row that ends the training.
        threshold: nats by which the held-out loss must fall below the lowest one so far.
    """

    base: float = 0.003
    factor: float = 0.5
    patience: int = 3
    threshold: float = 1e-3

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if not 0 < self.base < math.inf:
            raise InputError(f"schedule.base={self.base}: must be above 0")
        if not 0 < self.factor <= 1:
            raise InputError(f"schedule.factor={self.factor}: must be above 0 and at most 1")
        if self.patience < 1:
            raise InputError(f"schedule.patience={self.patience}: must be at least 1 epoch")
        if not 0 <= self.threshold < math.inf:
            raise InputError(f"schedule.threshold={self.threshold}: must not be negative")

    def after(self, losses: Sequence[float]) -> Schedule | None:
        lowest, worse, rate = math.inf, 0, self.base
        for loss in losses:
            worse = 0 if loss < lowest - self.threshold else worse + 1
            lowest = min(lowest, loss)
            rate *= self.factor if worse else 1.0
            if worse == self.patience:
                return None
        return Anneal(base=rate, anneal=1.0)


def _long_warmup(warmup: int, updates: int) -> list[str]:
    if warmup <= updates:
        return []
    return [
        f"schedule.warmup_batches={warmup}: training has {updates} updates, so that the rate reaches "
        f"{updates / warmup:.0%} of schedule.base; set it to {max(1, updates // 10)} or fewer"
    ]


@dataclass(frozen=True)
class Reference:
    """A learning rate, and the total batch and optimizer that it was tuned for.

    Attributes:
        base: the rate.
        batch: chunks of all learners together.
        optimizer: kind of `OptimizerOptions`. None: the rate is for any.
    """

    base: float
    batch: int
    optimizer: str | None = None

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if not (0 < self.base < math.inf and self.batch >= 1):
            raise InputError(
                f"schedule.reference: base={self.base} must be above 0, and batch={self.batch} must be at least 1"
            )

    def ratio(self, batch_size: int, optimizer: str) -> float:
        """Returns the rate for another batch, divided by that of this one.

        For SGD it is the ratio of the batches (Goyal et al. 2017, "Accurate, large minibatch SGD"). Adam and Adagrad
        divide by the size of the gradients, so it is the square root of that (Malladi et al. 2022, "On the SDEs and
        scaling rules for adaptive gradient algorithms").

        Args:
            batch_size: chunks of all learners together.
            optimizer: kind of `OptimizerOptions`.

        Raises:
            InputError: the rate is for another optimizer.
        """
        if self.optimizer and any(optimizer in kinds and self.optimizer not in kinds for kinds in ALIKE):
            raise InputError(
                f"train.optimizer.kind={optimizer}: the schedule's rate of {self.base:g} is for {self.optimizer}; give "
                "one with schedule.base=RATE, or choose another schedule"
            )
        linear = batch_size / self.batch
        return math.sqrt(linear) if optimizer in ("adam", "adagrad") else linear


def for_batch(options: Mapping[str, Any], batch_size: int, optimizer: str) -> dict[str, Any]:
    """Returns the options of a schedule, without its `reference`. A `base` of None becomes the rate for the batch.

    Args:
        options: `_target_` and options of a schedule, and `reference`, the options of `Reference`.
        batch_size: chunks of all learners together.
        optimizer: kind of `OptimizerOptions`.

    Raises:
        InputError: the class is no schedule, the reference or the batch is out of range, or the rate is for another
            optimizer.
    """
    schedule = _find(options.get("_target_", DEFAULT))
    given = {name: value for name, value in options.items() if name != "reference"}
    if "reference" not in options or given.get("base") is not None:
        return given
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"train.batch_size={batch_size}: must be an integer of at least 1")
    reference = build(Reference, options["reference"], "schedule.reference")
    return schedule.scaled(reference.base, reference.ratio(batch_size, optimizer), given)


def _find(target: str) -> type[Schedule]:
    return find_class(target, "schedule._target_", "asr_am.train.schedule", Schedule, "asr_am.schedules")
