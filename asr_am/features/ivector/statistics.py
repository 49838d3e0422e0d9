"""Baum-Welch statistics under a UBM: zeroth, first and second order.

Shapes: T frames, D features, G Gaussians, K segments of an utterance, P = D (D + 1) / 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asr_am.features.ivector.ubm import DiagUbm, block_frames

MIN_COUNT = 1.0  # scaled frames that estimating a Gaussian's parameters needs


@dataclass(frozen=True)
class Statistics:
    """Scaled statistics of segments, float32.

    Attributes:
        counts_KG: zeroth order.
        first_KGD: first order.
    """

    counts_KG: Tensor
    first_KGD: Tensor

    def to(self, device: str) -> Statistics:
        return Statistics(self.counts_KG.to(device), self.first_KGD.to(device))


def stack(parts: Sequence[Statistics]) -> Statistics:
    """Concatenates rows in order."""
    return Statistics(torch.cat([s.counts_KG for s in parts]), torch.cat([s.first_KGD for s in parts]))


def segment_statistics(ubm: DiagUbm, x_TD: Tensor, period: int, scale: float) -> Statistics:
    """Computes the statistics of each segment of an utterance.

    Args:
        period: frames per segment. The last segment may be shorter.
        scale: scale on posteriors (Kaldi's posterior-scale), below one because neighbouring frames are correlated.
    """
    sums = [ubm.posteriors(part_TD).T @ F.pad(part_TD, (0, 1), value=1.0) for part_TD in x_TD.split(period)]
    sums_KGE = torch.stack(sums) * scale
    return Statistics(sums_KGE[:, :, -1], sums_KGE[:, :, :-1])


def second_order(ubm: DiagUbm, utterances: Iterable[Tensor], scale: float) -> Tensor:
    """Returns the sum of x x' of each Gaussian over the frames [T, D] of all utterances, float64 [G, D, D].

    Computed as one matrix product of posteriors with the distinct products of each frame.
    """
    rows, columns = torch.triu_indices(ubm.dim, ubm.dim)
    total_GQ = ubm.means_GD.new_zeros(ubm.num_gaussians, len(rows))
    for utterance_TD in utterances:
        for x_TD in utterance_TD.split(block_frames(utterance_TD.device)):
            total_GQ += ubm.posteriors(x_TD).T @ (x_TD[:, rows] * x_TD[:, columns])
    return unpack(total_GQ * scale, ubm.dim)


@dataclass(frozen=True)
class StatisticsTotals:
    """Statistics summed over many utterances, float64.

    Attributes:
        count_G: zeroth order.
        first_GD: first order.
        second_GDD: second order.
    """

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
        """Returns means [G, D] and full covariances [G, D, D]. Gaussians with low counts get the average."""
        count_G1 = self.count_G.clamp_min(1e-10)[:, None]
        means_GD = self.first_GD / count_G1
        covariances_GDD = self.second_GDD / count_G1[..., None] - means_GD[:, :, None] * means_GD[:, None, :]
        occupied_G = self.count_G >= MIN_COUNT
        share_G = self.count_G * occupied_G / (self.count_G * occupied_G).sum()
        means_GD[~occupied_G] = share_G @ means_GD
        covariances_GDD[~occupied_G] = (share_G[:, None, None] * covariances_GDD).sum(dim=0)
        return means_GD, covariances_GDD


def pack(full_XSS: Tensor) -> Tensor:
    """Packs matrices [..., S, S] into their upper triangles [..., S (S + 1) / 2], row by row."""
    rows, columns = torch.triu_indices(full_XSS.shape[-1], full_XSS.shape[-1], device=full_XSS.device)
    return full_XSS[..., rows, columns]


def unpack(packed: Tensor, size: int) -> Tensor:
    """Unpacks what `pack` returns to symmetric matrices [..., size, size]."""
    rows, columns = torch.triu_indices(size, size, device=packed.device)
    full = packed.new_empty(*packed.shape[:-1], size, size)
    full[..., rows, columns] = packed
    full[..., columns, rows] = packed
    return full
