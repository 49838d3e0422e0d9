"""LDA of spliced frames and MLLT.

LDA: the classes are the pdfs of an alignment. The rows of the result are the directions in which the class means differ
most, scaled so that the covariance within classes is the identity (Haeb-Umbach & Ney 1992; Kaldi's est-lda). Diagonal
Gaussians model the covariances that remain, and MLLT improves their fit.

MLLT: a linear transform of all features that maximises the likelihood of diagonal Gaussians (Gales 1999). The objective
per frame is log |det A| - sum_d a_d G_d a_d' / (2 count) with rows a_d and
G_d = sum_n sum_g p_ng (x_n - mean_g) (x_n - mean_g)' / var_gd. The Gaussians move with the features: means become
A mean, and variances stay, to be re-estimated in the next pass of EM.

Shapes: N frames of a set, P pdfs, C values of a spliced frame, S static features of a frame, D dimensions kept by LDA
and feature dimension of MLLT, G Gaussians, F = D (D + 1) / 2.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from asr_am.errors import InputError
from asr_am.features.adapted import Projection, splice
from asr_am.features.ivector.statistics import unpack
from asr_am.hmm.alignments import FramePdfs
from asr_am.hmm.em import Accumulators
from asr_am.hmm.expectations import Expectation, Occupation, add_weighted_outer, packed_size
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.parallel import parallel_map
from asr_am.progress import track

SPLICED_BLOCK = 20_000  # spliced frames in memory at a time
BLOCK = 16_384  # frames in memory at a time
MAX_TASKS = 64  # limits memory: the statistics of all tasks are held until they are summed
GAUSSIAN_BLOCK = 1024  # Gaussians whose outer products are in memory at a time


@dataclass(frozen=True)
class ClassStats:
    """Statistics of LDA, float64.

    Attributes:
        count_P: frames of each class.
        sums_PC: sum of the frames of each class.
        second_CC: sum of x x' over all frames.
    """

    count_P: np.ndarray
    sums_PC: np.ndarray
    second_CC: np.ndarray


def accumulate_classes(
    mfcc: FrameStore, num_static: int, context: int, pdf_N: FramePdfs | np.ndarray, num_pdfs: int, description: str
) -> ClassStats:
    """Accumulates statistics of spliced static features.

    Args:
        mfcc: frames whose first `num_static` columns are the static features.
        context: frames spliced on each side.
        pdf_N: class of each frame, negative for frames to ignore.
    """
    width = num_static * (2 * context + 1)
    stats = ClassStats(np.zeros(num_pdfs), np.zeros((num_pdfs, width)), np.zeros((width, width)))
    pending: list[np.ndarray] = []
    begin = 0
    for utterance in track(range(len(mfcc.utterances)), description):
        span = mfcc.span(utterance)
        pending.append(splice(mfcc.read(span)[:, :num_static], context))
        if span.stop - begin >= SPLICED_BLOCK or utterance == len(mfcc.utterances) - 1:
            _add(stats, np.concatenate(pending).astype(np.float64), pdf_N[begin : span.stop])
            pending, begin = [], span.stop
    return stats


def _add(stats: ClassStats, x_NC: np.ndarray, pdf_N: np.ndarray) -> None:
    order_N = np.argsort(pdf_N, kind="stable")
    order_N = order_N[np.searchsorted(pdf_N[order_N], 0) :]
    pdfs, first, counts = np.unique(pdf_N[order_N], return_index=True, return_counts=True)
    if len(pdfs) == 0:
        return
    x_NC = x_NC[order_N]
    stats.count_P[pdfs] += counts
    stats.sums_PC[pdfs] += np.add.reduceat(x_NC, first, axis=0)
    stats.second_CC[:] += x_NC.T @ x_NC


def estimate_lda(stats: ClassStats, dim: int, num_static: int) -> Projection:
    """Estimates the projection to the most discriminative directions.

    Args:
        dim: dimensions to keep, at most C.

    Raises:
        InputError: the features are linearly dependent.
    """
    total = stats.count_P.sum()
    mean_C = stats.sums_PC.sum(axis=0) / max(total, 1)
    seen = stats.count_P > 0
    scaled_PC = stats.sums_PC[seen] / np.sqrt(stats.count_P[seen, None] * total)
    of_means_CC = scaled_PC.T @ scaled_PC
    within_CC = stats.second_CC / max(total, 1) - of_means_CC
    try:
        _, vectors_CC = scipy.linalg.eigh(of_means_CC - np.outer(mean_C, mean_C), within_CC)
    except (np.linalg.LinAlgError, ValueError) as error:
        raise InputError(
            f"align: MFCCs of {total:.0f} frames of speech are linearly dependent, so LDA has no solution; "
            "check the recordings, or use align=triphone"
        ) from error
    return Projection(np.ascontiguousarray(vectors_CC[:, ::-1][:, :dim].T, dtype=np.float32), num_static)


@dataclass(frozen=True)
class MlltStats:
    """Statistics of MLLT.

    Attributes:
        count: frames.
        quadratic_DDD: the G_d, float64.
    """

    count: float
    quadratic_DDD: Tensor


def accumulate_mllt(
    gmms: DiagGmms, frames: FrameStore, pdf_N: FramePdfs | np.ndarray, acc: Accumulators, jobs: int,
    description: str, device: str = "cpu",
) -> MlltStats:  # fmt: skip
    """Accumulates MLLT statistics in one pass over the frames.

    Args:
        pdf_N: pdf of each frame, negative for frames to ignore.
        acc: EM statistics of the same frames and mixtures.
        jobs: worker processes. One is used where the device is a GPU.
    """
    cuts = np.linspace(0, frames.num_frames, min(MAX_TASKS, 1 + frames.num_frames // BLOCK) + 1).astype(int).tolist()
    work = functools.partial(_accumulate_range, gmms, frames, pdf_N, device)
    parts = parallel_map(work, list(itertools.pairwise(cuts)), jobs if device == "cpu" else 1, description, here=True)
    packed_DF = torch.from_numpy(np.sum(parts, axis=0))
    return MlltStats(float(acc.occ_G.sum()), unpack(packed_DF, gmms.dim) - _mean_correction(gmms, acc))


def _accumulate_range(
    gmms: DiagGmms, frames: FrameStore, pdf_N: FramePdfs | np.ndarray, device: str, rows: tuple[int, int]
) -> np.ndarray:
    """Returns the sums of x x' / var, [D, F], of the frames in `rows`."""
    expectation = Expectation(gmms, device=device)
    total_DF = torch.zeros(gmms.dim, packed_size(gmms.dim), dtype=torch.float64, device=expectation.device)
    for begin in range(rows[0], rows[1], BLOCK):
        block = slice(begin, min(begin + BLOCK, rows[1]))
        x_ND = expectation.tensor(frames.read(block))
        precision_ND, _ = expectation(x_ND, Occupation.of_alignment(pdf_N[block]))
        add_weighted_outer(total_DF, precision_ND, x_ND)
    return total_DF.cpu().numpy()


def _mean_correction(gmms: DiagGmms, acc: Accumulators) -> Tensor:
    """Returns what turns moments about zero into moments about the means, [D, D, D].

    It is sum_g (s m' + m s' - occ m m') / var_gd, with s the sum of x, and is subtracted.
    """
    total_DDD = torch.zeros(gmms.dim, gmms.dim, gmms.dim, dtype=torch.float64)
    for begin in range(0, gmms.num_gaussians, GAUSSIAN_BLOCK):
        rows = slice(begin, begin + GAUSSIAN_BLOCK)
        mean, var = (torch.from_numpy(part[rows].astype(np.float64)) for part in (gmms.means_GD, gmms.vars_GD))
        centred = torch.from_numpy(acc.sums_G2D[rows, : gmms.dim] - acc.occ_G[rows, None] / 2 * mean.numpy())
        cross_DDD = torch.einsum("gd,gef->def", 1 / var, centred[:, :, None] * mean[:, None, :])
        total_DDD += cross_DDD + cross_DDD.transpose(1, 2)
    return total_DDD


def objective(stats: MlltStats, transform_DD: Tensor) -> float:
    """Returns the objective per frame."""
    squares = torch.einsum("de,def,df->", transform_DD, stats.quadratic_DDD, transform_DD)
    return float(torch.linalg.slogdet(transform_DD).logabsdet - squares / (2 * stats.count))


def estimate_mllt(stats: MlltStats, sweeps: int = 40) -> tuple[np.ndarray, list[float]]:
    """Estimates the transform by `sweeps` over its rows.

    Row d becomes c G_d^-1 sqrt(count / (c G_d^-1 c')) with c its cofactors (Gales 1999, equation 21).

    Returns:
        The transform [D, D], and the objective per frame before the first and after each sweep.
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
    """Returns the Gaussians of transformed features, with unchanged variances."""
    return replace(gmms, means_GD=(gmms.means_GD.astype(np.float64) @ transform_DD.T).astype(np.float32))
