"""EM training of diagonal Gaussian mixtures from frames whose pdf is known.

Threads take ranges of utterances. The statistics of the ranges are added up in their order, so they do not depend on
the number of threads. Log-likelihoods are float32, and sums float64. Updates follow Kaldi's gmm-est (minimum occupancy,
variance floor) and gmm-mixup (targets by a power of the occupancy, splitting of the heaviest Gaussian).

Shapes: N frames, D feature dimension, G Gaussians of all pdfs, P pdfs, K Gaussians of one pdf.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import numpy as np

from asr_am.hmm.alignments import FramePdfs
from asr_am.hmm.frame_loops import Mixtures, accumulate_frames
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.parallel import threaded_map

BLOCK = 2**17  # frames in memory per thread


@dataclass
class Accumulators:
    """Statistics of Gaussians.

    Attributes:
        occ_G: occupancies, float64.
        sums_G2D: occupancy-weighted sums of x and of x*x, float64.
        loglik: log-likelihood summed over all frames.
    """

    occ_G: np.ndarray
    sums_G2D: np.ndarray
    loglik: float
    frames: int

    @classmethod
    def zeros(cls, gmms: DiagGmms) -> Accumulators:
        """Returns empty statistics."""
        return cls(np.zeros(gmms.num_gaussians), np.zeros((gmms.num_gaussians, 2 * gmms.dim)), 0.0, 0)

    def add(self, other: Accumulators) -> None:
        """Adds other statistics of the same Gaussians."""
        self.occ_G += other.occ_G
        self.sums_G2D += other.sums_G2D
        self.loglik += other.loglik
        self.frames += other.frames

    @property
    def loglik_per_frame(self) -> float:
        return self.loglik / max(self.frames, 1)


@dataclass(frozen=True)
class UpdateOptions:
    """Options of the M-step.

    Attributes:
        min_occupancy: Gaussians with fewer frames are removed.
        variance_floor: as a share of the global variance.
    """

    min_occupancy: float = 10.0
    variance_floor: float = 0.01


def accumulate(
    gmms: DiagGmms, frames: FrameStore, pdf_N: FramePdfs | np.ndarray, jobs: int, description: str,
    stats_frames: FrameStore | None = None,
) -> Accumulators:  # fmt: skip
    """Runs the E-step over all frames of the store, in their order.

    Args:
        frames: frames that posteriors are computed from.
        pdf_N: pdf of each frame, negative for frames to ignore.
        stats_frames: other features of the same frames, to accumulate with the posteriors of `frames`, as Kaldi's
            gmm-acc-stats-twofeats does. `update` then returns the same Gaussians for those features.
    """
    total = Accumulators.zeros(gmms)
    work = functools.partial(_accumulate_range, gmms, gmms.packed(), frames, stats_frames or frames, pdf_N)
    for part in threaded_map(work, frames.ranges(), jobs, description):
        total.add(part)
    return total


def _accumulate_range(
    gmms: DiagGmms, mixtures: Mixtures, frames: FrameStore, stats_frames: FrameStore, pdf_N: FramePdfs | np.ndarray,
    utterances: tuple[int, int],
) -> Accumulators:  # fmt: skip
    """Accumulates a range of utterances, a block of frames at a time."""
    rows, sums_GW = frames.rows(*utterances), np.zeros(mixtures.linear_GW.shape)
    total = Accumulators(np.zeros(gmms.num_gaussians), sums_GW[:, : 2 * gmms.dim], 0.0, 0)
    for begin in range(rows.start, rows.stop, BLOCK):
        block = slice(begin, min(begin + BLOCK, rows.stop))
        pdf_T, x_TD = np.asarray(pdf_N[block], dtype=np.int32), frames.read(block)
        other_TD = x_TD if stats_frames is frames else stats_frames.read(block)
        total.loglik += accumulate_frames(mixtures, pdf_T, x_TD, other_TD, total.occ_G, sums_GW)
        total.frames += int((pdf_T >= 0).sum())
    return total


def update(gmms: DiagGmms, acc: Accumulators, options: UpdateOptions, global_var_D: np.ndarray) -> DiagGmms:
    """Runs the M-step.

    Gaussians with too few frames are removed, but never the last one of a pdf. Pdfs without frames keep their
    parameters.

    Args:
        gmms: mixtures that the statistics were accumulated with.
        global_var_D: variance of all frames, which the floor is relative to.
    """
    keep_G = _with_enough_frames(gmms, acc.occ_G, options.min_occupancy)
    occ_G = np.maximum(acc.occ_G, 1e-10)[:, None]
    means_GD = acc.sums_G2D[:, : gmms.dim] / occ_G
    vars_GD = np.maximum(acc.sums_G2D[:, gmms.dim :] / occ_G - means_GD**2, options.variance_floor * global_var_D)
    seen_G = acc.occ_G >= 1.0  # less than one frame gives no meaningful mean
    means_GD = np.where(seen_G[:, None], means_GD, gmms.means_GD)
    vars_GD = np.where(seen_G[:, None], vars_GD, gmms.vars_GD)

    pdf_G = np.repeat(np.arange(gmms.num_pdfs), np.diff(gmms.offsets_P1))[keep_G]
    weights_G = np.where(seen_G, acc.occ_G, 1e-5)[keep_G]
    weights_G /= np.bincount(pdf_G, weights_G)[pdf_G]
    return _from_rows(pdf_G, np.maximum(weights_G, 1e-5), means_GD[keep_G], vars_GD[keep_G], gmms.num_pdfs)


def _with_enough_frames(gmms: DiagGmms, occ_G: np.ndarray, minimum: float) -> np.ndarray:
    """Returns which Gaussians to keep, bool [G]: those with `minimum` frames, and the most occupied one of each pdf."""
    keep_G = occ_G >= minimum
    highest_P = np.maximum.reduceat(occ_G, gmms.offsets_P1[:-1])
    for pdf in np.flatnonzero(highest_P < minimum):
        begin, end = gmms.offsets_P1[pdf : pdf + 2]
        keep_G[begin + int(np.argmax(occ_G[begin:end]))] = True
    return keep_G


def mix_up(gmms: DiagGmms, occ_P: np.ndarray, total: int, rng: np.random.Generator, power: float = 0.25,
           min_count: float = 20.0, perturb: float = 0.01) -> DiagGmms:  # fmt: skip
    """Splits Gaussians until there are about `total`, shared among pdfs in proportion to their frames to the `power`.

    In each pdf the heaviest Gaussian is split. Its weight is halved, and the two means are moved apart in a random
    direction. No pdf loses Gaussians.

    Args:
        occ_P: frames of each pdf.
        total: number of Gaussians wanted.
        min_count: frames per Gaussian that a pdf needs at least.
        perturb: distance of each mean from the old one, in standard deviations.
    """
    targets_P = _split_targets(np.diff(gmms.offsets_P1), occ_P, total, power, min_count)
    rows = [_split_pdf(gmms, pdf, int(target), rng, perturb) for pdf, target in enumerate(targets_P)]
    weights_G, means_GD, vars_GD = (np.concatenate(column) for column in zip(*rows, strict=True))
    return _from_rows(np.repeat(np.arange(gmms.num_pdfs), targets_P), weights_G, means_GD, vars_GD, gmms.num_pdfs)


def _split_targets(sizes_P: np.ndarray, occ_P: np.ndarray, total: int, power: float, min_count: float) -> np.ndarray:
    """Returns the number of Gaussians each pdf should have. The next one goes to the pdf with most frames^power each.

    Unlike in Kaldi, Gaussians that a rare pdf may not have are not given to others, since silence would get them all.
    """
    share_P = np.maximum(occ_P, 0).astype(np.float64) ** power
    queue = [(-share, pdf) for pdf, share in enumerate(share_P.tolist()) if share > 0]
    heapq.heapify(queue)
    targets_P = np.ones_like(sizes_P)
    for _ in range(total - len(sizes_P) if queue else 0):
        pdf = queue[0][1]
        targets_P[pdf] += 1
        heapq.heapreplace(queue, (-share_P[pdf] / targets_P[pdf], pdf))
    allowed_P = np.maximum(occ_P // min_count, 1).astype(targets_P.dtype)
    return np.maximum(np.minimum(targets_P, allowed_P), sizes_P)


def _split_pdf(
    gmms: DiagGmms, pdf: int, target: int, rng: np.random.Generator, perturb: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns weights, means and variances of one pdf split into `target` Gaussians."""
    begin, end = gmms.offsets_P1[pdf : pdf + 2]
    weights, means, variances = (
        list(gmms.weights_G[begin:end]),
        list(gmms.means_GD[begin:end]),
        list(gmms.vars_GD[begin:end]),
    )
    while len(weights) < target:
        heaviest = int(np.argmax(weights))
        shift = perturb * np.sqrt(variances[heaviest]) * rng.standard_normal(gmms.dim).astype(np.float32)
        weights[heaviest] *= 0.5
        weights.append(weights[heaviest])
        means.append(means[heaviest] + shift)
        means[heaviest] = means[heaviest] - shift
        variances.append(variances[heaviest])
    return np.array(weights), np.array(means), np.array(variances)


def _from_rows(
    pdf_G: np.ndarray, weights_G: np.ndarray, means_GD: np.ndarray, vars_GD: np.ndarray, num_pdfs: int
) -> DiagGmms:
    """Builds mixtures from rows sorted by pdf."""
    offsets_P1 = np.searchsorted(pdf_G, np.arange(num_pdfs + 1)).astype(np.int64)
    weights_G, means_GD, vars_GD = (array.astype(np.float32) for array in (weights_G, means_GD, vars_GD))
    return DiagGmms(weights_G, means_GD, vars_GD, offsets_P1)
