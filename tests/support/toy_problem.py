"""A small regression problem for the tests of distributed training: unequal batches, learning rates, and a model.

Shapes: N weights, and F frames, X inputs, Y outputs of a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.train.schedule import Schedule
from asr_am.train.user_batches import EpochOrder

X, HIDDEN, Y = 3, 6, 4


@dataclass(frozen=True)
class Batch:
    """A batch, which counts as one example (`trainable.Batch`).

    Attributes:
        id: its number in the epoch.
        x_FX, y_FY: inputs and outputs.
    """

    epoch: int
    id: int
    x_FX: Tensor
    y_FY: Tensor

    @cached_property
    def frames(self) -> int:
        return len(self.x_FX)

    @cached_property
    def digest(self) -> int:
        return zlib.crc32(self.x_FX.numpy().tobytes())

    def __len__(self) -> int:
        return 1


@cache
def make_batches(epoch: int, count: int, joined: int = 1) -> tuple[Batch, ...]:
    """Returns the batches of an epoch: a noisy curve, 1 to 75 frames per batch.

    Args:
        epoch: seeds the data.
        count: number of batches before joining.
        joined: number of consecutive batches to join into one.
    """
    if joined > 1:
        parts = make_batches(epoch, count)
        return tuple(join(k, parts[k * joined : (k + 1) * joined]) for k in range(-(-count // joined)))
    rng = torch.Generator().manual_seed(1000 + epoch)
    batches = []
    for number in range(count):
        examples = int(torch.randint(1, 16, (), generator=rng))
        frames = int(torch.randint(1, 6, (examples,), generator=rng).sum())
        x_FX = torch.randn(frames, X, generator=rng)
        noise_FY = torch.randn(frames, Y, generator=rng)
        batches.append(Batch(epoch, number, x_FX, torch.sin(x_FX[:, [0, 1, 2, 0]]) + 0.5 * noise_FY))
    return tuple(batches)


def join(number: int, batches: Sequence[Batch]) -> Batch:
    """Joins the batches of a round into batch `number` of a single learner."""
    x_FX, y_FY = (torch.cat([getattr(batch, part) for batch in batches]) for part in ("x_FX", "y_FY"))
    return Batch(batches[0].epoch, number, x_FX, y_FY)


class ToyData:
    """The batches of all epochs (`trainable.Data`). A plan holds the batches themselves."""

    def batch(self, plan: EpochOrder, number: int) -> Batch:
        return plan.batches[number]

    def batches(self, plan: EpochOrder, numbers: Iterable[int]) -> Iterator[Batch]:
        return (plan.batches[number] for number in numbers)

    def digests(self, plan: EpochOrder, first: int, end: int) -> tuple[int, ...]:
        return tuple(batch.digest for batch in plan.batches[first:end])


@dataclass(frozen=True)
class Falling(Schedule):
    """A learning rate that falls within an epoch and over the run."""

    def rate(self, epoch: int, share: float, updates: float) -> float:
        return self.base * (1 - 0.5 * share) / (1 + updates / 100)


@dataclass(frozen=True)
class Problem:
    """A training problem. By default the last round of an epoch is incomplete.

    Attributes:
        batches: batches of an epoch, before joining.
        rounds_per_segment: length of a segment, in rounds of one batch per learner.
        joined: number of batches to join into one.
        lr: initial learning rate.
        schedule: how it falls.
    """

    learners: int = 4
    batches: int = 83
    epochs: int = 5
    rounds_per_segment: int = 8
    joined: int = 1
    options: OptimizerOptions = field(default_factory=lambda: OptimizerOptions(momentum=0.9))
    lr: float = 0.05
    schedule: type[Schedule] = Falling

    def of(self, epoch: int) -> tuple[Batch, ...]:
        """Returns the batches of an epoch."""
        return make_batches(epoch, self.batches, self.joined)

    @cached_property
    def segments(self) -> list[tuple[int, range]]:
        """(epoch, batches) of each segment of the run."""
        step, total = self.rounds_per_segment * self.learners, len(self.of(0))
        begins = range(0, total, step)
        return [(epoch, range(k, min(k + step, total))) for epoch in range(self.epochs) for k in begins]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(X, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, Y))


def start_weights() -> Tensor:
    """Returns the initial weights [N] of `make_model`."""
    return torch.cat([p.detach().reshape(-1) for p in make_model().parameters()])


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the loss, summed over frames."""
    return (model(batch.x_FX) - batch.y_FY).square().sum()


@torch.no_grad()
def heldout(w: Tensor) -> float:
    """Returns the mean loss per frame of weights `w` [N] on held-out data."""
    params = FlatParams(model := make_model())
    params.w.copy_(w)
    batches = make_batches(-1, 60)
    return float(sum(squared_error(model, batch) for batch in batches)) / sum(batch.frames for batch in batches)
