"""Mixtures: densities compared with SciPy, and damaged files."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm

from asr_am.errors import InputError
from asr_am.hmm.gmm import DiagGmms, single_gaussians
from tests.support.gmm_cases import random_gmms


def reference(gmms: DiagGmms, x_TD: np.ndarray, pdf: int) -> np.ndarray:
    rows = slice(*gmms.offsets_P1[pdf : pdf + 2])
    density = norm.logpdf(x_TD[:, None], gmms.means_GD[rows], np.sqrt(gmms.vars_GD[rows])).sum(axis=2)
    return logsumexp(density + np.log(gmms.weights_G[rows]), axis=1)


@pytest.mark.parametrize("spread", [1.0, 30.0])  # 30: densities underflow in float32
def test_log_likelihoods_equal_scipy(spread: float) -> None:
    gmms = random_gmms()
    x_TD = (spread * np.random.default_rng(1).normal(size=(50, gmms.dim))).astype(np.float32)
    expected = np.stack([reference(gmms, x_TD, pdf) for pdf in range(gmms.num_pdfs)], axis=1)
    np.testing.assert_allclose(gmms.log_likelihoods(torch.from_numpy(x_TD)).numpy(), expected, rtol=1e-4, atol=2e-3)
    some = np.array([2, 1])
    found = gmms.log_likelihoods(torch.from_numpy(x_TD), some).numpy()
    np.testing.assert_allclose(found, expected[:, some], rtol=1e-4, atol=2e-3)


def test_saving_and_loading(tmp_path: Path) -> None:
    gmms = random_gmms()
    gmms.save(tmp_path / "gmm.npz")
    loaded = DiagGmms.load(tmp_path / "gmm.npz")
    for name in ("weights_G", "means_GD", "vars_GD", "offsets_P1"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(gmms, name))
    assert [path.name for path in tmp_path.iterdir()] == ["gmm.npz"]


def test_damaged_files_are_input_errors(tmp_path: Path) -> None:
    path = tmp_path / "gmm.npz"
    with pytest.raises(InputError, match="gmm\\.npz"):
        DiagGmms.load(path)
    random_gmms().save(path)
    content = path.read_bytes()
    rng = random.Random(0)
    for length in [0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(60))]:
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match="gmm\\.npz"):
            DiagGmms.load(path)
    for _ in range(200):  # the checksum detects a flipped bit, unless it is in the archive's padding
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):
            DiagGmms.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", np.ones(13, np.float32)),
        ("vars", np.zeros((13, 6), np.float32)),
        ("vars", np.ones((13, 5), np.float32)),
        ("means", np.full((13, 6), np.nan, np.float32)),
        ("means", np.zeros((13, 6), np.float64)),
        ("offsets", np.array([0])),
        ("offsets", np.array([0, 3, 3, 11, 13])),
        ("offsets", np.array([0, 3, 4, 11, 12])),
    ],
)
def test_inconsistent_arrays_are_rejected(tmp_path: Path, name: str, value: np.ndarray) -> None:
    gmms = random_gmms()
    arrays = {"weights": gmms.weights_G, "means": gmms.means_GD, "vars": gmms.vars_GD, "offsets": gmms.offsets_P1}
    np.savez(tmp_path / "gmm.npz", **(arrays | {name: value}))
    with pytest.raises(InputError, match="gmm\\.npz"):
        DiagGmms.load(tmp_path / "gmm.npz")


def test_single_gaussians() -> None:
    gmms = single_gaussians(np.zeros((3, 2)), np.ones((3, 2)))
    assert gmms.num_pdfs == gmms.num_gaussians == 3 and gmms.dim == 2
