"""The threshold codec against loops over single elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from asr_am.distributed.strategies import threshold_codec as threshold
from asr_am.distributed.strategies.threshold_codec import decode, encode, round_to_exact

TAU = 0.75


def rows(count: int, length: int) -> Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(3))


def slow_encode(residual: Tensor, tau: float) -> list[int]:
    """Returns the words, element by element, and subtracts what is sent from `residual`."""
    words = []
    for index, value in enumerate(residual.tolist()):
        if abs(value) > np.float32(tau):
            words.append(index | (1 << 31 if value < 0 else 0))
            residual[index] -= math.copysign(tau, value)
    return words


@pytest.fixture(params=["compiled", "whole tensors"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects one of the two implementations of encoding."""
    if request.param == "whole tensors":
        encode_tensors = threshold._encode_tensors
        monkeypatch.setattr(
            threshold, "encode", lambda r, tau, g=None, to=None: encode_tensors(r, tau, g, r if to is None else to)
        )


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("length", [1, threshold.BLOCK, 1000])
def test_words_and_residual_equal_those_of_a_loop(length: int) -> None:
    residual = torch.zeros(length)
    slow = torch.zeros(length)
    for gradient in rows(20, length):
        slow += gradient
        g = gradient.clone()
        words = threshold.encode(residual, TAU, g)
        assert words.dtype == torch.int32 and [word & 0xFFFFFFFF for word in words.tolist()] == slow_encode(slow, TAU)
        assert torch.equal(residual, slow) and not g.any()


@pytest.mark.usefixtures("path")
def test_the_new_residual_may_go_elsewhere() -> None:
    before, gradient = rows(2, 1000)
    residual, remains = before.clone(), torch.empty(1000)
    words = threshold.encode(residual, TAU, gradient.clone(), remains)
    assert torch.equal(residual, before)
    in_place = before.clone()
    assert torch.equal(threshold.encode(in_place, TAU, gradient.clone()), words) and torch.equal(in_place, remains)


@pytest.mark.usefixtures("path")
def test_elements_at_the_threshold_and_nan_are_not_sent() -> None:
    residual = torch.tensor([TAU, -TAU, math.nextafter(TAU, 1) + 1e-6, 0.0, -0.0, math.nan, -9.0])
    assert [word & 0xFFFFFFFF for word in threshold.encode(residual, TAU).tolist()] == [2, 6 | 1 << 31]
    assert residual[6] == -9.0 + TAU and residual[5].isnan()
    assert len(threshold.encode(torch.zeros(0), TAU)) == len(threshold.encode(torch.zeros(5), TAU)) == 0


def test_decoding_adds_each_sign_at_its_index() -> None:
    length, unit = 1000, round_to_exact(0.1, 7)
    messages = [encode(row.clone(), TAU) for row in rows(7, length)]
    fast, other = torch.zeros(length), torch.zeros(length)
    slow = [0] * length
    for words in messages:
        decode(words, fast, unit)
        for word in words.tolist():
            slow[word & 0x7FFFFFFF] += -1 if word < 0 else 1
    for words in reversed(messages):
        decode(words, other, unit)
    assert fast.tolist() == [count * unit for count in slow] and max(map(abs, slow)) > 2
    assert torch.equal(fast, other)


def test_an_index_beyond_the_bucket_is_rejected() -> None:
    with pytest.raises(IndexError):
        decode(torch.tensor([5, 10], dtype=torch.int32), torch.zeros(10), 1.0)


@pytest.mark.parametrize("most", [1, 4, 7, 128, 1000])
def test_sums_of_an_exact_unit_are_exact(most: int) -> None:
    for value in (0.1, 8.0, 3.3e-7, 1e20):
        unit = round_to_exact(value, most)
        assert unit == pytest.approx(value, rel=most * 2**-23)
        total = torch.tensor(unit).repeat(most).cumsum(0)
        assert total.tolist() == [unit * (k + 1) for k in range(most)]


def test_the_largest_index_fits() -> None:
    words = torch.tensor([0, 0x7FFFFFFF, -0x80000000, -1], dtype=torch.int32)
    assert (words & threshold.INDEX).tolist() == [0, 2**31 - 1, 0, 2**31 - 1]
    assert [bool(word & threshold.SIGN) for word in words.tolist()] == [False, False, True, True]
    assert threshold.MAX_ELEMENTS == 2**31
