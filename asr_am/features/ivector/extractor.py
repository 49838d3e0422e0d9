"""The i-vector extractor: a total-variability model of Baum-Welch statistics, and posteriors of its latent vector.

    y ~ N(o e_1, I),    x_t | y, Gaussian g ~ N(M_g y, Sigma_g)

This is Kaldi's form (Povey's variant of Dehak et al., "Front-End Factor Analysis for Speaker Verification", IEEE TASLP
2011): the prior mean has the offset o on the first axis, so a column of M holds the means and no bias is needed. With
counts gamma_g and sums X_g, the posterior of y is Gaussian with

    precision  I + sum_g gamma_g M_g' Sigma_g^-1 M_g,    precision x mean  o e_1 + sum_g M_g' Sigma_g^-1 X_g.

Shapes: B utterances or segments, G Gaussians, D features, S dimensions of the i-vector, P = S (S + 1) / 2. All float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from asr_am.features.ivector.statistics import pack, unpack

OFFSET = 100.0  # prior offset before training, as in Kaldi


@dataclass(frozen=True)
class Posterior:
    """Posteriors of B latent vectors.

    Attributes:
        factor_BSS: lower Cholesky factors of the precisions.
        linear_BS: precision times mean.
    """

    mean_BS: Tensor
    factor_BSS: Tensor
    linear_BS: Tensor

    def covariance(self) -> Tensor:
        """Returns the covariances, [B, S, S]."""
        return torch.cholesky_inverse(self.factor_BSS)

    def log_evidence(self) -> Tensor:
        """Returns the log of the integral over y, [B], up to terms in counts, second-order statistics and offset."""
        half_logdet_B = self.factor_BSS.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        return 0.5 * (self.linear_BS * self.mean_BS).sum(dim=1) - half_logdet_B


@dataclass(frozen=True)
class Extractor:
    """Parameters of the model, float64, on one device.

    Attributes:
        loadings_GDS: Kaldi's M.
        covariances_GDD: Sigma.
        offset: prior mean on the first axis.
    """

    loadings_GDS: Tensor
    covariances_GDD: Tensor
    offset: float

    def to(self, device: str) -> Extractor:
        return Extractor(self.loadings_GDS.to(device), self.covariances_GDD.to(device), self.offset)

    @property
    def dim(self) -> int:
        return self.loadings_GDS.shape[2]

    @cached_property
    def weighted_XS(self) -> Tensor:
        """Sigma_g^-1 M_g of all Gaussians, [G D, S]."""
        factor_GDD = torch.linalg.cholesky(self.covariances_GDD)
        return torch.cholesky_solve(self.loadings_GDS, factor_GDD).flatten(0, 1)

    @cached_property
    def quadratic_GP(self) -> Tensor:
        """M_g' Sigma_g^-1 M_g, packed."""
        return pack(self.loadings_GDS.mT @ self.weighted_XS.view_as(self.loadings_GDS))

    def project(self, first_BGD: Tensor) -> Tensor:
        """Returns sum_g M_g' Sigma_g^-1 X_g, [B, S], all that is needed of the sums X."""
        return first_BGD.flatten(1).double() @ self.weighted_XS

    def posterior(self, counts_BG: Tensor, projected_BS: Tensor) -> Posterior:
        """Returns the posteriors of latent vectors, given counts and projected sums."""
        linear_BS = projected_BS.clone()
        linear_BS[:, 0] += self.offset
        precision_BSS = unpack(counts_BG.double() @ self.quadratic_GP, self.dim)
        precision_BSS.diagonal(dim1=1, dim2=2).add_(1.0)
        factor_BSS = torch.linalg.cholesky(precision_BSS)
        mean_BS = torch.cholesky_solve(linear_BS[..., None], factor_BSS)[..., 0]
        return Posterior(mean_BS, factor_BSS, linear_BS)

    def ivectors(self, counts_BG: Tensor, projected_BS: Tensor, max_count: float = 0.0) -> Tensor:
        """Returns i-vectors, [B, S]: posterior means minus the prior mean, so that no speech gives zero.

        Args:
            counts_BG: counts gamma_g.
            projected_BS: sums from `project`.
            max_count: statistics with a larger total count are scaled down to it, so that i-vectors from much speech
                resemble those from little (Kaldi's max-count). 0: no limit.
        """
        if max_count:
            scale_B1 = (max_count / counts_BG.double().sum(dim=1, keepdim=True).clamp_min(1e-10)).clamp_max(1.0)
            counts_BG, projected_BS = counts_BG * scale_B1, projected_BS * scale_B1
        mean_BS = self.posterior(counts_BG, projected_BS).mean_BS
        mean_BS[:, 0] -= self.offset
        return mean_BS

    def frames_log_likelihood(self, count_G: Tensor, second_GDD: Tensor, num_utterances: int) -> float:
        """Returns the difference between the log-likelihood of all frames and the sum of `Posterior.log_evidence`.

        Args:
            count_G: counts of all utterances.
            second_GDD: sums of x x' of all utterances.
            num_utterances: number of summed log evidences.
        """
        factor_GDD = torch.linalg.cholesky(self.covariances_GDD)
        log_G = 2 * factor_GDD.diagonal(dim1=1, dim2=2).log().sum(dim=1) + len(second_GDD[0]) * math.log(2 * math.pi)
        spread_G = torch.cholesky_solve(second_GDD, factor_GDD).diagonal(dim1=1, dim2=2).sum(dim=1)
        return float(-0.5 * (count_G * log_G + spread_G).sum() - 0.5 * num_utterances * self.offset**2)


def initial_extractor(means_GD: Tensor, covariances_GDD: Tensor, dim: int, seed: int) -> Extractor:
    """Initialises an extractor. The first axis holds the UBM means, others are random with 0.1 standard deviations."""
    gaussians, features = means_GD.shape
    generator = torch.Generator().manual_seed(seed)
    random_GDS = torch.randn(gaussians, features, dim, generator=generator, dtype=torch.float64).to(means_GD)
    loadings_GDS = 0.1 * torch.linalg.cholesky(covariances_GDD) @ random_GDS
    loadings_GDS[:, :, 0] = means_GD / OFFSET
    return Extractor(loadings_GDS, covariances_GDD, OFFSET)
