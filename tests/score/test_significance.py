"""Tests the bootstrap against closed forms and a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from asr_am.errors import InputError
from asr_am.score.significance import bootstrap_interval, paired_bootstrap


def test_interval_of_independent_errors_is_the_binomial_one() -> None:
    generator = np.random.default_rng(5)
    words = np.full(2000, 10)
    errors = generator.binomial(10, 0.1, size=2000)
    interval = bootstrap_interval(errors, words, seed=1)
    sigma = 100 * np.sqrt(0.1 * 0.9 / 20_000)
    assert interval.value == pytest.approx(100 * errors.sum() / words.sum())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * sigma, rel=0.1)
    assert interval.low < interval.value < interval.high


def test_the_seed_fixes_the_interval() -> None:
    errors, words = [0, 1, 2, 5], [5, 5, 5, 5]
    assert bootstrap_interval(errors, words, seed=3) == bootstrap_interval(errors, words, seed=3)
    assert bootstrap_interval(errors, words, seed=3, samples=50) != bootstrap_interval(
        errors, words, seed=4, samples=50
    )


def test_paired_bootstrap_is_what_a_loop_finds() -> None:
    errors_a, errors_b, words = [3, 0, 2, 4, 1], [2, 1, 1, 3, 1], [5, 4, 6, 7, 3]
    generator = np.random.default_rng(9)
    differences = []
    for _ in range(500):
        rows = generator.integers(5, size=5)
        total = sum(words[i] for i in rows)
        differences.append(100 * (sum(errors_b[i] for i in rows) - sum(errors_a[i] for i in rows)) / total)
    better = np.mean([(d < 0) + 0.5 * (d == 0) for d in differences])
    comparison = paired_bootstrap(errors_a, errors_b, words, seed=9, samples=500)
    assert comparison.probability_b_better == pytest.approx(better)
    assert comparison.difference.low == pytest.approx(np.quantile(differences, 0.025))
    assert comparison.difference.value == pytest.approx(100 * (8 - 10) / 25)


def test_pairing_sees_what_two_intervals_do_not() -> None:
    generator = np.random.default_rng(2)
    words = np.full(300, 10)
    errors_a = generator.integers(1, 9, size=300)
    errors_b = errors_a - (generator.random(300) < 0.1)
    comparison = paired_bootstrap(errors_a, errors_b, words, seed=0)
    assert comparison.significant and comparison.probability_b_better > 0.99
    assert bootstrap_interval(errors_a, words).low < bootstrap_interval(errors_b, words).value
    same = paired_bootstrap(errors_a, errors_a, words, seed=0)
    assert same.probability_b_better == 0.5 and not same.significant


def test_words_may_differ_where_alternations_do() -> None:
    comparison = paired_bootstrap([1, 1], [1, 1], [10, 10], seed=0, words_b=[20, 20])
    assert comparison.difference.value == pytest.approx(-5.0)


@pytest.mark.parametrize(("errors", "words"), [([], []), ([1], [1, 2]), ([0], [0]), ([-1, 0], [3, 3])])
def test_counts_that_give_no_rate_are_refused(errors: list[int], words: list[int]) -> None:
    with pytest.raises(InputError):
        bootstrap_interval(errors, words)
