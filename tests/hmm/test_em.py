"""EM on synthetic mixtures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.hmm.em import Accumulators, UpdateOptions, accumulate, mix_up, update
from asr_am.hmm.gmm import DiagGmms, single_gaussians
from tests.support.gmm_cases import random_gmms
from tests.support.synthetic_speech import store

TRUE_MEANS = np.array([[-4.0, 0.0], [4.0, 1.0], [0.0, 5.0]])
FREE = UpdateOptions(min_occupancy=0.0, variance_floor=1e-4)


def sample_frames(frames: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    """Samples frames of pdf 0 (the Gaussians of TRUE_MEANS), pdf 1 (one Gaussian at (10, -10)) and no pdf (-1)."""
    rng = np.random.default_rng(0)
    pdf_N = rng.choice([-1, 0, 1], frames, p=[0.05, 0.75, 0.2])
    means_ND = np.where((pdf_N == 1)[:, None], [10.0, -10.0], TRUE_MEANS[rng.integers(0, 3, frames)])
    return (means_ND + rng.normal(size=(frames, 2))).astype(np.float32), pdf_N


def test_likelihood_rises_and_means_are_recovered(tmp_path: Path) -> None:
    x_ND, pdf_N = sample_frames()
    frames = store(tmp_path / "frames", {"a": x_ND})
    gmms = single_gaussians(np.zeros((2, 2)), np.ones((2, 2)))
    var_D = x_ND.var(axis=0)
    occ_P = np.bincount(pdf_N[pdf_N >= 0])
    rng = np.random.default_rng(0)
    for target in (2, 3, 4):
        gmms = mix_up(gmms, occ_P, target, rng, power=2.0)
        history = []
        for _ in range(60):
            acc = accumulate(gmms, frames, pdf_N, 1, "EM")
            history.append(acc.loglik_per_frame)
            gmms = update(gmms, acc, FREE, var_D)
        assert acc.frames == (pdf_N >= 0).sum()
        assert np.diff(history).min() > -1e-5 and history[-1] > history[0] + 0.01
    assert gmms.offsets_P1.tolist() == [0, 3, 4]
    order = np.argsort(gmms.means_GD[:3, 0])
    np.testing.assert_allclose(gmms.means_GD[:3][order], TRUE_MEANS[np.argsort(TRUE_MEANS[:, 0])], atol=0.15)
    np.testing.assert_allclose(gmms.vars_GD, 1.0, atol=0.15)
    np.testing.assert_allclose(gmms.weights_G, [1 / 3, 1 / 3, 1 / 3, 1], atol=0.05)


def test_statistics_equal_a_plain_loop_for_any_number_of_workers(tmp_path: Path) -> None:
    gmms = random_gmms()
    rng = np.random.default_rng(2)
    x_ND = rng.normal(0, 2, (300, gmms.dim)).astype(np.float32)
    pdf_N = rng.integers(-1, gmms.num_pdfs, 300)
    frames = store(tmp_path / "frames", {"a": x_ND[:100], "b": x_ND[100:]})
    occ_G, sums_G2D, loglik = np.zeros(gmms.num_gaussians), np.zeros((gmms.num_gaussians, 2 * gmms.dim)), 0.0
    for x_D, pdf in zip(x_ND.astype(np.float64), pdf_N, strict=True):
        if pdf < 0:
            continue
        rows = slice(*gmms.offsets_P1[pdf : pdf + 2])
        squared = (x_D - gmms.means_GD[rows]) ** 2 / gmms.vars_GD[rows] + np.log(2 * np.pi * gmms.vars_GD[rows])
        density = gmms.weights_G[rows] * np.exp(-0.5 * squared.sum(axis=1))
        occ_G[rows] += density / density.sum()
        sums_G2D[rows] += np.outer(density / density.sum(), np.concatenate([x_D, x_D**2]))
        loglik += np.log(density.sum())
    one, two = (accumulate(gmms, frames, pdf_N, jobs, "EM") for jobs in (1, 2))
    for acc in (one, two):
        np.testing.assert_allclose(acc.occ_G, occ_G, atol=1e-3)
        np.testing.assert_allclose(acc.sums_G2D, sums_G2D, atol=2e-2)
        assert acc.loglik == pytest.approx(loglik, rel=1e-5)
    np.testing.assert_array_equal(one.occ_G, two.occ_G)
    np.testing.assert_array_equal(one.sums_G2D, two.sums_G2D)


def test_rare_gaussians_are_removed_but_every_pdf_keeps_one() -> None:
    gmms = random_gmms()  # pdfs of 3, 1, 7 and 2 Gaussians
    occ_G = np.array([50, 2, 30, 4, *[0.0] * 7, 20, 9.0])
    sums = np.concatenate([occ_G[:, None] * np.ones(6), occ_G[:, None] * np.full(6, 3.0)], axis=1)
    updated = update(gmms, Accumulators(occ_G, sums, 0.0, 115), UpdateOptions(10.0, 0.01), np.ones(6))
    assert np.diff(updated.offsets_P1).tolist() == [2, 1, 1, 1]
    np.testing.assert_allclose(updated.weights_G[:2], [50 / 80, 30 / 80], rtol=1e-5)
    np.testing.assert_allclose(updated.means_GD[[0, 1, 2, 4]], 1.0)
    np.testing.assert_allclose(updated.vars_GD[[0, 1, 2, 4]], 2.0, rtol=1e-5)
    assert any((updated.means_GD[3] == gmms.means_GD[row]).all() for row in range(4, 11)), "unchanged without frames"


def test_variances_are_floored() -> None:
    gmms = single_gaussians(np.zeros((1, 2)), np.ones((1, 2)))
    acc = Accumulators(np.array([100.0]), np.array([[100.0, 200.0, 100.0, 500.0]]), 0.0, 100)  # variances 0 and 1
    updated = update(gmms, acc, UpdateOptions(10.0, 0.01), np.array([4.0, 4.0]))
    np.testing.assert_allclose(updated.vars_GD, [[0.04, 1.0]], rtol=1e-6)


def test_splitting_follows_occupancy_and_keeps_the_density() -> None:
    gmms = single_gaussians(np.zeros((4, 3)), np.ones((4, 3)))
    occ_P = np.array([160_000, 10_000, 10_000, 30])
    more = mix_up(gmms, occ_P, 36, np.random.default_rng(0))
    sizes = np.diff(more.offsets_P1)
    assert sizes[3] == 1, "30 frames allow one Gaussian"
    assert sizes[0] == pytest.approx(2 * sizes[1], abs=2) and abs(sizes[1] - sizes[2]) <= 1
    assert sizes.sum() <= 36
    np.testing.assert_allclose(np.add.reduceat(more.weights_G, more.offsets_P1[:-1]), 1.0, rtol=1e-5)
    x_TD = torch.randn(20, 3)
    torch.testing.assert_close(more.log_likelihoods(x_TD), gmms.log_likelihoods(x_TD), atol=0.2, rtol=0)
    again = mix_up(more, occ_P, 10, np.random.default_rng(0))
    assert np.diff(again.offsets_P1).tolist() == sizes.tolist(), "splitting removes no Gaussian"


def test_pdfs_without_frames_are_kept(tmp_path: Path) -> None:
    gmms = random_gmms()
    frames = store(tmp_path / "frames", {"a": np.zeros((40, gmms.dim), np.float32)})
    acc = accumulate(gmms, frames, np.full(40, 1), 1, "EM")
    updated: DiagGmms = update(gmms, acc, UpdateOptions(), np.ones(gmms.dim))
    assert updated.num_pdfs == gmms.num_pdfs
    assert mix_up(updated, np.array([0, 40, 0, 0]), 20, np.random.default_rng(0)).num_pdfs == gmms.num_pdfs
