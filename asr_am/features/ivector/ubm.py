"""A universal background model: one mixture of diagonal-covariance Gaussians for the frames of all speakers, by EM.

Its posteriors say which Gaussian a frame belongs to: all that i-vectors need of it.

Shapes: N or T frames, D features, G Gaussians.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from asr_am.errors import InputError

VARIANCE_FLOOR = 0.01  # share of the variance of all frames below which no Gaussian's falls
MIN_COUNT = 20.0  # frames below which a Gaussian keeps its mean and variances
SPLIT = 0.2  # standard deviations by which the two halves of a Gaussian are moved apart
CACHED_FRAMES, GPU_FRAMES = 512, 65536  # worked on at a time: their posteriors stay in the processor's cache


def block_frames(device: torch.device) -> int:
    """How many frames to work on at a time."""
    return CACHED_FRAMES if device.type == "cpu" else GPU_FRAMES


@dataclass(frozen=True)
class DiagUbm:
    """weights_G (sum to one), means_GD, vars_GD: float64, on one device."""

    weights_G: Tensor
    means_GD: Tensor
    vars_GD: Tensor

    def to(self, device: str) -> DiagUbm:
        return DiagUbm(self.weights_G.to(device), self.means_GD.to(device), self.vars_GD.to(device))

    @property
    def num_gaussians(self) -> int:
        return len(self.weights_G)

    @property
    def dim(self) -> int:
        return self.means_GD.shape[1]

    @cached_property
    def linear_2DG(self) -> Tensor:
        """float32: with (x, x*x) the log density of a Gaussian is linear."""
        precisions_GD = 1.0 / self.vars_GD
        return torch.cat([self.means_GD * precisions_GD, -0.5 * precisions_GD], dim=1).T.float().contiguous()

    @cached_property
    def constant_G(self) -> Tensor:
        """float32: log weights and normalisers."""
        squares_G = (self.means_GD.square() / self.vars_GD + self.vars_GD.log()).sum(dim=1)
        return (self.weights_G.log() - 0.5 * (squares_G + self.dim * math.log(2 * math.pi))).float()

    def log_densities(self, x_TD: Tensor) -> Tensor:
        """log (weight x density) of every Gaussian for float32 frames, float32 [T, G]."""
        return torch.addmm(self.constant_G, torch.cat([x_TD, x_TD * x_TD], dim=1), self.linear_2DG)

    def posteriors(self, x_TD: Tensor) -> Tensor:
        """float32 [T, G]: rows sum to one."""
        return torch.softmax(self.log_densities(x_TD), dim=1)


def train_ubm(x_ND: Tensor, num_gaussians: int, iterations: int, *, seed: int = 0) -> tuple[DiagUbm, list[float]]:
    """A mixture for float32 frames, and the mean log-likelihood per frame before each update at the final size.

    Gaussians are split, the widest first, until there are enough; EM runs a third of `iterations` at each size
    before and all of them at the last. Every update raises the likelihood, or leaves it where it is (variances: as
    high as the floor allows). InputError unless every feature varies.
    """
    mean_D, global_var_D = x_ND.double().mean(dim=0), x_ND.double().var(dim=0, correction=0)
    if not torch.isfinite(global_var_D).all() or float(global_var_D.min()) <= 1e-10:
        raise InputError("i-vectors: a feature never changes, or is not a number; run stage 2 (features) again")
    ubm = DiagUbm(x_ND.new_ones(1, dtype=torch.float64), mean_D[None], global_var_D[None])
    generator = torch.Generator().manual_seed(seed)
    floor_D, likelihoods = VARIANCE_FLOOR * global_var_D, []
    while True:
        last = ubm.num_gaussians == num_gaussians
        for _ in range(iterations if last else max(1, iterations // 3)):
            ubm, likelihood = em_update(ubm, x_ND, floor_D)
            likelihoods.append(likelihood)
        if last:
            return ubm, likelihoods[-iterations:]
        ubm = split(ubm, min(ubm.num_gaussians, num_gaussians - ubm.num_gaussians), generator)


def em_update(ubm: DiagUbm, x_ND: Tensor, floor_D: Tensor) -> tuple[DiagUbm, float]:
    """One iteration of EM; also the mean log-likelihood per frame under the mixture that came in."""
    count_G = torch.zeros_like(ubm.weights_G)
    moments_G2D = ubm.means_GD.new_zeros(ubm.num_gaussians, 2 * ubm.dim)
    likelihood = 0.0
    for x_TD in x_ND.split(block_frames(x_ND.device)):
        log_TG = ubm.log_densities(x_TD)
        log_T = torch.logsumexp(log_TG, dim=1, keepdim=True)
        posterior_TG = (log_TG - log_T).exp_()
        count_G += posterior_TG.sum(dim=0)
        moments_G2D += posterior_TG.T @ torch.cat([x_TD, x_TD * x_TD], dim=1)
        likelihood += float(log_T.double().sum())
    mean_GD, square_GD = (moments_G2D / count_G.clamp_min(1e-10)[:, None]).chunk(2, dim=1)
    var_GD = (square_GD - mean_GD.square()).maximum(floor_D)
    occupied_G1 = (count_G >= MIN_COUNT)[:, None]
    weights_G = (count_G / len(x_ND)).clamp_min(1e-8)
    updated = DiagUbm(
        weights_G / weights_G.sum(), torch.where(occupied_G1, mean_GD, ubm.means_GD),
        torch.where(occupied_G1, var_GD, ubm.vars_GD),
    )  # fmt: skip
    return updated, likelihood / len(x_ND)


def split(ubm: DiagUbm, count: int, generator: torch.Generator) -> DiagUbm:
    """The mixture with `count` of its Gaussians in two halves each, moved apart in a random direction.

    Those are split whose frames lie farthest from their means, summed over features in units of the average variance.
    """
    spread_G = ubm.weights_G * (ubm.vars_GD / (ubm.weights_G @ ubm.vars_GD)).sum(dim=1)
    widest = spread_G.argsort(descending=True, stable=True)[:count]
    signs = torch.randint(0, 2, (count, ubm.dim), generator=generator).to(ubm.means_GD) * 2 - 1
    step = SPLIT * signs * ubm.vars_GD[widest].sqrt()
    weights_G, means_GD = ubm.weights_G.clone(), ubm.means_GD.clone()
    weights_G[widest] /= 2
    means_GD[widest] += step
    return DiagUbm(
        torch.cat([weights_G, weights_G[widest]]), torch.cat([means_GD, ubm.means_GD[widest] - step]),
        torch.cat([ubm.vars_GD, ubm.vars_GD[widest]]),
    )  # fmt: skip
