from __future__ import annotations

import itertools
import math

import pytest

from asr_am.train.schedule import Schedule


def test_constant_then_anneal_as_in_the_paper() -> None:
    """Zhang et al., section 3.1: 0.1 for 10 epochs, then times 1/sqrt(2) in each epoch from the 11th to the 16th."""
    schedule = Schedule(base=0.1)
    rates = [schedule.rate(epoch, share, 0) for epoch in range(16) for share in (0.0, 0.999)]
    assert rates[:20] == [0.1] * 20
    assert rates[20::2] == pytest.approx([0.1 / math.sqrt(2) ** n for n in range(1, 7)])
    assert rates[20::2] == rates[21::2]
    assert rates[-1] == pytest.approx(0.0125)


def test_linear_warmup_for_a_batch_ten_times_larger() -> None:
    """The rate rises from 0.1 to 1 within 10 epochs, with every batch, and is annealed from the 11th epoch."""
    schedule = Schedule(base=0.1, batch_ratio=10, warmup_epochs=10)
    assert schedule.rate(0, 0.0, 0) == pytest.approx(0.1)
    assert schedule.rate(4, 0.5, 450) == pytest.approx(0.1 + 0.9 * 4.5 / 10)
    assert schedule.rate(9, 1.0, 999) == pytest.approx(1.0)
    assert schedule.rate(10, 0.0, 1000) == pytest.approx(1 / math.sqrt(2))
    assert schedule.rate(15, 0.3, 1530) == pytest.approx(1 / 8)
    rates = [schedule.rate(epoch, share / 10, 0) for epoch in range(10) for share in range(10)]
    assert all(b - a == pytest.approx(0.009) for a, b in itertools.pairwise(rates))


def test_warmup_over_batches() -> None:
    schedule = Schedule(base=0.2, warmup_batches=4, anneal_from=2, anneal=0.5)
    assert [schedule.rate(0, 0.0, batch) for batch in range(6)] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])
    assert schedule.rate(1, 0.0, 100) == pytest.approx(0.1)
