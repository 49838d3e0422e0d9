from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchaudio.functional import compute_deltas

from asr_am.features.cmvn_deltas import add_deltas


def by_definition(x: np.ndarray) -> np.ndarray:
    """Computes Kaldi's DeltaFeatures::Process in float64: filters on the frames, with edge frames repeated."""
    first = [-0.2, -0.1, 0.0, 0.1, 0.2]
    second = np.zeros(9)
    for i, a in enumerate(first):
        for j, b in enumerate(first):
            second[i + j] += a * b
    rows = []
    for t in range(len(x)):
        row = [x[t].astype(np.float64)]
        for taps in (first, second):
            reach = len(taps) // 2
            row.append(sum(tap * x[min(max(t + k - reach, 0), len(x) - 1)] for k, tap in enumerate(taps)))
        rows.append(np.concatenate(row))
    return np.array(rows)


@settings(max_examples=60)
@given(num_frames=st.integers(1, 30), dim=st.integers(1, 5), seed=st.integers(0, 99))
def test_equals_the_definition_including_edges(num_frames: int, dim: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((num_frames, dim)).astype(np.float32) * 10
    np.testing.assert_allclose(add_deltas(x), by_definition(x), atol=1e-5)


def test_equals_torchaudio_away_from_the_edges() -> None:
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    first = compute_deltas(torch.from_numpy(x.T), win_length=5)
    second = compute_deltas(first, win_length=5)
    ours = add_deltas(x)
    np.testing.assert_allclose(ours[:, 4:8], first.numpy().T, atol=1e-5)
    np.testing.assert_allclose(ours[2:-2, 8:], second.numpy().T[2:-2], atol=1e-5)
    assert abs(ours[:2, 8:] - second.numpy().T[:2]).max() > 0.01  # edges differ, so torchaudio is not used


def test_a_line_has_its_slope_and_no_curvature() -> None:
    ours = add_deltas(np.arange(20, dtype=np.float32)[:, None] * 3)
    np.testing.assert_allclose(ours[4:-4, 1], 3.0, rtol=1e-6)
    np.testing.assert_allclose(ours[4:-4, 2], 0.0, atol=1e-5)
