"""A small training problem for the tests of the distributed core: batches of unequal size, a model, its gradients.

Shapes: N weights; F frames, X inputs, Y outputs of a batch.
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
BUCKET_BYTES = 60  # several buckets


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
    """A curve with noise; batches of 1 to 75 frames, no two of the same. joined: how many of these make one."""
    if joined > 1:
        whole = make_batches(epoch, count)
        return tuple(join(whole[k : k + joined]) for k in range(0, count, joined))
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
    """The batch of one learner that does what several do in a round."""
    return Batch(
        torch.cat([batch.x_FX for batch in batches]), torch.cat([batch.y_FY for batch in batches]),
        sum(batch.examples for batch in batches),
    )  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """batches: of an epoch; the last round of the learners is not complete. joined: how many batches make one."""

    learners: int = 4
    batches: int = 83
    epochs: int = 5
    rounds_per_segment: int = 8
    joined: int = 1
    options: OptimizerOptions = field(default_factory=lambda: OptimizerOptions(momentum=0.9))
    lr: float = 0.05

    def of(self, epoch: int) -> tuple[Batch, ...]:
        """An epoch's batches."""
        return make_batches(epoch, self.batches, self.joined)

    @cached_property
    def segments(self) -> list[Segment]:
        step = self.rounds_per_segment * self.learners
        found = []
        for epoch in range(self.epochs):
            batches = self.of(epoch)
            before = epoch * -(-len(batches) // self.learners)
            for begin in range(0, len(batches), step):
                frames = tuple(batch.frames for batch in batches[begin : begin + step])
                found.append(Segment(epoch, begin, begin + len(frames), len(batches), frames, before, self.learners))
        return found

    def rate(self, lease: Lease) -> float:
        """It falls within an epoch, and over the run."""
        return self.lr * (1 - 0.5 * lease.progress) / (1 + lease.updates / 100)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(X, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, Y))


def start_weights() -> Tensor:
    """As `make_model` makes them [N]."""
    return torch.cat([p.detach().reshape(-1) for p in make_model().parameters()])


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """The loss, summed over frames."""
    return (model(batch.x_FX) - batch.y_FY).square().sum()


@torch.no_grad()
def heldout(w: Tensor) -> float:
    """Mean loss per frame of the weights `w` [N] on data that are never trained on."""
    params = FlatParams(model := make_model())
    params.w.copy_(w)
    batches = make_batches(-1, 60)
    return float(sum(squared_error(model, batch) for batch in batches)) / sum(batch.frames for batch in batches)


class ToyGradients:
    """The gradient closure of a segment, as `asr_am.train.gradient.SegmentGradients` is.

    count: told batch and examples of each gradient. did: (batch, rate), in order.
    """

    def __init__(
        self, model: nn.Module, params: FlatParams, optimizer: Optimizer, problem: Problem, leases: Leases,
        segment: Segment, count: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self._model, self._params, self._optimizer, self._problem = model, params, optimizer, problem
        self._leases, self._batches, self._count = leases, problem.of(segment.epoch), count
        self.did: list[tuple[int, float]] = []

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
        self.did.append((lease.batch, rate))
        return StepResult(lease, batch.frames, batch.examples, rate, loss_sum.detach(), torch.zeros(()))
