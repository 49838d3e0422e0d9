"""fMLLR on features with a known transform: it is recovered, and the likelihood rises with every sweep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asr_am.features.adapted import apply
from asr_am.features.ivector.statistics import unpack
from asr_am.hmm import fmllr
from asr_am.hmm.expectations import Expectation, Occupation, add_weighted_outer, packed_size
from asr_am.hmm.fmllr import FmllrStats, estimate, estimate_offsets, identity, objective
from asr_am.hmm.gmm import DiagGmms
from tests.support.gmm_cases import D, model, random_gmms, random_transforms, sample_frames


def stats_of(gmms: DiagGmms, speakers: list[tuple[np.ndarray, np.ndarray]]) -> FmllrStats:
    expectation = Expectation(gmms)
    stats = FmllrStats.zeros(len(speakers), gmms.dim, torch.device("cpu"))
    for number, (x_ND, pdf_N) in enumerate(speakers):
        occupation = Occupation.of_alignment(pdf_N)
        x = expectation.tensor(x_ND)
        stats.add(number, occupation.frames, x, *expectation(x, occupation))
    return stats


def mean_log_likelihood(gmms: DiagGmms, x_ND: np.ndarray, pdf_N: np.ndarray, transform_DE: np.ndarray) -> float:
    y_ND = apply(transform_DE.astype(np.float32), x_ND)
    ll_NP = gmms.log_likelihoods(torch.from_numpy(y_ND)).numpy().astype(np.float64)
    return ll_NP[np.arange(len(pdf_N)), pdf_N].mean() + np.linalg.slogdet(transform_DE[:, :-1]).logabsdet


def test_transforms_are_recovered_and_every_sweep_improves() -> None:
    gmms, truth = model(), random_transforms(3)
    speakers = [sample_frames(gmms, transform, 6000, seed) for seed, transform in enumerate(truth)]
    stats = stats_of(gmms, speakers)
    found, history = estimate(stats, 30, identity(stats))
    np.testing.assert_allclose(found.numpy(), truth, atol=0.06)
    rises = torch.stack(history).diff(dim=0)
    assert rises.min() > -1e-9 and rises[0].min() > 0.1 and rises[-1].max() < 1e-4
    for speaker, (x_ND, pdf_N) in enumerate(speakers):
        before, after = (mean_log_likelihood(gmms, x_ND, pdf_N, w[speaker].numpy()) for w in (identity(stats), found))
        assert after - before == pytest.approx(float(history[-1][speaker] - history[0][speaker]), abs=2e-3)
        assert after >= mean_log_likelihood(gmms, x_ND, pdf_N, truth[speaker]) - 1e-6


def test_gradient_vanishes_at_convergence() -> None:
    gmms = model()
    stats = stats_of(gmms, [sample_frames(gmms, random_transforms(1)[0], 2000, 3)])
    transform = estimate(stats, 200, identity(stats))[0].requires_grad_()
    objective(stats, transform).sum().backward()
    assert transform.grad is not None and transform.grad.abs().max() < 0.02


def test_batched_speakers_equal_single_speakers() -> None:
    gmms, truth = model(), random_transforms(3)
    speakers = [sample_frames(gmms, transform, 900, seed) for seed, transform in enumerate(truth)]
    stats = stats_of(gmms, speakers)
    together = estimate(stats, 5, identity(stats))[0]
    for number, speaker in enumerate(speakers):
        own = stats_of(gmms, [speaker])
        alone = estimate(own, 5, identity(own))[0]
        np.testing.assert_allclose(together[number], alone[0], atol=1e-8)


def test_offsets_maximise_the_objective() -> None:
    gmms = model()
    truth = np.concatenate([random_transforms(1)[0, :, :-1], np.arange(D)[:, None] / 2], axis=1)
    stats = stats_of(gmms, [sample_frames(gmms, truth, 3000, 1)])
    start = torch.from_numpy(truth)[None].clone()
    start[:, :, -1] = 0.0
    found = estimate_offsets(stats, start)
    np.testing.assert_allclose(found[0].numpy(), truth, atol=0.1)
    for row in range(D):
        for step in (-0.01, 0.01):
            other = found.clone()
            other[0, row, -1] += step
            assert objective(stats, other) < objective(stats, found)


def test_statistics_equal_a_plain_loop() -> None:
    """Posteriors come from one set of mixtures on the current frames, parameters from another, with weighted pdfs."""
    gmms, target = random_gmms(), random_gmms(seed=9)
    rng = np.random.default_rng(1)
    x_ND, current_ND = rng.normal(0, 2, (2, 60, gmms.dim)).astype(np.float32)
    occupation = Occupation(
        np.sort(rng.integers(0, 60, 90)), rng.integers(0, gmms.num_pdfs, 90), rng.random(90, dtype=np.float32)
    )
    expectation = Expectation(gmms, target)
    stats = FmllrStats.zeros(2, gmms.dim, torch.device("cpu"))
    stats.add(1, occupation.frames, torch.from_numpy(x_ND), *expectation(torch.from_numpy(current_ND), occupation))
    linear, quadratic = np.zeros((gmms.dim, gmms.dim + 1)), np.zeros((gmms.dim, gmms.dim + 1, gmms.dim + 1))
    for frame, pdf, weight in zip(occupation.frame_M, occupation.pdf_M, occupation.weight_M, strict=True):
        rows = slice(*gmms.offsets_P1[pdf : pdf + 2])
        var = gmms.vars_GD[rows].astype(np.float64)
        density = ((current_ND[frame] - gmms.means_GD[rows]) ** 2 / var + np.log(var)).sum(axis=1)
        posterior = gmms.weights_G[rows] * np.exp(-0.5 * (density - density.min()))
        posterior *= weight / posterior.sum()
        x_E = np.append(x_ND[frame], 1.0)
        linear += np.outer((posterior[:, None] * target.means_GD[rows] / target.vars_GD[rows]).sum(axis=0), x_E)
        quadratic += (posterior[:, None] / target.vars_GD[rows]).sum(axis=0)[:, None, None] * np.outer(x_E, x_E)
    assert stats.count_S.tolist() == pytest.approx([0.0, occupation.weight_M.sum()])
    np.testing.assert_allclose(stats.linear_SDE[1], linear, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(unpack(stats.quadratic_SDF[1], gmms.dim + 1), quadratic, rtol=1e-3, atol=1e-2)


def test_outer_products_of_several_blocks() -> None:
    rng = np.random.default_rng(4)
    x_NE, a_ND = rng.normal(size=(5000, 4)), rng.random((5000, 3))
    total = torch.zeros(3, packed_size(4), dtype=torch.float64)
    add_weighted_outer(total, torch.from_numpy(a_ND).float(), torch.from_numpy(x_NE).float())
    np.testing.assert_allclose(unpack(total, 4), np.einsum("nd,ne,nf->def", a_ND, x_NE, x_NE), atol=0.05)


def test_the_wrong_root_lowers_the_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation test: the tests above detect a wrong row update."""
    right = fmllr._better_root

    def wrong(e1_S: torch.Tensor, e2_S: torch.Tensor, count_S: torch.Tensor) -> torch.Tensor:
        return -count_S / (e1_S * right(e1_S, e2_S, count_S))  # the product of the roots is -count / e1

    gmms = model()
    stats = stats_of(gmms, [sample_frames(gmms, random_transforms(1)[0], 2000, 3)])
    monkeypatch.setattr(fmllr, "_better_root", wrong)
    _, history = estimate(stats, 3, identity(stats))
    assert torch.stack(history).diff(dim=0).min() < -0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_equals_cpu() -> None:
    gmms = model()
    x_ND, pdf_N = sample_frames(gmms, random_transforms(1)[0], 2000, 3)
    expectation = Expectation(gmms, device="cuda")
    stats = FmllrStats.zeros(1, D, expectation.device)
    x = expectation.tensor(x_ND)
    stats.add(0, len(x_ND), x, *expectation(x, Occupation.of_alignment(pdf_N)))
    cpu_stats = stats_of(gmms, [(x_ND, pdf_N)])
    expected = estimate(cpu_stats, 20, identity(cpu_stats))[0]
    np.testing.assert_allclose(estimate(stats, 20, identity(stats))[0].cpu(), expected, atol=1e-3)
