"""Sums in place of means over learners as options of `strategy=parallax`, compared with one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asr_am import parallax
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.strategy import LossFn
from asr_am.distributed.team import Team
from asr_am.stages.sections import values
from asr_am.stages.train_config import strategy_factory
from asr_am.train.run_setup import StrategyFactory
from tests.support.configurations import config
from tests.support.toy_lm import assert_close, make_batches, make_model, on_cluster, reference, rounds_of, summed_loss

STEPS, LEARNERS = 13, 4
CASES = [(True, False, 0.3), (False, True, 0.3), (False, False, 0.0)]  # average_dense, average_sparse, clip_norm


def train(
    team: Team, make: Callable[[], nn.Module], loss: LossFn, batches: Sequence[Any], words: Sequence[float],
    clip_norm: float, make_strategy: StrategyFactory,
) -> dict[str, Tensor]:  # fmt: skip
    """Trains as one learner, and returns the weights by name.

    Args:
        team: this learner's end of the team.
        make: makes the model.
        loss: its loss.
        batches: batches of all learners.
        words: examples of all learners, for each step.
        clip_norm: limit of the gradient's norm, 0 for none.
        make_strategy: makes the strategy.
    """
    params = FlatParams(model := make())
    shapes = {name: p.shape for name, p in model.named_parameters()}
    optimizer = Optimizer(params, OptimizerOptions(momentum=0.9, clip_norm=clip_norm))
    strategy = make_strategy(params, optimizer, team)
    own = list(parallax.shard(batches, team))
    strategy.attach(model, loss, lambda: own[0])
    for batch, in_round in zip(own, words, strict=True):

        def gradient(on_bucket: BucketHook | None, batch: Any = batch, in_round: float = in_round) -> StepResult:
            denominator, zero = in_round / team.size, torch.zeros(())
            strategy.params.g.zero_()
            optimizer.lr = 0.05
            if batch is None:
                strategy.params.notify_all_buckets(on_bucket)
            else:
                with strategy.params.notify_buckets(on_bucket):
                    (loss(model, batch)[0] / denominator).backward()
            return StepResult(Lease(None, 0, 0, denominator), in_round, 0, 0.05, zero, zero)

        strategy.step(gradient)
    strategy.drain()
    parts = strategy.consensus().split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape).clone() for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def configured(dense: bool, sparse: bool, *options: str) -> StrategyFactory:
    sums = f"strategy.average_dense={dense}", f"strategy.average_sparse={sparse}"
    return strategy_factory(values(config("strategy=parallax", *sums, *options).strategy))


@pytest.mark.parametrize("path", ["servers", "all-gather", "all-reduce"])
def test_gradients_are_summed_as_on_one_device(path: str) -> None:
    batches = make_batches(LEARNERS * STEPS - 2)
    rounds = rounds_of(batches)
    words = [float(sum(len(batch.inputs) for batch in one)) for one in rounds]
    for dense, sparse, clip_norm in CASES:
        mean = reference("momentum", rounds, clip_norm)[-1]
        expected = reference(
            "momentum", rounds, clip_norm, dense_factor=1.0 if dense else LEARNERS,
            sparse_factor=1.0 if sparse else LEARNERS,
        )[-1]  # fmt: skip
        make_strategy = configured(dense, sparse, f"strategy.path={path}")

        learner = partial(
            train, make=make_model, loss=summed_loss, batches=batches, words=words, clip_norm=clip_norm,
            make_strategy=make_strategy,
        )  # fmt: skip
        for found in on_cluster(learner, LEARNERS).values():
            assert_close(found, expected)
            with pytest.raises(AssertionError):
                assert_close(found, mean)


def dense_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def dense_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return model(batch).square().sum(), float(len(batch))


def test_gradients_of_a_model_without_sparse_parameters_are_summed_too() -> None:
    torch.manual_seed(1)
    data = torch.randn(LEARNERS * STEPS, 6, 3)
    words, make_strategy = [6.0 * LEARNERS] * STEPS, configured(False, True)

    def learner(team: Team) -> dict[str, Tensor]:
        return train(team, dense_model, dense_loss, data, words, 0.0, make_strategy)

    model = dense_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in data.view(STEPS, LEARNERS * 6, 3):
        optimizer.zero_grad()
        (dense_loss(model, batch)[0] / 6).backward()  # the sum of the learners' means
        optimizer.step()
    for found in on_cluster(learner, LEARNERS).values():
        assert_close(found, dict(model.state_dict()))
