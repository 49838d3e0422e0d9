"""Splicing and LDA on classes whose means differ in a known plane."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np
import pytest

from asr_am.errors import InputError
from asr_am.features.adapted import Projection, splice
from asr_am.hmm.lda_mllt import accumulate_classes, estimate_lda
from tests.support.synthetic_speech import store

S, CLASSES = 6, 8


def sample_frames(
    rng: np.random.Generator, frames: int = 8000
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns frames, classes (-1: none), class means that differ in a plane, and the covariance within classes."""
    mixing = rng.normal(size=(S, S))
    means = rng.normal(0, 3, (CLASSES, 2)) @ rng.normal(size=(2, S))
    pdf_N = rng.integers(0, CLASSES, frames)
    x_NS = (means[pdf_N] + rng.normal(size=(frames, S)) @ mixing.T).astype(np.float32)
    outside = rng.random(frames) < 0.1
    x_NS[outside] += 100
    return x_NS, np.where(outside, -1, pdf_N), means, mixing @ mixing.T


def test_the_plane_of_the_class_means_is_recovered(tmp_path: Path) -> None:
    x_NS, pdf_N, means, within = sample_frames(np.random.default_rng(0))
    frames = store(tmp_path / "frames", {"a": x_NS[:3000], "b": x_NS[3000:]})
    stats = accumulate_classes(frames, S, 0, pdf_N, CLASSES, "LDA")
    projection = estimate_lda(stats, 4, S)
    matrix = projection.matrix.astype(np.float64)
    np.testing.assert_allclose(matrix @ within @ matrix.T, np.eye(4), atol=0.1)
    spread = (means - means.mean(axis=0)) @ matrix.T
    assert np.abs(spread[:, 2:]).max() < 0.15 * np.abs(spread[:, :2]).max()
    whitening = np.linalg.inv(np.linalg.cholesky(within))  # two directions keep the distance between means
    distance = np.linalg.norm((means[0] - means[1]) @ whitening.T)
    assert np.linalg.norm(spread[0, :2] - spread[1, :2]) == pytest.approx(distance, rel=0.1)


def test_splicing_repeats_the_edges() -> None:
    x_TS = np.arange(8.0).reshape(4, 2)
    spliced = splice(x_TS, 2)
    assert spliced.shape == (4, 10)
    assert spliced[1].tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert spliced[3].tolist() == [2, 3, 4, 5, 6, 7, 6, 7, 6, 7]


def test_statistics_are_of_frames_spliced_within_utterances(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts = {name: rng.normal(size=(length, 3 * S)).astype(np.float32) for name, length in (("a", 30), ("b", 25))}
    pdf_N = rng.integers(-1, 3, 55)
    stats = accumulate_classes(store(tmp_path / "frames", parts), S, 1, pdf_N, 4, "LDA")
    x_NC = np.concatenate([splice(part[:, :S], 1) for part in parts.values()]).astype(np.float64)
    assert stats.count_P.tolist() == [(pdf_N == p).sum() for p in range(4)]
    np.testing.assert_allclose(stats.sums_PC, [x_NC[pdf_N == p].sum(axis=0) for p in range(4)], atol=1e-9)
    np.testing.assert_allclose(stats.second_CC, x_NC[pdf_N >= 0].T @ x_NC[pdf_N >= 0], atol=1e-9)


def test_linearly_dependent_features_are_an_input_error(tmp_path: Path) -> None:
    x_NS, pdf_N, *_ = sample_frames(np.random.default_rng(2), 500)
    x_NS[:, 1] = x_NS[:, 0]
    stats = accumulate_classes(store(tmp_path / "same", {"a": x_NS}), S, 0, pdf_N, CLASSES, "LDA")
    with pytest.raises(InputError, match="linearly dependent"):
        estimate_lda(stats, 2, S)


def test_projections_are_kaldi_matrices_and_checked_on_loading(tmp_path: Path) -> None:
    matrix = np.random.default_rng(3).normal(size=(4, 5 * S)).astype(np.float32)
    projection = Projection(matrix, S)
    projection.save(tmp_path / "lda.mat")
    np.testing.assert_array_equal(kaldiio.load_mat(str(tmp_path / "lda.mat")), matrix)
    loaded = Projection.load(tmp_path / "lda.mat", S)
    assert loaded.context == 2 and loaded.dim == 4
    x_TS = np.random.default_rng(4).normal(size=(9, S)).astype(np.float32)
    np.testing.assert_allclose(loaded.then(2 * np.eye(4))(x_TS), 2 * projection(x_TS), rtol=1e-5)
    with pytest.raises(InputError, match="not an odd number of frames of 7"):
        Projection.load(tmp_path / "lda.mat", 7)
    whole = (tmp_path / "lda.mat").read_bytes()
    for cut in range(0, len(whole), 97):
        (tmp_path / "lda.mat").write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"lda\.mat"):
            Projection.load(tmp_path / "lda.mat", S)
