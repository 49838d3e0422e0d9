from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from asr_am.errors import InputError
from asr_am.features.ivector import estimator
from asr_am.features.ivector.estimator import Estimator, split_speaker
from asr_am.features.ivector.extractor import Extractor, initial_extractor
from asr_am.features.ivector.model_files import load_extractor, load_ubm, save_extractor, save_ubm
from asr_am.features.ivector.train_extractor import (
    ExtractorStats,
    accumulate,
    apply_floor,
    covariance_floor,
    log_likelihood,
    maximise,
    minimise_divergence,
)
from asr_am.features.ivector.ubm import DiagUbm
from tests.support.ivector_reference import Drawn, draw, ivector, log_density, posteriors, random_extractor

GAUSSIANS, FEATURES, DIM = 4, 5, 3


def small_ubm(seed: int = 0) -> DiagUbm:
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 1.0, GAUSSIANS)
    arrays = (
        weights / weights.sum(), rng.standard_normal((GAUSSIANS, FEATURES)), rng.uniform(1, 3, (GAUSSIANS, FEATURES)),
    )  # fmt: skip
    return DiagUbm(*(torch.from_numpy(array) for array in arrays))


def fit(drawn: Drawn, iterations: int) -> tuple[list[Extractor], list[float]]:
    """Returns the initial extractor and that of each EM iteration, and the likelihood before each update."""
    statistics, totals = drawn.statistics(GAUSSIANS)
    means, covariances = totals.moments()
    floor = 0.1 * covariance_floor(totals.count_G, covariances)  # y moves the means far more than in real speech
    extractors, likelihoods = [initial_extractor(means, apply_floor(covariances, floor), DIM, 0)], []
    for _ in range(iterations):
        sums = accumulate(extractors[-1], [statistics])
        likelihoods.append(log_likelihood(extractors[-1], sums, totals.second_GDD))
        extractors.append(maximise(extractors[-1], sums, totals.second_GDD, floor))
    return extractors, likelihoods


def test_ivectors_equal_the_reference() -> None:
    ubm, extractor = small_ubm(), random_extractor(GAUSSIANS, FEATURES, DIM, 1)
    x_TD = 2 * np.random.default_rng(2).standard_normal((70, FEATURES))
    estimate = Estimator(ubm, extractor, scale=0.3, period=25)
    found = estimate.offline([[torch.from_numpy(x_TD).float()]])[0]
    np.testing.assert_allclose(found, ivector(extractor, 0.3 * posteriors(ubm, x_TD), x_TD), rtol=1e-4, atol=1e-4)


def test_likelihood_is_the_exact_marginal_and_rises_at_every_iteration() -> None:
    drawn = draw(random_extractor(GAUSSIANS, FEATURES, DIM, 3), utterances=40, frames=12, seed=4)
    extractors, likelihoods = fit(drawn, 12)
    assert (np.diff(likelihoods) > 0).all() and likelihoods[-1] > likelihoods[0] + 0.1
    for extractor, likelihood in list(zip(extractors, likelihoods, strict=False))[::5]:
        pairs = zip(drawn.gaussian_UT, drawn.x_UTD, strict=True)
        exact = sum(log_density(extractor, gaussian_T, x_TD) for gaussian_T, x_TD in pairs)
        assert likelihood == pytest.approx(exact / drawn.gaussian_UT.size, rel=1e-8)


def test_subspace_and_covariances_are_recovered() -> None:
    truth = random_extractor(GAUSSIANS, FEATURES, DIM, 5)
    drawn = draw(truth, utterances=800, frames=40, seed=6)
    extractors, _ = fit(drawn, 25)
    last = extractors[-1]
    expected, first, found = (e.loadings_GDS.flatten(0, 1).numpy() for e in (truth, extractors[0], last))
    assert np.degrees(subspace_angles(first, expected).max()) > 30.0
    assert np.degrees(subspace_angles(found, expected).max()) < 1.0
    np.testing.assert_allclose(last.covariances_GDD, truth.covariances_GDD, atol=0.1)
    assert last.offset == pytest.approx(truth.offset, rel=0.1)
    statistics, _ = drawn.statistics(GAUSSIANS)
    found_US = last.posterior(statistics.counts_KG, last.project(statistics.first_KGD)).mean_BS.numpy()
    np.testing.assert_allclose(np.cov(found_US.T), np.eye(DIM), atol=0.15)


def test_minimum_divergence_only_changes_the_basis() -> None:
    extractor = random_extractor(GAUSSIANS, FEATURES, DIM, 7)
    rng = np.random.default_rng(8)
    y_US = rng.standard_normal((500, DIM)) @ rng.standard_normal((DIM, DIM)) + [5.0, -2.0, 1.0]
    sums = ExtractorStats.zeros(extractor)
    sums.num_utterances, sums.mean_S = len(y_US), torch.from_numpy(y_US.sum(axis=0))
    sums.mean_square_SS = torch.from_numpy(y_US.T @ y_US)
    found = minimise_divergence(extractor, sums)
    change_SS = np.linalg.lstsq(
        found.loadings_GDS.flatten(0, 1).numpy(), extractor.loadings_GDS.flatten(0, 1).numpy(), rcond=None
    )[0]
    moved_US = y_US @ change_SS.T
    np.testing.assert_allclose(moved_US.mean(axis=0), [found.offset, 0, 0], atol=1e-8)
    np.testing.assert_allclose(np.cov(moved_US.T, bias=True), np.eye(DIM), atol=1e-8)
    before, after = (np.einsum("gds,us->ugd", e, y) for e, y in
                     ((extractor.loadings_GDS, y_US), (found.loadings_GDS, moved_US)))  # fmt: skip
    np.testing.assert_allclose(before, after, atol=1e-8)


def test_the_floor_only_raises_smaller_eigenvalues() -> None:
    floor_DD = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    above, below = torch.diag(torch.tensor([2.0, 9.0])).double(), torch.diag(torch.tensor([0.5, 9.0])).double()
    found = apply_floor(torch.stack([above, below]), floor_DD)
    np.testing.assert_allclose(found[0], above, atol=1e-12)
    np.testing.assert_allclose(found[1], [[1.0, 0.0], [0.0, 9.0]], atol=1e-12)


def sample_utterances(lengths: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Samples the frames of a speaker's utterances."""
    rng = np.random.default_rng(seed)
    shift = rng.standard_normal(FEATURES)
    return [torch.from_numpy(rng.standard_normal((n, FEATURES)) + shift).float() for n in lengths]


@pytest.mark.parametrize("batch", [1, 2, 64])
@pytest.mark.parametrize("max_count", [0.0, 4.0])
def test_online_equals_offline_after_all_speech(max_count: float, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "BATCH", batch)
    extractor = random_extractor(GAUSSIANS, FEATURES, DIM, 9)
    estimate = Estimator(small_ubm(), extractor, scale=0.2, max_count=max_count, period=30)
    utterances = sample_utterances((75, 9, 61), 10)
    rows = estimate.online(utterances)
    assert [len(r) for r in rows] == [3, 1, 3]
    for u, count in ((0, 3), (1, 1), (2, 3)):
        np.testing.assert_allclose(rows[u][count - 1], estimate.offline([utterances[: u + 1]])[0], atol=1e-5)
    np.testing.assert_allclose(rows[0][0], estimate.offline([[utterances[0][:30]]])[0], atol=1e-5)
    np.testing.assert_allclose(rows[2][1], estimate.offline([[*utterances[:2], utterances[2][:60]]])[0], atol=1e-5)


def test_max_count_scales_statistics_down() -> None:
    extractor, (x_TD,) = random_extractor(GAUSSIANS, FEATURES, DIM, 11), sample_utterances((200,), 12)
    limited, scaled = Estimator(small_ubm(), extractor, max_count=50.0), Estimator(small_ubm(), extractor, scale=0.25)
    np.testing.assert_allclose(limited.offline([[x_TD]]), scaled.offline([[x_TD]]), atol=1e-4)
    plain = Estimator(small_ubm(), extractor)
    np.testing.assert_allclose(limited.offline([[x_TD[:40]]]), plain.offline([[x_TD[:40]]]))
    assert np.abs(limited.offline([[x_TD]]) - plain.offline([[x_TD]])).max() > 1e-3


def test_little_speech_is_near_the_prior_and_none_is_at_it() -> None:
    extractor = random_extractor(GAUSSIANS, FEATURES, DIM, 14)
    estimate = Estimator(small_ubm(), extractor, scale=0.001)
    short, long = (float(estimate.offline([sample_utterances((n,), 15)]).norm()) for n in (18, 4000))
    assert np.isfinite(short) and 0 < short < 0.2 * long
    nothing = extractor.ivectors(torch.zeros(1, GAUSSIANS), torch.zeros(1, DIM, dtype=torch.float64), max_count=10.0)
    np.testing.assert_allclose(nothing, 0, atol=1e-12)


def test_speakers_are_split_in_order() -> None:
    assert split_speaker(["a", "b", "c", "d", "e"], 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert split_speaker(["a", "b", "c"], 0) == [["a", "b", "c"]]


def test_models_are_read_back_and_damaged_files_are_named(tmp_path: Path) -> None:
    ubm, extractor = small_ubm(), random_extractor(GAUSSIANS, FEATURES, DIM, 16)
    save_ubm(tmp_path / "ubm.npz", ubm)
    save_extractor(tmp_path / "extractor.npz", extractor)
    assert torch.equal(load_ubm(tmp_path / "ubm.npz").means_GD, ubm.means_GD)
    loaded = load_extractor(tmp_path / "extractor.npz")
    assert torch.equal(loaded.loadings_GDS, extractor.loadings_GDS) and loaded.offset == extractor.offset
    for name, load in (("ubm.npz", load_ubm), ("extractor.npz", load_extractor)):
        content = (tmp_path / name).read_bytes()
        for damaged in (b"", content[: len(content) // 2]):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(InputError, match=name):
                load(tmp_path / name)
    save_extractor(tmp_path / "extractor.npz", Extractor(extractor.loadings_GDS, -extractor.covariances_GDD, 1.0))
    with pytest.raises(InputError, match="no i-vector extractor"):
        load_extractor(tmp_path / "extractor.npz")
