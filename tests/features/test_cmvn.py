from __future__ import annotations

import numpy as np
import pytest

from asr_am.features.cmvn_deltas import accumulate, normalise

PARTS = [np.random.default_rng(seed).normal(5, 3, (30 + seed, 4)).astype(np.float32) for seed in range(3)]


def test_statistics_have_kaldis_form() -> None:
    x = PARTS[0].astype(np.float64)
    stats = accumulate(PARTS[0])
    assert stats.dtype == np.float64 and stats.shape == (2, 5)
    np.testing.assert_allclose(stats[0], [*x.sum(axis=0), 30])
    np.testing.assert_allclose(stats[1], [*(x * x).sum(axis=0), 0])


@pytest.mark.parametrize("variance", [False, True])
def test_a_speaker_is_normalised_over_all_utterances(variance: bool) -> None:
    stats = sum(accumulate(part) for part in PARTS)
    normalised = np.concatenate([normalise(part, stats, variance=variance) for part in PARTS])
    joined = np.concatenate(PARTS)
    expected = joined - joined.mean(axis=0)
    np.testing.assert_allclose(normalised, expected / joined.std(axis=0) if variance else expected, atol=1e-5)
    assert normalised.dtype == np.float32


def test_a_constant_feature_stays_finite() -> None:
    x = np.full((10, 2), 7.0, np.float32)
    assert np.isfinite(normalise(x, accumulate(x), variance=True)).all()


def test_a_constant_feature_becomes_zero() -> None:
    """Its variance is that of rounding to float32, of either sign."""
    features_TD = np.full((300, 2000), 1.0, np.float32) * np.random.default_rng(1).uniform(1, 30, 2000).astype(
        np.float32
    )
    assert np.abs(normalise(features_TD, accumulate(features_TD), variance=True)).max() < 0.05
