"""Random Gaussian mixtures and speakers with known transforms."""

from __future__ import annotations

import numpy as np

from asr_am.hmm.gmm import DiagGmms, single_gaussians

D, PDFS = 6, 30


def model() -> DiagGmms:
    rng = np.random.default_rng(0)
    return single_gaussians(rng.normal(0, 3, (PDFS, D)), rng.uniform(0.5, 2, (PDFS, D)))


def sample_frames(gmms: DiagGmms, transform_DE: np.ndarray, frames: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns frames that `transform_DE` maps to samples of the model, and their pdfs."""
    rng = np.random.default_rng(seed)
    pdf_N = rng.integers(0, PDFS, frames)
    y_ND = gmms.means_GD[pdf_N] + np.sqrt(gmms.vars_GD[pdf_N]) * rng.normal(size=(frames, D))
    x_ND = (y_ND - transform_DE[:, -1]) @ np.linalg.inv(transform_DE[:, :-1]).T
    return x_ND.astype(np.float32), pdf_N


def random_transforms(count: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    return np.concatenate([np.eye(D) + 0.2 * rng.normal(size=(count, D, D)), rng.normal(size=(count, D, 1))], axis=2)


SIZES = (3, 1, 7, 2)


def random_gmms(seed: int = 0, dim: int = 6) -> DiagGmms:
    rng = np.random.default_rng(seed)
    weights = np.concatenate([rng.dirichlet(np.ones(size)) for size in SIZES]).astype(np.float32)
    means = rng.normal(0, 3, (len(weights), dim)).astype(np.float32)
    variances = rng.uniform(0.2, 3, means.shape).astype(np.float32)
    return DiagGmms(weights, means, variances, np.cumsum([0, *SIZES]).astype(np.int64))
