"""Trains any torch model with a strategy, without the files, checkpoints and schedules of recipes.

    from asr_am.api import simulate, train_model
    from asr_am.distributed.strategies.adpsgd import Adpsgd

    def learner(team):
        torch.manual_seed(0)                      # the same first weights at all learners
        model = torch.nn.Linear(3, 1)
        losses = train_model(model, batches, loss, Adpsgd, team, epochs=4, lr=0.05)
        return model, losses

    results = simulate(learner, learners=4)       # by rank

`learner` runs in real processes too: call `learner(connect())` (asr_am/distributed/runtime/connect.py) in a program
that `launch` or torchrun starts, and `learner(SingleProcess())` for one learner in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Leases, Segment, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team

Batch = TypeVar("Batch")


def train_model(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Callable[[nn.Module, Batch], tuple[Tensor, int]],
    strategy: Callable[[FlatParams, Optimizer, Team], Strategy],
    team: Team,
    *,
    epochs: int = 1,
    lr: float | Callable[[float], float] = 0.1,
    optimizer: OptimizerOptions | None = None,
    sizes: Sequence[int] | None = None,
) -> list[float]:
    """Trains as one learner of a team. All learners call it with the same arguments but for `team`.

    Every batch of an epoch is computed by exactly one learner. At the end the model has the consensus weights. A
    learner that dies is not replaced, because there are no checkpoints: fault-tolerant strategies go on without it.

    Args:
        model: the model, with the same weights at all learners.
        batches: batches of an epoch, in the same order at all learners.
        loss: returns the loss of a batch, summed over its examples, and the number of examples.
        strategy: makes the strategy, e.g. its class or `partial(Bmuf, block_size=10)`.
        team: this learner's end of the team.
        epochs: number of passes over `batches`.
        lr: learning rate, or a function of the share of the training that is done, from 0 to 1.
        optimizer: options of the update rule. Default: SGD with momentum 0.9.
        sizes: number of examples of each batch. Default: the length of the batch, or of its first part.

    Returns:
        The mean loss per example of each epoch, measured while the weights changed.
    """
    params = FlatParams(model)
    rule = Optimizer(params, optimizer or OptimizerOptions())
    learner = strategy(params, rule, team)
    frames = tuple(sizes if sizes is not None else map(_size, batches))
    losses = []
    for epoch in range(epochs):
        before = epoch * -(-len(batches) // team.size)
        segment = Segment(epoch, 0, len(batches), len(batches), frames, before, team.size)
        leases = team.leases(segment, learner.synchronous)

        def rate(progress: float, epoch: int = epoch) -> float:
            return lr((epoch + progress) / epochs) if callable(lr) else lr

        gradient = team.timed(_Gradient(model, params, rule, batches, loss, leases, rate))
        while (result := learner.step(gradient)) is not None:
            leases.complete(result)
        learner.drain()
        params.check()
        leases.record().audit(frames)
        losses.append(leases.totals().mean_loss)
    params.w.copy_(learner.consensus())
    return losses


def _size(batch: object) -> int:
    part = batch[0] if isinstance(batch, tuple | list) else batch
    return len(part)  # type: ignore[arg-type]


class _Gradient:
    """The gradient closure of one epoch: each call leases a batch and fills `params.g`."""

    def __init__(
        self, model: nn.Module, params: FlatParams, optimizer: Optimizer, batches: Sequence[Batch],
        loss: Callable[[nn.Module, Batch], tuple[Tensor, int]], leases: Leases, rate: Callable[[float], float],
    ) -> None:  # fmt: skip
        self._model, self._params, self._optimizer = model, params, optimizer
        self._batches, self._loss, self._leases, self._rate = batches, loss, leases, rate

    def __call__(self, on_bucket: BucketHook | None) -> StepResult | None:
        lease = self._leases.lease()
        if lease is None:
            return None
        lr = self._optimizer.lr = self._rate(lease.progress)
        self._params.g.zero_()
        nothing = torch.zeros(())
        if lease.batch is None:  # an idle turn: a gradient of zero, so that all learners take part in the step
            self._params.notify_all_buckets(on_bucket)
            return StepResult(lease, 0, 0, lr, nothing, nothing)
        loss_sum, examples = self._loss(self._model, self._batches[lease.batch])
        with self._params.notify_buckets(on_bucket):
            (loss_sum / lease.loss_denominator).backward()
        return StepResult(lease, examples, examples, lr, loss_sum.detach(), nothing)
