"""EM training of the i-vector extractor, with the minimum-divergence step (Kenny; Kaldi's IvectorExtractorStats).

The latent variables are the vectors y of utterances. Posteriors of the UBM fix which Gaussian a frame belongs to, so
the quantity that rises at every iteration is the exact marginal likelihood of the statistics.

Statistics are stored in files, one per block of utterances, that are read one at a time. A killed run resumes: existing
files are not computed again, and EM starts from the last finished iteration.

Shapes as in `extractor`. Y = sum over utterances of X_g E[y]', R = sum of gamma_g E[y y'].
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr_am import disk
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.features.ivector.extractor import Extractor, initial_extractor
from asr_am.features.ivector.model_files import (
    load_extractor,
    load_statistics,
    load_totals,
    load_ubm,
    save_extractor,
    save_statistics,
)
from asr_am.features.ivector.speech import Speech
from asr_am.features.ivector.statistics import (
    MIN_COUNT,
    Statistics,
    pack,
    second_order,
    segment_statistics,
    stack,
    unpack,
)
from asr_am.parallel import parallel_map
from asr_am.progress import track

logger = logging.getLogger(__name__)

FRAMES_PER_GAUSSIAN, UTTERANCES_PER_DIMENSION = 400, 2  # minimum amount of training speech
BATCH = 64  # utterances or segments processed at a time
COVARIANCE_FLOOR = 0.1  # share of the average covariance that no covariance falls below in any direction, as in Kaldi
BLOCK = 200  # utterances per file of statistics
SHARES = 8  # fixed parts of the E-step, so that sums are the same to the last bit for any number of jobs
LIKELIHOODS = "extractor.json"


@dataclass(frozen=True)
class IvectorOptions:
    """Sizes and training of i-vector models.

    Attributes:
        normalise: subtract the cepstral mean of each speaker.
        ubm_iterations: EM iterations of the UBM at its final size.
        ubm_frames: maximum number of frames that the UBM is trained on.
        iterations: EM iterations of the extractor.
        max_count: total count that statistics are scaled down to, 0: no limit.
        period: frames per segment.
        online: sets with online i-vectors. Other sets have one per speaker.
        online_utterances: utterances after which online estimation starts anew, 0: only at the next speaker.
        seed: random seed of initialisation.
    """

    gaussians: int
    dim: int
    normalise: bool = False
    ubm_iterations: int = 12
    ubm_frames: int = 500_000
    iterations: int = 10
    posterior_scale: float = 0.1
    max_count: float = 100.0
    period: int = 300
    online: Sequence[str] = ("train",)
    online_utterances: int = 4
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        sizes = ("gaussians", "dim", "ubm_iterations", "ubm_frames", "iterations", "period")
        if wrong := [name for name in sizes if getattr(self, name) < 1]:
            raise InputError(f"ivectors.{wrong[0]}={getattr(self, wrong[0])}: must be at least 1")
        if not 0 < self.posterior_scale <= 1 or self.max_count < 0 or self.online_utterances < 0:
            raise InputError(
                "ivectors: posterior_scale must be above 0 and at most 1, max_count and online_utterances not negative"
            )

    def check_enough(self, frames: int, utterances: int) -> None:
        """Raises InputError if there are too few frames for the UBM or too few utterances for the extractor."""
        gaussians, dim = frames // FRAMES_PER_GAUSSIAN, utterances // UTTERANCES_PER_DIMENSION
        if self.gaussians > gaussians:
            raise InputError(
                f"ivectors.gaussians={self.gaussians}: {frames} frames of training speech are enough for {gaussians} "
                f"Gaussians; choose ivectors.gaussians={gaussians} or fewer, or add speech"
            )
        if self.dim > dim:
            raise InputError(
                f"ivectors.dim={self.dim}: {utterances} training utterances are enough for {dim} dimensions; choose "
                f"ivectors.dim={dim} or less, or add speech"
            )


@dataclass
class ExtractorStats:
    """Statistics of the M-step, float64.

    Attributes:
        num_utterances: number of latent vectors.
        count_G: sum of the counts gamma_g.
        cross_GDS: Y.
        square_GP: R, packed.
        mean_S: sum of E[y].
        mean_square_SS: sum of E[y y'].
        log_evidence: sum of the log evidences.
    """

    num_utterances: int
    count_G: Tensor
    cross_GDS: Tensor
    square_GP: Tensor
    mean_S: Tensor
    mean_square_SS: Tensor
    log_evidence: float

    @classmethod
    def zeros(cls, extractor: Extractor) -> ExtractorStats:
        (gaussians, _, dim), zeros = extractor.loadings_GDS.shape, extractor.loadings_GDS.new_zeros
        cross_GDS, square_GP = zeros(extractor.loadings_GDS.shape), zeros(gaussians, dim * (dim + 1) // 2)
        return cls(0, zeros(gaussians), cross_GDS, square_GP, zeros(dim), zeros(dim, dim), 0.0)

    def __add__(self, other: ExtractorStats) -> ExtractorStats:
        return ExtractorStats(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def accumulate(extractor: Extractor, batches: Iterable[Statistics]) -> ExtractorStats:
    """Runs the E-step over batches of statistics."""
    sums = ExtractorStats.zeros(extractor)
    for statistics in batches:
        parts = zip(statistics.counts_KG.split(BATCH), statistics.first_KGD.split(BATCH), strict=True)
        for counts_BG, first_BGD in parts:
            counts_BG, first_BX = counts_BG.double(), first_BGD.double().flatten(1)
            posterior = extractor.posterior(counts_BG, extractor.project(first_BGD))
            mean_BS = posterior.mean_BS
            square_BSS = posterior.covariance() + mean_BS[:, :, None] * mean_BS[:, None, :]
            sums.num_utterances += len(mean_BS)
            sums.count_G += counts_BG.sum(dim=0)
            sums.cross_GDS += (first_BX.T @ mean_BS).view_as(sums.cross_GDS)
            sums.square_GP += counts_BG.T @ pack(square_BSS)
            sums.mean_S += mean_BS.sum(dim=0)
            sums.mean_square_SS += square_BSS.sum(dim=0)
            sums.log_evidence += float(posterior.log_evidence().sum())
    return sums


def log_likelihood(extractor: Extractor, sums: ExtractorStats, second_GDD: Tensor) -> float:
    """Returns the exact marginal log-likelihood per frame of the accumulated statistics, with UBM posteriors fixed."""
    rest = extractor.frames_log_likelihood(sums.count_G, second_GDD, sums.num_utterances)
    return (sums.log_evidence + rest) / float(sums.count_G.sum())


def maximise(extractor: Extractor, sums: ExtractorStats, second_GDD: Tensor, floor_DD: Tensor) -> Extractor:
    """Runs the M-step: loadings, then covariances no smaller than `floor_DD`, then the prior."""
    occupied_G = sums.count_G >= MIN_COUNT
    square_GSS = unpack(sums.square_GP[occupied_G], extractor.dim)
    cross_GDS, count_G11 = sums.cross_GDS[occupied_G], sums.count_G[occupied_G, None, None]
    solved_GDS = torch.linalg.solve(square_GSS, cross_GDS.mT).mT
    scatter_GDD = (second_GDD[occupied_G] - solved_GDS @ cross_GDS.mT) / count_G11
    loadings_GDS, covariances_GDD = extractor.loadings_GDS.clone(), extractor.covariances_GDD.clone()
    loadings_GDS[occupied_G] = solved_GDS
    covariances_GDD[occupied_G] = apply_floor(0.5 * (scatter_GDD + scatter_GDD.mT), floor_DD)
    return minimise_divergence(Extractor(loadings_GDS, covariances_GDD, extractor.offset), sums)


def covariance_floor(count_G: Tensor, covariances_GDD: Tensor) -> Tensor:
    """Returns a share of the average covariance, [D, D], fixed in training so that the likelihood can only rise."""
    return COVARIANCE_FLOOR * (count_G[:, None, None] * covariances_GDD).sum(dim=0) / count_G.sum()


def apply_floor(covariances_GDD: Tensor, floor_DD: Tensor) -> Tensor:
    """Raises eigenvalues relative to `floor_DD` to at least one: the maximum-likelihood covariances with that floor."""
    factor_DD = torch.linalg.cholesky(floor_DD)
    half_GDD = torch.linalg.solve_triangular(factor_DD, covariances_GDD, upper=False)
    relative_GDD = torch.linalg.solve_triangular(factor_DD, half_GDD.mT, upper=False)
    values_GD, vectors_GDD = torch.linalg.eigh(0.5 * (relative_GDD + relative_GDD.mT))
    root_GDD = factor_DD @ vectors_GDD * values_GD.clamp_min(1.0).sqrt()[:, None, :]
    return root_GDD @ root_GDD.mT


def minimise_divergence(extractor: Extractor, sums: ExtractorStats) -> Extractor:
    """Gives the prior the mean and covariance of the posteriors, then changes axes so that it is N(o e_1, I) again.

    y' = H T y, T whitening, H the reflection that maps the mean onto the first axis. M' = M (H T)^-1.
    """
    mean_S = sums.mean_S / sums.num_utterances
    covariance_SS = sums.mean_square_SS / sums.num_utterances - torch.outer(mean_S, mean_S)
    factor_SS = torch.linalg.cholesky(covariance_SS)
    whitened_S = torch.linalg.solve_triangular(factor_SS, mean_S[:, None], upper=False)[:, 0]
    offset = math.sqrt(float(whitened_S @ whitened_S))
    return Extractor(extractor.loadings_GDS @ (factor_SS @ reflection(whitened_S)), extractor.covariances_GDD, offset)


def reflection(direction_S: Tensor) -> Tensor:
    """Returns the Householder matrix [S, S] (symmetric, its own inverse) that maps `direction_S` to the first axis."""
    normal_S = direction_S / direction_S.norm()
    normal_S = torch.cat([normal_S[:1] - 1.0, normal_S[1:]])
    length = float(normal_S @ normal_S)
    identity_SS = torch.eye(len(normal_S)).to(normal_S)
    return identity_SS if length < 1e-20 else identity_SS - 2.0 / length * torch.outer(normal_S, normal_S)


def write_statistics(speech: Speech, ubm: Path, work: Path, scale: float, jobs: int) -> list[Path]:
    """Writes the statistics of every utterance of a set. Returns the files, one per block of utterances."""
    utterances = speech.reader.utterances
    begins = range(0, len(utterances), BLOCK)
    blocks = [(work / f"statistics.{b // BLOCK}.npz", utterances[b : b + BLOCK]) for b in begins]
    missing = [block for block in blocks if not block[0].exists()]
    parallel_map(partial(write_block, speech, ubm, scale), missing, jobs, "statistics for i-vectors")
    return [path for path, _ in blocks]


def write_block(speech: Speech, ubm_path: Path, scale: float, block: tuple[Path, Sequence[str]]) -> None:
    """Writes the statistics of one block of utterances."""
    ubm = load_ubm(ubm_path).to(speech.device)
    frames = [speech.frames(utterance) for utterance in block[1]]
    statistics = stack([segment_statistics(ubm, x_TD, len(x_TD), scale) for x_TD in frames])
    save_statistics(block[0], statistics, second_order(ubm, frames, scale))


def train_extractor(blocks: Sequence[Path], work: Path, options: IvectorOptions, jobs: int, device: str) -> Extractor:
    """Runs EM, starting from the UBM's means and full covariances estimated with its posteriors.

    Args:
        blocks: files of statistics.
        work: folder of the extractor of each iteration.
    """
    totals = reduce(add, map(load_totals, blocks)).to(device)
    means_GD, covariances_GDD = totals.moments()
    floor_DD = covariance_floor(totals.count_G, covariances_GDD)
    path = max(work.glob("extractor.*.npz"), key=_iteration, default=work / "extractor.0.npz")
    if not path.exists():
        covariances_GDD = apply_floor(covariances_GDD, floor_DD)
        save_extractor(path, initial_extractor(means_GD, covariances_GDD, options.dim, options.seed))
    shares = [[blocks[k] for k in part] for part in np.array_split(np.arange(len(blocks)), SHARES) if len(part)]
    for iteration in track(range(_iteration(path), options.iterations), "training the i-vector extractor"):
        e_step = partial(accumulate_share, path, device)
        sums = reduce(add, parallel_map(e_step, shares, jobs, f"i-vector EM {iteration + 1}"))
        extractor = load_extractor(path).to(device)
        _report(work / LIKELIHOODS, iteration, log_likelihood(extractor, sums, totals.second_GDD))
        done, path = path, work / f"extractor.{iteration + 1}.npz"
        save_extractor(path, maximise(extractor, sums, totals.second_GDD, floor_DD))
        disk.remove(done)
    return load_extractor(path)


def _iteration(path: Path) -> int:
    return int(path.name.split(".")[1])


def _report(path: Path, iteration: int, likelihood: float) -> None:
    """Logs the likelihood before an update, and appends it to the file of earlier ones."""
    logger.debug("i-vector extractor, iteration %d: log-likelihood per frame %.4f", iteration + 1, likelihood)
    earlier = json.loads(path.read_text(encoding="utf-8"))[:iteration] if iteration else []
    write_lines(path, [json.dumps([*earlier, likelihood])])


def accumulate_share(extractor: Path, device: str, blocks: Sequence[Path]) -> ExtractorStats:
    """Runs the E-step over some blocks."""
    batches = (load_statistics(path).to(device) for path in blocks)
    return accumulate(load_extractor(extractor).to(device), batches)
