"""Baum-Welch statistics of speech under a UBM: how often each Gaussian was heard, and the sums of its frames.

Shapes: T frames, D features, G Gaussians, K segments of an utterance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asr_am.features.ivector.ubm import DiagUbm, block_frames

MIN_COUNT = 1.0  # scaled frames below which nothing is estimated of a Gaussian


@dataclass(frozen=True)
class Statistics:
    """counts_KG, first_KGD: float32, a row for each segment, already scaled."""

    counts_KG: Tensor
    first_KGD: Tensor

    def to(self, device: str) -> Statistics:
        return Statistics(self.counts_KG.to(device), self.first_KGD.to(device))


def stack(found: Sequence[Statistics]) -> Statistics:
    """All rows, in order."""
    return Statistics(torch.cat([s.counts_KG for s in found]), torch.cat([s.first_KGD for s in found]))


def segment_statistics(ubm: DiagUbm, x_TD: Tensor, period: int, scale: float) -> Statistics:
    """Of each stretch of `period` frames; the last may be shorter.

    scale: of the posteriors, below one because neighbouring frames say nearly the same (Kaldi's posterior-scale).
    """
    sums = [ubm.posteriors(part_TD).T @ F.pad(part_TD, (0, 1), value=1.0) for part_TD in x_TD.split(period)]
    sums_KGE = torch.stack(sums) * scale
    return Statistics(sums_KGE[:, :, -1], sums_KGE[:, :, :-1])


def second_order(ubm: DiagUbm, utterances: Iterable[Tensor], scale: float) -> Tensor:
    """The sums of x x' of each Gaussian over frames [T, D] of all utterances: float64 [G, D, D].

    Written as a product of posteriors with the distinct products of a frame, it is one matrix product.
    """
    rows, columns = torch.triu_indices(ubm.dim, ubm.dim)
    total_GQ = ubm.means_GD.new_zeros(ubm.num_gaussians, len(rows))
    for utterance_TD in utterances:
        for x_TD in utterance_TD.split(block_frames(utterance_TD.device)):
            total_GQ += ubm.posteriors(x_TD).T @ (x_TD[:, rows] * x_TD[:, columns])
    return unpack(total_GQ * scale, ubm.dim)


@dataclass(frozen=True)
class StatisticsTotals:
    """ExtractorStats over many utterances, float64: count_G, first_GD, second_GDD."""

    count_G: Tensor
    first_GD: Tensor
    second_GDD: Tensor

    def __add__(self, other: StatisticsTotals) -> StatisticsTotals:
        return StatisticsTotals(
            self.count_G + other.count_G, self.first_GD + other.first_GD, self.second_GDD + other.second_GDD
        )

    def to(self, device: str) -> StatisticsTotals:
        return StatisticsTotals(self.count_G.to(device), self.first_GD.to(device), self.second_GDD.to(device))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means [G, D] and full covariances [G, D, D] of the Gaussians; those hardly heard get the average of all."""
        count_G1 = self.count_G.clamp_min(1e-10)[:, None]
        means_GD = self.first_GD / count_G1
        covariances_GDD = self.second_GDD / count_G1[..., None] - means_GD[:, :, None] * means_GD[:, None, :]
        occupied_G = self.count_G >= MIN_COUNT
        share_G = self.count_G * occupied_G / (self.count_G * occupied_G).sum()
        means_GD[~occupied_G] = share_G @ means_GD
        covariances_GDD[~occupied_G] = (share_G[:, None, None] * covariances_GDD).sum(dim=0)
        return means_GD, covariances_GDD


def pack(full_XSS: Tensor) -> Tensor:
    """The upper triangles [..., S (S + 1) / 2] of matrices [..., S, S], row by row."""
    rows, columns = torch.triu_indices(full_XSS.shape[-1], full_XSS.shape[-1], device=full_XSS.device)
    return full_XSS[..., rows, columns]


def unpack(packed: Tensor, size: int) -> Tensor:
    """Symmetric matrices [..., size, size] from their upper triangles."""
    rows, columns = torch.triu_indices(size, size, device=packed.device)
    full = packed.new_empty(*packed.shape[:-1], size, size)
    full[..., rows, columns] = packed
    full[..., columns, rows] = packed
    return full
