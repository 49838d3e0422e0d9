"""Reference i-vectors in NumPy, frame by frame and Gaussian by Gaussian, and utterances sampled from the model.

Shapes: T frames, D features, G Gaussians, S dimensions, U utterances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import multivariate_normal, norm

from asr_am.features.ivector.extractor import Extractor
from asr_am.features.ivector.statistics import Statistics, StatisticsTotals
from asr_am.features.ivector.ubm import DiagUbm


def posteriors(ubm: DiagUbm, x_TD: np.ndarray) -> np.ndarray:
    """Returns the posteriors of the Gaussians, [T, G]."""
    weights, means, deviations = ubm.weights_G.numpy(), ubm.means_GD.numpy(), ubm.vars_GD.sqrt().numpy()
    density_TG = np.array([[norm.pdf(x, means[g], deviations[g]).prod() for g in range(len(weights))] for x in x_TD])
    joint_TG = weights * density_TG
    return joint_TG / joint_TG.sum(axis=1, keepdims=True)


def ivector(extractor: Extractor, posterior_TG: np.ndarray, x_TD: np.ndarray) -> np.ndarray:
    """Returns the posterior mean minus the prior mean, [S]."""
    loadings, covariances = extractor.loadings_GDS.numpy(), extractor.covariances_GDD.numpy()
    precision = np.eye(extractor.dim)
    linear = np.zeros(extractor.dim)
    linear[0] = extractor.offset
    for t, x in enumerate(x_TD):
        for g in range(len(loadings)):
            weighted = loadings[g].T @ np.linalg.inv(covariances[g])
            precision += posterior_TG[t, g] * weighted @ loadings[g]
            linear += posterior_TG[t, g] * weighted @ x
    mean = np.linalg.solve(precision, linear)
    mean[0] -= extractor.offset
    return mean


def log_density(extractor: Extractor, gaussian_T: np.ndarray, x_TD: np.ndarray) -> float:
    """Returns the log density of an utterance with known Gaussians: one Gaussian of all values, y integrated out."""
    loadings, covariances = extractor.loadings_GDS.numpy(), extractor.covariances_GDD.numpy()
    stacked = np.concatenate([loadings[g] for g in gaussian_T])
    covariance = stacked @ stacked.T
    for t, g in enumerate(gaussian_T):
        rows = slice(t * x_TD.shape[1], (t + 1) * x_TD.shape[1])
        covariance[rows, rows] += covariances[g]
    return float(multivariate_normal.logpdf(x_TD.ravel(), extractor.offset * stacked[:, 0], covariance))


@dataclass(frozen=True)
class Drawn:
    """Utterances sampled from an extractor."""

    x_UTD: np.ndarray
    gaussian_UT: np.ndarray

    def statistics(self, gaussians: int) -> tuple[Statistics, StatisticsTotals]:
        """Returns statistics by utterance and their totals, with the Gaussians known."""
        hard_UTG = np.eye(gaussians)[self.gaussian_UT]
        counts, first = hard_UTG.sum(axis=1), np.einsum("utg,utd->ugd", hard_UTG, self.x_UTD)
        second = np.einsum("utg,utd,ute->gde", hard_UTG, self.x_UTD, self.x_UTD)
        rows = Statistics(torch.from_numpy(counts), torch.from_numpy(first))
        return rows, StatisticsTotals(rows.counts_KG.sum(dim=0), rows.first_KGD.sum(dim=0), torch.from_numpy(second))


def draw(extractor: Extractor, utterances: int, frames: int, seed: int) -> Drawn:
    """Samples utterances from an extractor."""
    rng = np.random.default_rng(seed)
    gaussians, features, dim = extractor.loadings_GDS.shape
    y_US = rng.standard_normal((utterances, dim))
    y_US[:, 0] += extractor.offset
    gaussian_UT = rng.integers(0, gaussians, (utterances, frames))
    mean_UGD = np.einsum("gds,us->ugd", extractor.loadings_GDS.numpy(), y_US)
    root_GDD = np.linalg.cholesky(extractor.covariances_GDD.numpy())
    noise = np.einsum("utde,ute->utd", root_GDD[gaussian_UT], rng.standard_normal((utterances, frames, features)))
    return Drawn(np.take_along_axis(mean_UGD, gaussian_UT[..., None], axis=1) + noise, gaussian_UT)


def random_extractor(gaussians: int, features: int, dim: int, seed: int, offset: float = 10.0) -> Extractor:
    rng = np.random.default_rng(seed)
    loadings = rng.standard_normal((gaussians, features, dim))
    roots = rng.standard_normal((gaussians, features, features))
    covariances = roots @ roots.transpose(0, 2, 1) / features + 0.3 * np.eye(features)
    return Extractor(torch.from_numpy(loadings), torch.from_numpy(covariances), offset)
