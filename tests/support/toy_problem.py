"""A small regression problem for the tests of distributed training: unequal batches, a model, and its gradients.

Shapes: N weights, and F frames, X inputs, Y outputs of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Lease, Leases, Segment, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions

X, HIDDEN, Y = 3, 6, 4
BUCKET_BYTES = 60  # small enough for several buckets


@dataclass(frozen=True)
class Batch:
    """A few examples of one to five frames each."""

    x_FX: Tensor
    y_FY: Tensor
    examples: int

    @property
    def frames(self) -> int:
        return len(self.x_FX)


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
        return tuple(join(parts[k : k + joined]) for k in range(0, count, joined))
    rng = torch.Generator().manual_seed(1000 + epoch)
    batches = []
    for _ in range(count):
        examples = int(torch.randint(1, 16, (), generator=rng))
        frames = int(torch.randint(1, 6, (examples,), generator=rng).sum())
        x_FX = torch.randn(frames, X, generator=rng)
        noise_FY = torch.randn(frames, Y, generator=rng)
        batches.append(Batch(x_FX, torch.sin(x_FX[:, [0, 1, 2, 0]]) + 0.5 * noise_FY, examples))
    return tuple(batches)


def join(batches: Sequence[Batch]) -> Batch:
    """Joins the batches of a round into the batch of a single learner."""
    return Batch(
        torch.cat([batch.x_FX for batch in batches]), torch.cat([batch.y_FY for batch in batches]),
        sum(batch.examples for batch in batches),
    )  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A training problem. By default the last round of an epoch is incomplete.

    Attributes:
        learners: number of learners.
        batches: batches of an epoch, before joining.
        epochs: number of epochs.
        rounds_per_segment: length of a segment, in rounds of one batch per learner.
        joined: number of batches to join into one.
        options: options of the optimizer.
        lr: initial learning rate.
    """

    learners: int = 4
    batches: int = 83
    epochs: int = 5
    rounds_per_segment: int = 8
    joined: int = 1
    options: OptimizerOptions = field(default_factory=lambda: OptimizerOptions(momentum=0.9))
    lr: float = 0.05

    def of(self, epoch: int) -> tuple[Batch, ...]:
        """Returns the batches of an epoch."""
        return make_batches(epoch, self.batches, self.joined)

    @cached_property
    def segments(self) -> list[Segment]:
        """All segments of the run."""
        step = self.rounds_per_segment * self.learners
        segments = []
        for epoch in range(self.epochs):
            batches = self.of(epoch)
            before = epoch * -(-len(batches) // self.learners)
            for begin in range(0, len(batches), step):
                frames = tuple(batch.frames for batch in batches[begin : begin + step])
                segments.append(Segment(epoch, begin, begin + len(frames), len(batches), frames, before, self.learners))
        return segments

    def rate(self, lease: Lease) -> float:
        """Returns the learning rate, which falls within an epoch and over the run."""
        return self.lr * (1 - 0.5 * lease.progress) / (1 + lease.updates / 100)


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


class ToyGradients:
    """The gradient closure of a segment, like that of `asr_am.train.gradient`.

    Args:
        model: the model.
        params: its flat parameters.
        optimizer: its learning rate is set for each batch.
        problem: the problem.
        leases: leases of the segment.
        segment: the segment.
        count: called as count(batch, examples) for each gradient.

    Attributes:
        computed: (batch, rate) of each gradient, in order.
    """

    def __init__(
        self, model: nn.Module, params: FlatParams, optimizer: Optimizer, problem: Problem, leases: Leases,
        segment: Segment, count: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self._model, self._params, self._optimizer, self._problem = model, params, optimizer, problem
        self._leases, self._batches, self._count = leases, problem.of(segment.epoch), count
        self.computed: list[tuple[int, float]] = []

    def __call__(self, on_bucket: BucketHook | None) -> StepResult | None:
        lease = self._leases.lease()
        if lease is None:
            return None
        rate = self._optimizer.lr = self._problem.rate(lease)
        self._params.g.zero_()
        if lease.batch is None:
            self._params.notify_all_buckets(on_bucket, BUCKET_BYTES)
            return StepResult(lease, 0, 0, rate, torch.zeros(()), torch.zeros(()))
        batch = self._batches[lease.batch]
        loss_sum = squared_error(self._model, batch)
        with self._params.notify_buckets(on_bucket, BUCKET_BYTES):
            (loss_sum / lease.loss_denominator).backward()
        self._count(lease.batch, batch.examples)
        self.computed.append((lease.batch, rate))
        return StepResult(lease, batch.frames, batch.examples, rate, loss_sum.detach(), torch.zeros(()))
