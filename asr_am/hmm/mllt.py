"""MLLT: a linear transform of all features that makes diagonal Gaussians fit them best (Gales 1999).

Shapes: N frames, D feature dimension, G Gaussians, F = D (D + 1) / 2.

The objective per frame is log |det A| - sum_d a_d G_d a_d' / (2 count) with rows a_d and
G_d = sum_n sum_g p_ng (x_n - mean_g) (x_n - mean_g)' / var_gd. The Gaussians move with the features: means become
A mean, variances stay, to be estimated anew in the next pass of EM.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asr_am.hmm.em import Accumulators
from asr_am.hmm.expected import Expectation, Occupation
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.outer import add_weighted_outer, packed_size, unpack
from asr_am.parallel import parallel_map

BLOCK = 16_384  # frames in memory at a time
TASKS = 64  # at most: what each returns has to be held
GAUSSIANS = 1024  # whose outer products are in memory at a time


@dataclass(frozen=True)
class MlltStats:
    """count: frames; quadratic_DDD: the G_d, float64."""

    count: float
    quadratic_DDD: Tensor


def accumulate_mllt(
    gmms: DiagGmms, frames: FrameStore, pdf_N: np.ndarray, acc: Accumulators, jobs: int, description: str,
    device: str = "cpu",
) -> MlltStats:  # fmt: skip
    """One pass over the frames with a pdf >= 0; `acc`: EM's statistics of the same frames and mixtures."""
    cuts = np.linspace(0, frames.num_frames, min(TASKS, 1 + frames.num_frames // BLOCK) + 1).astype(int).tolist()
    tasks = [(begin, pdf_N[begin:end]) for begin, end in itertools.pairwise(cuts)]
    work = functools.partial(_sum_squares, gmms, frames, device)
    parts = parallel_map(work, tasks, jobs if device == "cpu" else 1, description)
    packed_DF = torch.from_numpy(np.sum(parts, axis=0))
    return MlltStats(float(acc.occ_G.sum()), unpack(packed_DF, gmms.dim) - _about_zero(gmms, acc))


def _sum_squares(gmms: DiagGmms, frames: FrameStore, device: str, task: tuple[int, np.ndarray]) -> np.ndarray:
    """The sums of x x' / var, [D, F], of the frames from `first` on whose pdfs are given."""
    first, pdf_N = task
    expectation = Expectation(gmms, device=device)
    total_DF = torch.zeros(gmms.dim, packed_size(gmms.dim), dtype=torch.float64, device=expectation.device)
    for begin in range(0, len(pdf_N), BLOCK):
        block_N = pdf_N[begin : begin + BLOCK]
        x_ND = expectation.tensor(frames.x_ND[first + begin : first + begin + len(block_N)])
        precision_ND, _ = expectation(x_ND, Occupation.of_alignment(block_N))
        add_weighted_outer(total_DF, precision_ND, x_ND)
    return total_DF.cpu().numpy()


def _about_zero(gmms: DiagGmms, acc: Accumulators) -> Tensor:
    """What moments about zero have too much, [D, D, D]: sum_g (s m' + m s' - occ m m') / var_gd, s the sum of x."""
    total_DDD = torch.zeros(gmms.dim, gmms.dim, gmms.dim, dtype=torch.float64)
    for begin in range(0, gmms.num_gaussians, GAUSSIANS):
        rows = slice(begin, begin + GAUSSIANS)
        mean, var = (torch.from_numpy(part[rows].astype(np.float64)) for part in (gmms.means_GD, gmms.vars_GD))
        centred = torch.from_numpy(acc.sums_G2D[rows, : gmms.dim] - acc.occ_G[rows, None] / 2 * mean.numpy())
        cross_DDD = torch.einsum("gd,gef->def", 1 / var, centred[:, :, None] * mean[:, None, :])
        total_DDD += cross_DDD + cross_DDD.transpose(1, 2)
    return total_DDD


def objective(stats: MlltStats, transform_DD: Tensor) -> float:
    """Per frame."""
    squares = torch.einsum("de,def,df->", transform_DD, stats.quadratic_DDD, transform_DD)
    return float(torch.linalg.slogdet(transform_DD).logabsdet - squares / (2 * stats.count))


def estimate_mllt(stats: MlltStats, sweeps: int = 40) -> tuple[np.ndarray, list[float]]:
    """The transform [D, D] after `sweeps` over its rows, and the objective before and after each of them.

    Row d becomes c G_d^-1 sqrt(count / (c G_d^-1 c')) with c its cofactors (Gales 1999, equation 21).
    """
    dim = len(stats.quadratic_DDD)
    transform_DD = torch.eye(dim, dtype=torch.float64)
    inverse_DDD = torch.linalg.inv(stats.quadratic_DDD)
    history = [objective(stats, transform_DD)]
    for _ in range(sweeps):
        for d in range(dim):
            cofactor_D = torch.linalg.inv(transform_DD)[:, d]
            towards_D = inverse_DDD[d] @ cofactor_D
            transform_DD[d] = towards_D * torch.sqrt(stats.count / (towards_D @ cofactor_D))
        history.append(objective(stats, transform_DD))
    return transform_DD.numpy(), history


def transform_means(gmms: DiagGmms, transform_DD: np.ndarray) -> DiagGmms:
    """The Gaussians of transformed features, their variances as they were."""
    return replace(gmms, means_GD=(gmms.means_GD.astype(np.float64) @ transform_DD.T).astype(np.float32))
