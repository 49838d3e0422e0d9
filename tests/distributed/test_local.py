from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.team import SingleProcess
from asr_am.errors import InputError

STEPS = 100


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return (model(x) - x[:, :2].sin()).square().mean()


class Gradients:
    """Gradient closure over `STEPS` batches of a toy problem."""

    def __init__(self, model: nn.Module, params: FlatParams, optimizer: Optimizer, start: int = 0) -> None:
        self.model, self.params, self.optimizer, self.step = model, params, optimizer, start

    def __call__(self, on_bucket: BucketHook | None) -> StepResult | None:
        if self.step == STEPS:
            return None
        self.optimizer.lr = 0.1 / (1 + self.step / 50)
        self.params.g.zero_()
        loss = loss_of(self.model, self.step)
        with self.params.notify_buckets(on_bucket):
            loss.backward()
        lease = Lease(self.step, self.step / STEPS, self.step, 1.0)
        self.step += 1
        return StepResult(lease, 8, 8, self.optimizer.lr, loss.detach(), torch.zeros(()))


def make_local(options: OptimizerOptions) -> tuple[nn.Module, Local]:
    model = make_model()
    params = FlatParams(model)
    return model, Local(params, Optimizer(params, options), SingleProcess())


def torch_optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return torch.optim.SGD(parameters, momentum=0.9, nesterov=kind == "nesterov", weight_decay=0.01)


def test_momentum_may_be_an_integer() -> None:
    """Accepts an integer, as the command line gives with train.optimizer.momentum=0."""
    model, local = make_local(OptimizerOptions("adam", 0))
    local.step(Gradients(model, local.params, local.optimizer))
    reference, exact = make_local(OptimizerOptions("adam", 0.0))
    exact.step(Gradients(reference, exact.params, exact.optimizer))
    assert torch.equal(local.consensus(), exact.consensus())


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adam"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_local_is_torch(kind: str, clip_norm: float) -> None:
    model, local = make_local(OptimizerOptions(kind, 0.9, 0.01, clip_norm))  # type: ignore[arg-type]
    gradient = Gradients(model, local.params, local.optimizer)
    while local.step(gradient) is not None:
        pass
    reference = make_model()
    optimizer = torch_optimizer(kind, list(reference.parameters()))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step / 50)
        optimizer.zero_grad()
        loss_of(reference, step).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    # The norm is summed in another order, and fused Adam rounds differently where a parameter ends.
    if clip_norm or kind == "adam":
        torch.testing.assert_close(local.consensus(), flat, rtol=1e-4, atol=1e-6)
    else:
        assert torch.equal(local.consensus(), flat)
    assert local.staleness == {0: STEPS}
    local.params.check()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_saved_state_continues_with_the_same_bits(kind: str) -> None:
    model, local = make_local(OptimizerOptions(kind))  # type: ignore[arg-type]
    gradient = Gradients(model, local.params, local.optimizer)
    state = None
    while local.step(gradient) is not None:
        if gradient.step == 40:
            state = copy.deepcopy(local.state_dict())
    assert state is not None
    other_model, other = make_local(OptimizerOptions(kind))  # type: ignore[arg-type]
    other.load_state_dict(state)
    other.load_counts([state])
    gradient = Gradients(other_model, other.params, other.optimizer, start=40)
    while other.step(gradient) is not None:
        pass
    assert torch.equal(other.consensus(), local.consensus())
    assert other.staleness == local.staleness


def test_more_than_one_learner_is_rejected() -> None:
    class Two(SingleProcess):
        size = 2

    params = FlatParams(make_model())
    with pytest.raises(InputError, match="is for one learner, not 2: use strategy=sync"):
        Local(params, Optimizer(params, OptimizerOptions()), Two())


def test_an_unknown_optimizer_is_rejected() -> None:
    with pytest.raises(ValueError, match="sgd, nesterov, adam or adagrad"):
        make_local(OptimizerOptions("rprop"))  # type: ignore[arg-type]
