from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asr_am.distributed.flat_params import FlatParams
from asr_am.errors import InputError


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LSTM(3, 2))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(4, 5))[0].square().sum()


def test_values_survive_and_views_write_through(model: nn.Module) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    params = FlatParams(model)
    assert len(params) == sum(p.numel() for p in before)
    assert torch.equal(params.w, torch.cat([p.reshape(-1) for p in before]))
    params.w.mul_(2)
    for now, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, 2 * was)


@pytest.mark.parametrize(("mebibytes", "buckets"), [(4, 4), (25, 1)])
def test_buckets_have_the_size_that_suits_the_device(mebibytes: int, buckets: int) -> None:
    params = FlatParams(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))))
    assert params.bucket_bytes == 4 << 20, "on a CPU"
    params.bucket_bytes = mebibytes << 20
    found: list[tuple[int, int]] = []
    params.notify_all_buckets(lambda begin, end: found.append((begin, end)))
    assert len(found) == buckets and found[0][1] == len(params) and found[-1][0] == 0


def test_backward_fills_the_flat_gradient(model: nn.Module) -> None:
    expected = torch.autograd.grad(loss_of(model), list(model.parameters()))
    params = FlatParams(model)
    for repeat in (1, 2):  # accumulates until zeroed, in place
        loss_of(model).backward()
        params.check()
        torch.testing.assert_close(params.g, repeat * torch.cat([g.reshape(-1) for g in expected]))


def test_a_replaced_parameter_is_detected(model: nn.Module) -> None:
    params = FlatParams(model)
    params.check()
    model.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="gradient"):
        params.check()
    params = FlatParams(model)
    first = next(model.parameters())
    first.data = first.data.clone()
    with pytest.raises(RuntimeError, match="weights"):
        params.check()
    params = FlatParams(model)
    model.to(torch.float64)
    with pytest.raises(RuntimeError):
        params.check()


@pytest.mark.parametrize("bucket_bytes", [1, 40, 10**6])
def test_buckets_are_reported_when_ready_and_cover_everything_once(model: nn.Module, bucket_bytes: int) -> None:
    params = FlatParams(model)
    loss_of(model).backward()
    final = params.g.clone()
    for _ in range(2):
        params.g.zero_()
        reported: list[tuple[int, int]] = []

        def on_bucket(begin: int, end: int, reported: list[tuple[int, int]] = reported) -> None:
            assert torch.equal(params.g[begin:end], final[begin:end])
            reported.append((begin, end))

        with params.notify_buckets(on_bucket, bucket_bytes):
            loss_of(model).backward()
        covered = sorted(reported)
        assert covered[0][0] == 0 and covered[-1][1] == len(params)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
        assert len(reported) == (1 if bucket_bytes == 10**6 else len(set(reported)))
    assert bucket_bytes > 1 or len(reported) == len(list(model.parameters()))
    loss_of(model).backward()  # no hook remains
    assert len(reported) == len(covered)


class Unordered(nn.Module):
    """Registers its layers in another order than it uses them, and leaves one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.unused, self.first = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def test_buckets_come_in_one_order_whatever_the_backward_pass_does() -> None:
    model = Unordered()
    params = FlatParams(model)
    idle: list[tuple[int, int]] = []
    params.notify_all_buckets(lambda *bucket: idle.append(bucket), bucket_bytes=1)
    reported: list[tuple[int, int]] = []

    def on_bucket(begin: int, end: int) -> None:
        reported.append((begin, end))
        if begin >= params.ends[3]:  # of `first`, the only ones that can be ready before the end
            assert params.g[begin:end].any()

    with params.notify_buckets(on_bucket, bucket_bytes=1):
        model(torch.ones(5)).square().sum().backward()
    assert reported == idle and len(reported) == 6

    with pytest.raises(ZeroDivisionError), params.notify_buckets(on_bucket, bucket_bytes=1):
        1 / 0  # noqa: B018
    assert len(reported) == 6, "a backward pass that failed reports no bucket"


def test_a_gradient_that_comes_in_several_parts_is_refused() -> None:
    """A bucket would be sent before the gradient is complete."""
    layer = nn.Linear(3, 3)
    params = FlatParams(layer)

    def twice(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        return x

    x = torch.ones(3, requires_grad=True)
    with (
        pytest.raises(InputError, match=r"set use_reentrant=False, or strategy\.overlap=false$"),
        params.notify_buckets(lambda begin, end: None, bucket_bytes=1),
    ):
        twice(x).sum().backward()
    with params.notify_buckets(None):
        twice(x).sum().backward()


def test_mixed_dtypes_are_rejected() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        FlatParams(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
