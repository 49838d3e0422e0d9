"""The universal background model: one diagonal Gaussian mixture for the frames of all speakers, trained by EM.

i-vectors use only its posteriors.

Shapes: N or T frames, D features, G Gaussians.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from asr_am.errors import InputError
from asr_am.progress import ProgressBar

VARIANCE_FLOOR = 0.01  # share of the variance of all frames that no variance falls below
MIN_COUNT = 20.0  # frames that updating a Gaussian's mean and variances needs
SPLIT = 0.2  # shift of each half of a split Gaussian, in standard deviations
CACHED_FRAMES, GPU_FRAMES = 512, 65536  # frames at a time. On a CPU, posteriors of so few stay in the cache.


def block_frames(device: torch.device) -> int:
    """Returns the number of frames to process at a time."""
    return CACHED_FRAMES if device.type == "cpu" else GPU_FRAMES


@dataclass(frozen=True)
class DiagUbm:
    """A diagonal-covariance mixture, float64, on one device.

    Attributes:
        weights_G: sum to one.
    """

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
        """Coefficients of x and x*x in the log density, float32."""
        precisions_GD = 1.0 / self.vars_GD
        return torch.cat([self.means_GD * precisions_GD, -0.5 * precisions_GD], dim=1).T.float().contiguous()

    @cached_property
    def constant_G(self) -> Tensor:
        """Log weights plus log normalisers, float32."""
        squares_G = (self.means_GD.square() / self.vars_GD + self.vars_GD.log()).sum(dim=1)
        return (self.weights_G.log() - 0.5 * (squares_G + self.dim * math.log(2 * math.pi))).float()

    def log_densities(self, x_TD: Tensor) -> Tensor:
        """Returns log (weight x density) of every Gaussian for float32 frames, float32 [T, G]."""
        return torch.addmm(self.constant_G, torch.cat([x_TD, x_TD * x_TD], dim=1), self.linear_2DG)

    def posteriors(self, x_TD: Tensor) -> Tensor:
        """Returns posteriors, float32 [T, G]. Rows sum to one."""
        return torch.softmax(self.log_densities(x_TD), dim=1)


def train_ubm(x_ND: Tensor, num_gaussians: int, iterations: int, *, seed: int = 0) -> tuple[DiagUbm, list[float]]:
    """Trains a mixture by EM and splitting.

    Gaussians are split, the widest first, until there are enough. EM runs a third of `iterations` at each intermediate
    size, and all of them at the final one. Apart from the variance floor, no update lowers the likelihood.

    Args:
        x_ND: frames, float32.
        iterations: EM iterations at the final size.

    Returns:
        The mixture, and the mean log-likelihood per frame before each update at the final size.

    Raises:
        InputError: a feature is constant or not finite.
    """
    mean_D, global_var_D = x_ND.double().mean(dim=0), x_ND.double().var(dim=0, correction=0)
    if not torch.isfinite(global_var_D).all() or float(global_var_D.min()) <= 1e-10:
        raise InputError("i-vectors: a feature is constant or not finite; run stage 2 (features) again")
    ubm = DiagUbm(x_ND.new_ones(1, dtype=torch.float64), mean_D[None], global_var_D[None])
    generator = torch.Generator().manual_seed(seed)
    floor_D, likelihoods = VARIANCE_FLOOR * global_var_D, []
    sizes = [1]
    while sizes[-1] < num_gaussians:
        sizes.append(min(2 * sizes[-1], num_gaussians))
    passes = [max(1, iterations // 3)] * (len(sizes) - 1) + [iterations]
    with ProgressBar("training the UBM", sum(map(math.prod, zip(sizes, passes, strict=True)))) as bar:
        for size, count in zip(sizes, passes, strict=True):
            if size > 1:
                ubm = split(ubm, size - ubm.num_gaussians, generator)
            for _ in range(count):
                ubm, likelihood = em_update(ubm, x_ND, floor_D)
                likelihoods.append(likelihood)
                bar.advance(size)  # the cost of a pass
    return ubm, likelihoods[-iterations:]


def em_update(ubm: DiagUbm, x_ND: Tensor, floor_D: Tensor) -> tuple[DiagUbm, float]:
    """Runs one iteration of EM. Also returns the mean log-likelihood per frame under the given mixture."""
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
    """Splits `count` Gaussians into two halves each, moved apart in a random direction.

    Chooses those with the largest total squared deviation of their frames, in units of the average variance.
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
