"""I-vectors by an extractor of Kaldi's, from the files of steps/online/nnet2/train_ivector_extractor.sh.

    final.ie            total-variability model         final.mat          matrix on spliced frames
    final.dubm          UBM, for posteriors             splice_opts        their context
    global_cmvn.stats   mean of all speakers            online_cmvn.conf   window of the moving mean

Computes what ivector-extract-online2 does with the options of extract_ivectors_online.sh: a row for every tenth frame,
from all frames of the speaker up to it. Posteriors are those of frames less a moving mean, and statistics are of frames
as they are, unless there is a file online_cmvn_iextractor. Kaldi solves for the i-vector by 15 iterations of conjugate
gradients, and this exactly.

Shapes: T frames, C cepstra, E spliced and D transformed values per frame, G Gaussians, K rows, S dimensions of the
i-vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr_am.data.kaldi_binary import KaldiReader, read_matrix, read_mixture
from asr_am.data.textfile import read_lines
from asr_am.errors import InputError
from asr_am.features.ivector.extractor import Extractor
from asr_am.features.ivector.ubm import DiagUbm

FILES = ("final.ie", "final.dubm", "final.mat", "global_cmvn.stats", "splice_opts", "online_cmvn.conf")
NORMALISED = "online_cmvn_iextractor"
REMEDY = "give a directory that steps/online/nnet2/train_ivector_extractor.sh wrote"
PERIOD = 10  # frames per row. This and the next three are the defaults of extract_ivectors_online.sh.
NUM_GSELECT, MIN_POST = 5, 0.025  # Gaussians per frame, and the smallest posterior
POSTERIOR_SCALE = 0.1
MAX_REMEMBERED = 1000.0  # frames of a speaker's earlier utterances
BLOCK = 100  # rows at a time


@dataclass(frozen=True)
class MovingMean:
    """Kaldi's OnlineCmvn: the mean of the last frames, of the speaker and of everybody where these are few.

    Attributes:
        everybody: sum and count of the frames of all speakers, float64 [C + 1].
        window: frames.
        speaker_frames: most frames that the speaker's earlier utterances count for.
        global_frames: most frames that those of all speakers count for.
    """

    everybody: np.ndarray
    window: int = 600
    speaker_frames: int = 600
    global_frames: int = 200

    def subtract(self, x_TC: np.ndarray, speaker: np.ndarray) -> np.ndarray:
        """Returns the frames less their means, float64 [T, C], given sum and count of the speaker's earlier frames."""
        sums_TC1 = with_ones(x_TC).cumsum(axis=0)
        sums_TC1[self.window :] -= sums_TC1[: -self.window].copy()
        others = [(speaker, min(self.speaker_frames, speaker[-1])), (self.everybody, self.global_frames)]
        for known, most in others:  # fill up the window, each with its mean
            if known[-1] > 0:
                lacking_T1 = (self.window - sums_TC1[:, -1:]).clip(0, most)
                sums_TC1 += lacking_T1 / known[-1] * known
        return x_TC - sums_TC1[:, :-1] / sums_TC1[:, -1:]


def with_ones(x_TC: np.ndarray) -> np.ndarray:
    """Returns the frames with a one each, float64 [T, C + 1], whose sums are sums and counts."""
    return np.pad(x_TC.astype(np.float64), ((0, 0), (0, 1)), constant_values=1.0)


@dataclass(frozen=True)
class KaldiExtractor:
    """The files of an extractor.

    Attributes:
        ubm: gives the posteriors.
        model: gives the i-vectors.
        matrix_DE: float64. A further column is an offset.
        context: frames spliced on the left and on the right.
        normalised: statistics, too, are of frames less the mean.
    """

    ubm: DiagUbm
    model: Extractor
    matrix_DE: np.ndarray
    context: tuple[int, int]
    mean: MovingMean
    normalised: bool

    @property
    def num_ceps(self) -> int:
        return len(self.mean.everybody) - 1

    def online(self, utterances: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields the i-vectors, float32 [K, S], of a speaker's utterances [T, C], in their order."""
        speaker = np.zeros(self.num_ceps + 1)
        counts_G, projected_S = self.ubm.weights_G.new_zeros(1), self.ubm.weights_G.new_zeros(1)
        for x_TC in utterances:
            rows = []
            for block_KG, block_KS in self._statistics(x_TC, speaker):
                counts_KG, projected_KS = block_KG.cumsum(dim=0) + counts_G, block_KS.cumsum(dim=0) + projected_S
                rows.append(self.model.ivectors(counts_KG, projected_KS))
                counts_G, projected_S = counts_KG[-1], projected_KS[-1]
            yield torch.cat(rows).float().numpy()
            speaker = speaker + with_ones(x_TC).sum(axis=0)
            speaker *= min(1.0, MAX_REMEMBERED / speaker[-1])
            scale = min(1.0, MAX_REMEMBERED * POSTERIOR_SCALE / float(counts_G.sum()))
            counts_G, projected_S = counts_G * scale, projected_S * scale

    def _statistics(self, x_TC: np.ndarray, speaker: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields counts and projected sums of the frames that each row adds, `BLOCK` rows at a time.

        The first row has the first frame, each other the ten up to its own. Frames after the last one are not used.
        """
        normalised_TD = self._transform(self.mean.subtract(x_TC, speaker))
        frames_TD = normalised_TD if self.normalised else self._transform(x_TC)
        used = len(x_TC) - (len(x_TC) - 1) % PERIOD
        begins = [0, *range(BLOCK * PERIOD + 1, used, BLOCK * PERIOD)]
        for begin, end in zip(begins, [*begins[1:], used], strict=True):
            posterior_KPG = _by_row(self._posteriors(normalised_TD[begin:end]))
            part_KPD = _by_row(frames_TD[begin:end].double())
            yield posterior_KPG.sum(dim=1), self.model.project(posterior_KPG.mT @ part_KPD)

    def _transform(self, x_TC: np.ndarray) -> Tensor:
        """Splices frames, repeating the first and last, and applies the matrix. Returns float32 [T, D]."""
        left, right = self.context
        places = np.arange(len(x_TC))[:, None] + np.arange(-left, right + 1)
        spliced_TE = x_TC[places.clip(0, len(x_TC) - 1)].reshape(len(x_TC), -1)
        inputs = spliced_TE.shape[1]
        y_TD = spliced_TE @ self.matrix_DE[:, :inputs].T + self.matrix_DE[:, inputs:].sum(axis=1)
        return torch.from_numpy(y_TD.astype(np.float32))

    def _posteriors(self, x_TD: Tensor) -> Tensor:
        """Returns the scaled posteriors of the best Gaussians of each frame, float64 [T, G]."""
        all_TG = self.ubm.posteriors(x_TD)
        best_TN, places_TN = all_TG.topk(min(NUM_GSELECT, all_TG.shape[1]), dim=1)
        kept_TN = best_TN >= MIN_POST * best_TN.sum(dim=1, keepdim=True)
        kept_TN[:, 0] = True
        best_TN = torch.where(kept_TN, best_TN, 0.0).double()
        best_TN *= POSTERIOR_SCALE / best_TN.sum(dim=1, keepdim=True)
        return torch.zeros_like(all_TG, dtype=torch.float64).scatter_(1, places_TN, best_TN)


def _by_row(x_TD: Tensor) -> Tensor:
    """Returns the frames of each row, [K, PERIOD, D]. Zeros stand for those before the first frame of an utterance."""
    return torch.nn.functional.pad(x_TD, (0, 0, -len(x_TD) % PERIOD, 0)).unflatten(0, (-1, PERIOD))


def read_extractor(folder: Path) -> KaldiExtractor:
    """Reads the files in `folder`. Raises InputError if one is missing, damaged or does not fit the others."""
    weights_G, means_GD, vars_GD = read_mixture(KaldiReader(folder / "final.dubm", REMEDY))
    ubm = DiagUbm(*(torch.from_numpy(x.astype(np.float64)) for x in (weights_G, means_GD, vars_GD)))
    extractor, matrix_DE = _read_model(folder / "final.ie"), read_matrix(folder / "final.mat", REMEDY)
    stats_2C1 = read_matrix(folder / "global_cmvn.stats", REMEDY)
    splice, options = _read_options(folder / "splice_opts"), _read_options(folder / "online_cmvn.conf")
    context = _integer(folder, splice, "left-context", 4), _integer(folder, splice, "right-context", 4)
    if options.get("norm-vars") == "true" or options.get("norm-means") == "false" or options.get("skip-dims"):
        raise InputError(f"{folder / 'online_cmvn.conf'}: only moving means are implemented; leave out its options")
    sizes = (
        _integer(folder, options, "cmn-window", MovingMean.window),
        _integer(folder, options, "speaker-frames", MovingMean.speaker_frames),
        _integer(folder, options, "global-frames", MovingMean.global_frames),
    )
    inputs = (sum(context) + 1) * (stats_2C1.shape[1] - 1)
    if len(stats_2C1) != 2 or stats_2C1[0, -1] <= 0 or matrix_DE.shape[1] - inputs not in (0, 1):
        raise InputError(f"{folder}: final.mat, splice_opts and global_cmvn.stats do not fit each other; {REMEDY}")
    shape = extractor.loadings_GDS.shape[:2]
    if shape != means_GD.shape or extractor.covariances_GDD.shape[1] != shape[1] or len(matrix_DE) != shape[1]:
        raise InputError(f"{folder}: final.ie, final.dubm and final.mat do not fit each other; {REMEDY}")
    mean = MovingMean(stats_2C1[0], *sizes)
    return KaldiExtractor(ubm, extractor, matrix_DE, context, mean, (folder / NORMALISED).exists())


def _read_model(path: Path) -> Extractor:
    reader = KaldiReader(path, REMEDY)
    reader.expect("<IvectorExtractor>")
    reader.expect("<w>")
    if reader.matrix().size:
        raise reader.error("weights that depend on the i-vector (--use-weights=true), which cannot be used online,")
    reader.expect("<w_vec>")
    reader.vector()
    reader.expect("<M>")
    loadings = [reader.matrix(np.float64) for _ in range(reader.integer())]
    reader.expect("<SigmaInv>")
    precisions = [reader.symmetric_matrix() for _ in loadings]
    reader.expect("<IvectorOffset>")
    offset = reader.number()
    reader.expect("</IvectorExtractor>")
    if len({(*x.shape, *y.shape) for x, y in zip(loadings, precisions, strict=True)}) != 1:
        raise reader.error("matrices of different sizes")
    loadings_GDS, precisions_GDD = torch.from_numpy(np.stack(loadings)), torch.from_numpy(np.stack(precisions))
    factors_GDD, info_G = torch.linalg.cholesky_ex(precisions_GDD)
    extractor = Extractor(loadings_GDS, torch.cholesky_inverse(factors_GDD), offset)
    if info_G.any() or not extractor.quadratic_GP.isfinite().all():
        raise reader.error("a matrix that is not finite or not positive definite")
    return extractor


def _read_options(path: Path) -> dict[str, str]:
    """Reads --name=value, several in a line or one, with comments after #."""
    words = [word for line in read_lines(path, REMEDY) for word in line.partition("#")[0].split()]
    if wrong := [word for word in words if not word.startswith("--")]:
        raise InputError(f"{path}: {wrong[0]} is not --name=value; {REMEDY}")
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name.replace("_", "-"): value if equals else "true" for name, equals, value in pairs}


def _integer(folder: Path, options: dict[str, str], name: str, default: int) -> int:
    value = options.get(name, str(default))
    if not value.isdecimal() or (name == "cmn-window" and int(value) == 0):
        raise InputError(f"{folder}: --{name}={value} is not a number of frames; {REMEDY}")
    return int(value)
