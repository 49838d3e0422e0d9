"""Dropout beside torch's."""

from __future__ import annotations

import pytest
import torch

from asr_am.models.dropout import Dropout, dropout


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_and_mean_are_those_of_torch(share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y = dropout(torch.ones(333, 333, dtype=dtype), share, training=True)
    assert y.dtype == dtype and y.shape == (333, 333)
    assert (y == 0).float().mean().item() == pytest.approx(share, abs=0.006)  # it is rounded to 1/256
    assert y.float().mean().item() == pytest.approx(1.0, abs=0.02)
    assert y.unique().tolist() == pytest.approx([0, 1 / (1 - share)], rel=0.02)


def test_neighbours_are_dropped_independently() -> None:
    """Eight values have the bytes of one random number."""
    torch.manual_seed(0)
    dropped = (dropout(torch.ones(80_000), 0.3, training=True) == 0).float().view(-1, 8)
    covariance_88 = torch.cov(dropped.T)
    torch.testing.assert_close(covariance_88, 0.21 * torch.eye(8), atol=0.01, rtol=0)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_any_size(size: int) -> None:
    assert dropout(torch.ones(size), 0.5, training=True).shape == (size,)


def test_a_gradient_has_the_same_mask() -> None:
    x = torch.ones(100, requires_grad=True)
    y = dropout(x, 0.5, training=True)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad) and 0 < (x.grad == 0).sum() < 100


def test_the_generator_decides() -> None:
    layer, x = Dropout(0.2), torch.ones(1000)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)


@pytest.mark.parametrize("share", [0.0001, 0.9999])
def test_a_share_near_the_limits_is_neither_none_nor_all(share: float) -> None:
    torch.manual_seed(0)
    dropped = dropout(torch.ones(100_000), share, training=True) == 0
    assert 0 < dropped.sum() < 100_000


def test_nothing_is_dropped_outside_of_training_or_with_a_share_of_0() -> None:
    x = torch.ones(50)
    assert torch.equal(Dropout(0.5).eval()(x), x) and torch.equal(Dropout(0.0)(x), x)
