"""EM training of diagonal Gaussian mixtures from frames whose pdf is known.

Frames are grouped by pdf, and each worker process takes a range of pdfs, so the statistics do not depend on the number
of workers. Products are float32, and sums over more than `BLOCK` frames float64. Updates follow Kaldi's gmm-est
(minimum occupancy, variance floor) and gmm-mixup (targets by a power of the occupancy, splitting of the heaviest
Gaussian).

Shapes: N frames, D feature dimension, G Gaussians of all pdfs, P pdfs, K Gaussians of one pdf.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.parallel import parallel_map

BLOCK = 8192  # frames per float32 sum


@dataclass
class Accumulators:
    """Statistics of Gaussians.

    Attributes:
        occ_G: occupancies, float64.
        sums_G2D: occupancy-weighted sums of x and of x*x, float64.
        loglik: log-likelihood summed over all frames.
        frames: number of frames.
    """

    occ_G: np.ndarray
    sums_G2D: np.ndarray
    loglik: float
    frames: int

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
    gmms: DiagGmms, frames: FrameStore, pdf_N: np.ndarray, jobs: int, description: str,
    stats_frames: FrameStore | None = None,
) -> Accumulators:  # fmt: skip
    """Runs the E-step over all frames of the store.

    Args:
        gmms: current mixtures.
        frames: frames that posteriors are computed from.
        pdf_N: pdf of each frame, negative for frames to ignore.
        jobs: worker processes.
        description: label of the progress bar.
        stats_frames: other features of the same frames, to accumulate with the posteriors of `frames`, as Kaldi's
            gmm-acc-stats-twofeats does. `update` then returns the same Gaussians for those features.
    """
    order_N = np.argsort(pdf_N, kind="stable")
    bounds_P1 = np.searchsorted(pdf_N[order_N], np.arange(gmms.num_pdfs + 1))
    tasks = [
        (first, bounds_P1[first : last + 1] - bounds_P1[first], order_N[bounds_P1[first] : bounds_P1[last]])
        for first, last in _even_ranges(bounds_P1, 2 * jobs)
    ]
    parts = parallel_map(functools.partial(_accumulate_range, gmms, frames, stats_frames), tasks, jobs, description)
    return Accumulators(
        np.concatenate([part.occ_G for part in parts]), np.concatenate([part.sums_G2D for part in parts]),
        sum(part.loglik for part in parts), sum(part.frames for part in parts),
    )  # fmt: skip


def _even_ranges(bounds_P1: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Splits the pdfs into up to `count` ranges of about equally many frames."""
    targets = np.linspace(bounds_P1[0], bounds_P1[-1], count + 1)[1:-1]
    cuts = np.unique(np.concatenate([[0], np.searchsorted(bounds_P1, targets), [len(bounds_P1) - 1]]))
    return list(itertools.pairwise(cuts.tolist()))


def _accumulate_range(
    gmms: DiagGmms, frames: FrameStore, stats_frames: FrameStore | None, task: tuple[int, np.ndarray, np.ndarray]
) -> Accumulators:
    """Accumulates the pdfs from `first` on. The frames of the i-th are rows bounds[i] to bounds[i + 1] of `order`."""
    first, bounds, order = task
    start = gmms.offsets_P1[first]
    size = int(gmms.offsets_P1[first + len(bounds) - 1] - start)
    total = Accumulators(np.zeros(size), np.zeros((size, 2 * gmms.dim)), 0.0, len(order))
    for index, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        rows = slice(int(gmms.offsets_P1[first + index]), int(gmms.offsets_P1[first + index + 1]))
        linear, constant = torch.from_numpy(gmms.linear_G2D[rows]), torch.from_numpy(gmms.constant_G[rows])
        into = slice(rows.start - start, rows.stop - start)
        for block in range(begin, end, BLOCK):
            chosen = order[block : min(block + BLOCK, end)]
            other_ND = None if stats_frames is None else torch.from_numpy(stats_frames.x_ND[chosen])
            _accumulate_block(linear, constant, torch.from_numpy(frames.x_ND[chosen]), other_ND, total, into)
    return total


def _accumulate_block(
    linear: Tensor, constant: Tensor, x_ND: Tensor, other_ND: Tensor | None, total: Accumulators, into: slice
) -> None:
    """Accumulates frames of one pdf into rows `into` of `total`. The sums are of `other_ND` where it is given."""
    x_N2D = torch.cat([x_ND, x_ND * x_ND], dim=1)
    posterior_KN = torch.addmm(constant[:, None], linear, x_N2D.T).numpy()  # log densities, normalised in place below
    highest_N = posterior_KN.max(axis=0)
    posterior_KN -= highest_N
    np.exp(posterior_KN, out=posterior_KN)
    sum_N = posterior_KN.sum(axis=0)
    posterior_KN /= sum_N
    total.loglik += float((highest_N + np.log(sum_N)).sum(dtype=np.float64))
    total.occ_G[into] += posterior_KN.sum(axis=1)
    if other_ND is not None:
        x_N2D = torch.cat([other_ND, other_ND * other_ND], dim=1)
    total.sums_G2D[into] += (torch.from_numpy(posterior_KN) @ x_N2D).numpy()


def update(gmms: DiagGmms, acc: Accumulators, options: UpdateOptions, global_var_D: np.ndarray) -> DiagGmms:
    """Runs the M-step.

    Gaussians with too few frames are removed, but never the last one of a pdf. Pdfs without frames keep their
    parameters.

    Args:
        gmms: mixtures that the statistics were accumulated with.
        acc: statistics.
        options: minimum occupancy and variance floor.
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
        gmms: mixtures to split.
        occ_P: frames of each pdf.
        total: number of Gaussians wanted.
        rng: source of the directions.
        power: exponent of the occupancy.
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
