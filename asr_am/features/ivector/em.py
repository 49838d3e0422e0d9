"""EM for the i-vector extractor, with the minimum-divergence step (Kenny; Kaldi's IvectorExtractorStats).

The hidden data are the vectors y of pieces of speech (utterances); which Gaussian a frame belongs to is fixed, by the
posteriors of the UBM. So what rises at every iteration is the exact marginal likelihood of the statistics.

Shapes as in `extractor`; Y = sum over pieces of X_g E[y]', R = sum of gamma_g E[y y'].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from asr_am.features.ivector.extractor import Extractor
from asr_am.features.ivector.statistics import MIN_COUNT, Statistics, pack, unpack

PIECES = 64  # worked on at a time
COVARIANCE_FLOOR = 0.1  # share of the average covariance below which none falls, in no direction (Kaldi's factor)


@dataclass
class Sums:
    """What the M-step needs of all pieces: float64."""

    pieces: int
    count_G: Tensor
    cross_GDS: Tensor  # Y
    square_GP: Tensor  # R, packed
    mean_S: Tensor
    mean_square_SS: Tensor
    log_evidence: float

    @classmethod
    def zeros(cls, extractor: Extractor) -> Sums:
        (gaussians, _, dim), zeros = extractor.loadings_GDS.shape, extractor.loadings_GDS.new_zeros
        cross_GDS, square_GP = zeros(extractor.loadings_GDS.shape), zeros(gaussians, dim * (dim + 1) // 2)
        return cls(0, zeros(gaussians), cross_GDS, square_GP, zeros(dim), zeros(dim, dim), 0.0)

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def accumulate(extractor: Extractor, material: Iterable[Statistics]) -> Sums:
    """The E-step over pieces of speech."""
    sums = Sums.zeros(extractor)
    for statistics in material:
        parts = zip(statistics.counts_KG.split(PIECES), statistics.first_KGD.split(PIECES), strict=True)
        for counts_BG, first_BGD in parts:
            counts_BG, first_BX = counts_BG.double(), first_BGD.double().flatten(1)
            posterior = extractor.posterior(counts_BG, extractor.project(first_BGD))
            mean_BS = posterior.mean_BS
            square_BSS = posterior.covariance() + mean_BS[:, :, None] * mean_BS[:, None, :]
            sums.pieces += len(mean_BS)
            sums.count_G += counts_BG.sum(dim=0)
            sums.cross_GDS += (first_BX.T @ mean_BS).view_as(sums.cross_GDS)
            sums.square_GP += counts_BG.T @ pack(square_BSS)
            sums.mean_S += mean_BS.sum(dim=0)
            sums.mean_square_SS += square_BSS.sum(dim=0)
            sums.log_evidence += float(posterior.log_evidence().sum())
    return sums


def log_likelihood(extractor: Extractor, sums: Sums, second_GDD: Tensor) -> float:
    """The exact marginal log-likelihood per frame of what `sums` were accumulated over, posteriors fixed."""
    rest = extractor.frames_log_likelihood(sums.count_G, second_GDD, sums.pieces)
    return (sums.log_evidence + rest) / float(sums.count_G.sum())


def maximise(extractor: Extractor, sums: Sums, second_GDD: Tensor, floor_DD: Tensor) -> Extractor:
    """The M-step: loadings, covariances no smaller than `floor_DD`, then the prior."""
    heard_G = sums.count_G >= MIN_COUNT
    square_GSS = unpack(sums.square_GP[heard_G], extractor.dim)
    cross_GDS, count_G11 = sums.cross_GDS[heard_G], sums.count_G[heard_G, None, None]
    solved_GDS = torch.linalg.solve(square_GSS, cross_GDS.mT).mT
    scatter_GDD = (second_GDD[heard_G] - solved_GDS @ cross_GDS.mT) / count_G11
    loadings_GDS, covariances_GDD = extractor.loadings_GDS.clone(), extractor.covariances_GDD.clone()
    loadings_GDS[heard_G] = solved_GDS
    covariances_GDD[heard_G] = apply_floor(0.5 * (scatter_GDD + scatter_GDD.mT), floor_DD)
    return minimise_divergence(Extractor(loadings_GDS, covariances_GDD, extractor.offset), sums)


def covariance_floor(count_G: Tensor, covariances_GDD: Tensor) -> Tensor:
    """[D, D]: a share of the average covariance. Fixed for a training, so that the likelihood can only rise."""
    return COVARIANCE_FLOOR * (count_G[:, None, None] * covariances_GDD).sum(dim=0) / count_G.sum()


def apply_floor(covariances_GDD: Tensor, floor_DD: Tensor) -> Tensor:
    """Raise eigenvalues relative to `floor_DD` to one: the maximum-likelihood covariances under that constraint."""
    factor_DD = torch.linalg.cholesky(floor_DD)
    half_GDD = torch.linalg.solve_triangular(factor_DD, covariances_GDD, upper=False)
    relative_GDD = torch.linalg.solve_triangular(factor_DD, half_GDD.mT, upper=False)
    values_GD, vectors_GDD = torch.linalg.eigh(0.5 * (relative_GDD + relative_GDD.mT))
    root_GDD = factor_DD @ vectors_GDD * values_GD.clamp_min(1.0).sqrt()[:, None, :]
    return root_GDD @ root_GDD.mT


def minimise_divergence(extractor: Extractor, sums: Sums) -> Extractor:
    """Give the prior the mean and covariance of the posteriors, then change axes so that it is N(o e_1, I) again.

    y' = H T y, T whitening, H the reflection that turns the mean onto the first axis; M' = M (H T)^-1.
    """
    mean_S = sums.mean_S / sums.pieces
    covariance_SS = sums.mean_square_SS / sums.pieces - torch.outer(mean_S, mean_S)
    factor_SS = torch.linalg.cholesky(covariance_SS)
    whitened_S = torch.linalg.solve_triangular(factor_SS, mean_S[:, None], upper=False)[:, 0]
    offset = math.sqrt(float(whitened_S @ whitened_S))
    return Extractor(extractor.loadings_GDS @ (factor_SS @ reflection(whitened_S)), extractor.covariances_GDD, offset)


def reflection(direction_S: Tensor) -> Tensor:
    """The Householder matrix [S, S] (symmetric, its own inverse) that turns `direction_S` onto the first axis."""
    normal_S = direction_S / direction_S.norm()
    normal_S = torch.cat([normal_S[:1] - 1.0, normal_S[1:]])
    length = float(normal_S @ normal_S)
    identity_SS = torch.eye(len(normal_S)).to(normal_S)
    return identity_SS if length < 1e-20 else identity_SS - 2.0 / length * torch.outer(normal_S, normal_S)
