"""MLLT on frames whose Gaussians are diagonal in another basis: the basis is recovered, and the likelihood rises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.hmm.em import accumulate
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms, single_gaussians
from asr_am.hmm.lda_mllt import MlltStats, accumulate_mllt, estimate_mllt, transform_means
from tests.support.gmm_cases import random_gmms
from tests.support.synthetic_speech import store

D, PDFS = 5, 7


def sample_mixed_frames(folder: Path, frames: int = 20_000) -> tuple[FrameStore, np.ndarray, DiagGmms, np.ndarray]:
    """Returns frames that are diagonal after `unmix`, their pdfs, the maximum-likelihood Gaussians, and `unmix`."""
    rng = np.random.default_rng(0)
    unmix = rng.normal(size=(D, D)) + 2 * np.eye(D)
    pdf_N = rng.integers(-1, PDFS, frames)
    deviations = rng.uniform(0.3, 3, (PDFS, D))
    y_ND = rng.normal(0, 4, (PDFS, D))[pdf_N] + deviations[pdf_N] * rng.normal(size=(frames, D))
    x_ND = (y_ND @ np.linalg.inv(unmix).T).astype(np.float32)
    frames_P = [x_ND[pdf_N == pdf] for pdf in range(PDFS)]
    gmms = single_gaussians(np.stack([x.mean(axis=0) for x in frames_P]), np.stack([x.var(axis=0) for x in frames_P]))
    return store(folder / "frames", {"a": x_ND[:700], "b": x_ND[700:]}), pdf_N, gmms, unmix


def mean_log_likelihood(gmms: DiagGmms, x_ND: np.ndarray, pdf_N: np.ndarray) -> float:
    ll_NP = gmms.log_likelihoods(torch.from_numpy(np.array(x_ND, dtype=np.float32))).numpy()
    return float(ll_NP[np.arange(len(pdf_N)), pdf_N][pdf_N >= 0].mean())


def stats_of(frames: FrameStore, pdf_N: np.ndarray, gmms: DiagGmms, jobs: int = 1) -> MlltStats:
    acc = accumulate(gmms, frames, pdf_N, jobs, "EM")
    return accumulate_mllt(gmms, frames, pdf_N, acc, jobs, "MLLT")


def test_likelihood_rises_by_the_gain_of_the_objective(tmp_path: Path) -> None:
    frames, pdf_N, gmms, _ = sample_mixed_frames(tmp_path)
    before = mean_log_likelihood(gmms, frames.x_ND, pdf_N)
    transform, history = estimate_mllt(stats_of(frames, pdf_N, gmms))
    assert np.diff(history).min() > -1e-9 and history[-1] > history[0] + 0.1
    assert history[-1] - history[-2] < 1e-6, "converged"
    after = mean_log_likelihood(transform_means(gmms, transform), frames.x_ND @ transform.T, pdf_N)
    after += np.linalg.slogdet(transform).logabsdet
    assert after - before == pytest.approx(history[-1] - history[0], abs=1e-3)


def test_the_basis_is_recovered(tmp_path: Path) -> None:
    """Alternating updates of MLLT and variances, as in training, undo the mixing up to order and scale."""
    frames, pdf_N, gmms, unmix = sample_mixed_frames(tmp_path)
    total = np.eye(D)
    x_ND = frames.x_ND
    for number in range(8):
        transform, _ = estimate_mllt(stats_of(frames, pdf_N, gmms))
        total = transform @ total
        x_ND = (frames.x_ND @ transform.T).astype(np.float32)
        frames = store(tmp_path / f"frames{number}", {"a": x_ND[:700], "b": x_ND[700:]})
        variances = np.stack([x_ND[pdf_N == pdf].var(axis=0) for pdf in range(PDFS)])
        gmms = single_gaussians(transform_means(gmms, transform).means_GD, variances)
    found = np.abs(total @ np.linalg.inv(unmix))
    found /= found.max(axis=1, keepdims=True)
    assert sorted(found.argmax(axis=1).tolist()) == list(range(D))
    assert np.sort(found, axis=1)[:, :-1].max() < 0.05


@pytest.mark.parametrize("jobs", [1, 2])
def test_statistics_equal_a_plain_loop(tmp_path: Path, jobs: int) -> None:
    gmms = random_gmms(dim=4)
    rng = np.random.default_rng(5)
    x_ND = rng.normal(0, 2, (400, gmms.dim)).astype(np.float32)
    pdf_N = rng.integers(-1, gmms.num_pdfs, 400)
    stats = stats_of(store(tmp_path / "frames", {"a": x_ND}), pdf_N, gmms, jobs)
    expected = np.zeros((gmms.dim, gmms.dim, gmms.dim))
    for x_D, pdf in zip(x_ND.astype(np.float64), pdf_N, strict=True):
        if pdf < 0:
            continue
        rows = slice(*gmms.offsets_P1[pdf : pdf + 2])
        away, var = x_D - gmms.means_GD[rows], gmms.vars_GD[rows].astype(np.float64)
        density = gmms.weights_G[rows] * np.exp(-0.5 * (away**2 / var + np.log(var)).sum(axis=1))
        posterior = density / density.sum()
        expected += np.einsum("k,kd,ke,kf->def", posterior, 1 / var, away, away)
    assert stats.count == pytest.approx((pdf_N >= 0).sum())
    np.testing.assert_allclose(stats.quadratic_DDD.numpy(), expected, rtol=1e-3, atol=1e-2)


def test_updates_without_cofactors_lower_the_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation test: the tests above detect an update that ignores the determinant."""
    frames, pdf_N, gmms, _ = sample_mixed_frames(tmp_path, 4000)
    stats = stats_of(frames, pdf_N, gmms)
    invert = torch.linalg.inv
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "inv", lambda x: invert(x) if x.ndim == 3 else torch.ones_like(x))
        _, history = estimate_mllt(stats, 2)
    assert min(history[1:]) < history[0]
