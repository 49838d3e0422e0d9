from __future__ import annotations

import numpy as np
import pytest
import torch

from asr_am.errors import InputError
from asr_am.features.ivector.statistics import StatisticsTotals, second_order, segment_statistics
from asr_am.features.ivector.ubm import VARIANCE_FLOOR, DiagUbm, train_ubm
from tests.support.ivector_reference import posteriors

WEIGHTS = np.array([0.5, 0.3, 0.2])
MEANS = np.array([[-4.0, 0.0], [3.0, 3.0], [3.0, -4.0]])
DEVIATIONS = np.array([[1.0, 0.5], [0.7, 1.5], [1.2, 1.0]])


def frames(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    of = rng.choice(3, count, p=WEIGHTS)
    return (MEANS[of] + DEVIATIONS[of] * rng.standard_normal((count, 2))).astype(np.float32)


def test_a_known_mixture_is_recovered_and_likelihood_never_falls() -> None:
    ubm, likelihoods = train_ubm(torch.from_numpy(frames(10_000, 1)), 3, 15)
    assert len(likelihoods) == 15 and (np.diff(likelihoods) > -1e-5).all() and likelihoods[-1] > likelihoods[0] + 1e-3
    order = np.argsort(-ubm.weights_G.numpy())
    np.testing.assert_allclose(ubm.weights_G.numpy()[order], WEIGHTS, atol=0.02)
    np.testing.assert_allclose(ubm.means_GD.numpy()[order], MEANS, atol=0.1)
    np.testing.assert_allclose(ubm.vars_GD.sqrt().numpy()[order], DEVIATIONS, atol=0.1)


def test_likelihood_is_of_the_mixture_and_rises_for_overlapping_gaussians() -> None:
    x_ND = torch.from_numpy(np.random.default_rng(2).laplace(size=(3000, 4)).astype(np.float32))
    ubm, likelihoods = train_ubm(x_ND, 11, 30)
    assert ubm.num_gaussians == 11
    assert (np.diff(likelihoods) > -1e-5).all()
    one, first = train_ubm(x_ND, 1, 1)
    expected = torch.distributions.Normal(x_ND.double().mean(dim=0), x_ND.double().std(dim=0, correction=0))
    assert first[0] == pytest.approx(float(expected.log_prob(x_ND.double()).sum(dim=1).mean()), abs=1e-5)
    assert likelihoods[-1] > first[0] + 0.1 and one.num_gaussians == 1


def test_gaussians_without_frames_stay_finite_and_variances_above_the_floor() -> None:
    rng = np.random.default_rng(3)
    centres = np.repeat([[0.0, 0.0], [1.0, 5.0]], 60, axis=0)
    x_ND = torch.from_numpy((centres + 1e-4 * rng.standard_normal(centres.shape)).astype(np.float32))
    ubm, _ = train_ubm(x_ND, 8, 10)
    assert all(torch.isfinite(t).all() for t in (ubm.weights_G, ubm.means_GD, ubm.vars_GD))
    assert float(ubm.weights_G.sum()) == pytest.approx(1) and float(ubm.weights_G.min()) > 0
    floor_D = VARIANCE_FLOOR * x_ND.double().var(dim=0, correction=0)
    assert (ubm.vars_GD >= floor_D * (1 - 1e-9)).all()


def test_a_constant_feature_is_rejected() -> None:
    x_ND = torch.from_numpy(frames(100, 1))
    x_ND[:, 1] = 3.0
    with pytest.raises(InputError, match="constant or not finite"):
        train_ubm(x_ND, 2, 3)


def test_statistics_are_sums_over_segments() -> None:
    ubm = DiagUbm(*(torch.from_numpy(a) for a in (WEIGHTS, MEANS / 3, DEVIATIONS**2)))
    x_TD = frames(50, 4) / 3
    found = segment_statistics(ubm, torch.from_numpy(x_TD), 20, 0.1)
    expected_TG = 0.1 * posteriors(ubm, x_TD.astype(np.float64))
    for k, rows in enumerate((slice(0, 20), slice(20, 40), slice(40, 50))):
        np.testing.assert_allclose(found.counts_KG[k].numpy(), expected_TG[rows].sum(axis=0), rtol=1e-4)
        np.testing.assert_allclose(found.first_KGD[k].numpy(), expected_TG[rows].T @ x_TD[rows], rtol=1e-4, atol=1e-5)
    second = second_order(ubm, [torch.from_numpy(x_TD)], 0.1).numpy()
    np.testing.assert_allclose(second, np.einsum("tg,td,te->gde", expected_TG, x_TD, x_TD), rtol=1e-4, atol=1e-5)


def test_full_covariances_are_of_the_frames_of_each_gaussian() -> None:
    rng = np.random.default_rng(5)
    parts = [rng.standard_normal((400, 3)) @ rng.standard_normal((3, 3)) + 3 * g for g in range(2)]
    count = torch.tensor([400.0, 400.0, 0.0], dtype=torch.float64)
    first = torch.tensor(np.stack([*(x.sum(axis=0) for x in parts), np.zeros(3)]))
    second = torch.tensor(np.stack([*(x.T @ x for x in parts), np.zeros((3, 3))]))
    means_GD, covariances_GDD = StatisticsTotals(count, first, second).moments()
    for g, x in enumerate(parts):
        np.testing.assert_allclose(means_GD[g], x.mean(axis=0))
        np.testing.assert_allclose(covariances_GDD[g], np.cov(x.T, bias=True))
    np.testing.assert_allclose(covariances_GDD[2], covariances_GDD[:2].mean(dim=0))
