"""Acoustic scores of an utterance from Gaussian mixtures, a network or an archive.

A *source* says in plain values where scores come from, so that it can be sent to worker processes. Its `load()` makes
the `Scorer` there.

A network trained on 21-frame chunks has never seen more context. An utterance is therefore scored in overlapping
windows of that length. The log-posterior of a frame is a weighted mean over the windows that contain it. The weight
falls linearly towards the edges of a window, where the model had less context on one side.

A network with an output for every n frames is trained on the middle one. It scores a window n times, each shifted by a
frame, so that every frame is the middle one of an output.

Shapes: B windows, C frames of a window, F features, K stacks of frames, L graph labels, P pdfs, T frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from asr_am.data.kaldi_archive import Entry, read_scp, write_archive
from asr_am.decode.loading import load_gmms, load_network
from asr_am.egs.store import log_priors
from asr_am.errors import InputError
from asr_am.features.feature_archive import load_matrix
from asr_am.features.fusion import middle_labels, repeat_stacks, stack_frames, stack_of
from asr_am.hmm.states import StateTable
from asr_am.train.ctc_loss import ctc_scores

if TYPE_CHECKING:
    from asr_am.hmm.gmm import DiagGmms
    from asr_am.models.acoustic import AcousticModel

Features = Callable[[str], np.ndarray]  # utterance -> float32 [T, F]


@dataclass(frozen=True)
class Window:
    """Windows of `chunk` frames every `hop` frames (chunk 0: the whole utterance at once)."""

    chunk: int
    hop: int

    @classmethod
    def parse(cls, text: str, option: str = "decode.windows") -> Window:
        """Parses "21/10" or "whole", the value of `option`. Raises InputError for anything else."""
        if text == "whole":
            return cls(0, 0)
        chunk, slash, hop = text.partition("/")
        if not (slash and chunk.isdecimal() and hop.isdecimal() and 1 <= int(hop) <= int(chunk)):
            raise InputError(f"{option}: {text!r} is not <chunk>/<hop> with 1 <= hop <= chunk, nor `whole`")
        return cls(int(chunk), int(hop))

    def __str__(self) -> str:
        return f"{self.chunk}/{self.hop}" if self.chunk else "whole"

    def starts(self, num_frames: int) -> np.ndarray:
        """Returns the first frames of the windows. The last window ends with the utterance."""
        if self.chunk == 0 or num_frames <= self.chunk:
            return np.zeros(1, dtype=np.int64)
        last = num_frames - self.chunk
        return np.append(np.arange(0, last, self.hop), last)


BATCH = 256  # windows that are scored together, fewer if they have more than MAX_POSTERIORS
MAX_POSTERIORS = 1 << 24  # 64 MiB
CHAIN_SCALE = np.float32(10.0)  # makes the best LM weight of chain models, 1 without it, as large as that of others


@torch.inference_mode()
def log_posteriors(
    model: nn.Module, features_TF: np.ndarray, window: Window, batch: int = BATCH, softmax: bool = True
) -> np.ndarray:
    """Computes log-posteriors of an utterance, averaged over windows.

    Args:
        model: maps x_BTF and lengths_B to logits [B, K, P], in eval mode.
        softmax: False returns the logits of a chain model. An output is repeated for each of its frames.

    Returns:
        float32 [T, P].

    Raises:
        InputError: the utterance has no frames.
    """
    num_frames, rate = len(features_TF), 1 if softmax else getattr(model, "subsampling", 1)
    if num_frames == 0:
        raise InputError("an utterance has no frames and cannot be scored; remove it")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x_TF = torch.from_numpy(np.ascontiguousarray(features_TF, dtype=np.float32)).to(device)
    size = min(window.chunk or num_frames, num_frames)
    frame_C = torch.arange(size, device=device)
    # rounded up, so that outputs of all windows are for the same frames
    starts_B = np.unique(-(-window.starts(num_frames) // rate) * rate)
    frames_BC = torch.from_numpy(starts_B).to(device)[:, None] + frame_C
    weight_C = torch.minimum(frame_C, size - 1 - frame_C) + 1.0
    end = num_frames + rate - 1  # of the last window
    total_TP, weight_T = None, torch.zeros(end, device=device)
    for frames in torch.split(frames_BC, batch):
        x_BCF = x_TF[frames.clamp(max=num_frames - 1)]
        value_BCP = _score(model, x_BCF, window.chunk, softmax).mul_(weight_C[:, None])
        if total_TP is None:
            total_TP = torch.zeros(end, value_BCP.shape[2], device=device)
        total_TP.index_add_(0, frames.reshape(-1), value_BCP.reshape(-1, value_BCP.shape[2]))
        weight_T.index_add_(0, frames.reshape(-1), weight_C.repeat(len(frames)))
    assert total_TP is not None
    return total_TP[:num_frames].div_(weight_T[:num_frames, None]).cpu().numpy()


def _score(model: nn.Module, x_BCF: Tensor, chunk: int, softmax: bool) -> Tensor:
    """Returns log-posteriors, or logits, [B, C, P]. An utterance shorter than a chunk is padded, as in training."""
    size, rate = x_BCF.shape[1], getattr(model, "subsampling", 1)

    def logits(frames_BCF: Tensor) -> Tensor:
        batch, length, _ = frames_BCF.shape
        padded_BCF = nn.functional.pad(frames_BCF, (0, 0, 0, max(chunk - length, 0)))
        return model(padded_BCF, torch.full((batch,), length, dtype=torch.int64)).float()

    if not softmax:
        return logits(x_BCF).repeat_interleave(rate, dim=1)[:, :size]
    frame_C = torch.arange(-(-size // rate) * rate, device=x_BCF.device)  # whole outputs
    shifted = [(frame_C + shift - rate // 2).clamp(0, size - 1) for shift in range(rate)]
    scores_BKnP = torch.stack([torch.log_softmax(logits(x_BCF[:, index_C]), dim=-1) for index_C in shifted], dim=2)
    return scores_BKnP.flatten(1, 2)[:, :size]


class Scorer(Protocol):
    """Interface between an acoustic model and the search."""

    def log_likelihoods(self, utterance: str) -> np.ndarray:
        """Returns float32 [T, P]: log p(frame | pdf) up to a constant per frame."""
        ...


class ScoreSource(Protocol):
    """Description of where the scores of a set come from, hashable and picklable."""

    def load(self) -> Scorer: ...


@dataclass(frozen=True)
class GmmScorer:
    """Scores from Gaussian mixtures."""

    gmms: DiagGmms
    features: Features

    def log_likelihoods(self, utterance: str) -> np.ndarray:
        return self.gmms.log_likelihoods(torch.from_numpy(self.features(utterance))).numpy()


@dataclass(frozen=True)
class NeuralScorer:
    """Scaled log-likelihoods from a network: log-posteriors minus log-priors (Bourlard and Morgan).

    Attributes:
        model: the network in eval mode.
        log_priors_P: see `asr_am.egs.store.log_priors`.
        window: windows to score in, counted in stacks.
        stack: number of frames that the network takes as one. Scores are repeated for each frame of a stack.
    """

    model: nn.Module
    features: Features
    log_priors_P: np.ndarray
    window: Window
    stack: int = 1

    def log_likelihoods(self, utterance: str) -> np.ndarray:
        features_TF = self.features(utterance)
        batch = max(1, min(BATCH, MAX_POSTERIORS // (max(1, self.window.chunk) * len(self.log_priors_P))))
        posteriors_KP = log_posteriors(self.model, stack_frames(features_TF, self.stack), self.window, batch)
        posteriors_TP = repeat_stacks(posteriors_KP, self.stack, len(features_TF))
        if posteriors_TP.shape[1] != len(self.log_priors_P):
            raise InputError(
                f"the model has {posteriors_TP.shape[1]} outputs, its alignments {len(self.log_priors_P)} pdfs; "
                "train it on these alignments"
            )
        return np.subtract(posteriors_TP, self.log_priors_P, out=posteriors_TP)


@dataclass(frozen=True)
class ChainScorer:
    """Scores from a chain model, one per step of its HMMs: its outputs as they are, but for their scale. Or from CTC.

    Attributes:
        model: the network in eval mode.
        ctc: its outputs are those of `ctc_loss`.
    """

    model: AcousticModel
    features: Features
    window: Window
    ctc: bool = False

    def log_likelihoods(self, utterance: str) -> np.ndarray:
        batch = max(1, min(BATCH, MAX_POSTERIORS // (max(1, self.window.chunk) * self.model.outputs)))
        scores_TP = log_posteriors(self.model, self.features(utterance), self.window, batch, softmax=False)
        scores_KP = middle_labels(scores_TP, self.model.subsampling)
        return CHAIN_SCALE * (ctc_scores(torch.from_numpy(scores_KP)).numpy() if self.ctc else scores_KP)


@dataclass(frozen=True)
class MeanScorer:
    """The mean of the scores of several models of the same pdfs: a product of their likelihoods, equally weighted."""

    scorers: tuple[NeuralScorer | ChainScorer, ...]

    @property
    def model(self) -> nn.Module:
        """All models, which a device takes together."""
        return nn.ModuleList([scorer.model for scorer in self.scorers])

    def log_likelihoods(self, utterance: str) -> np.ndarray:
        first_TP, *others = (scorer.log_likelihoods(utterance) for scorer in self.scorers)
        for scores_TP in others:
            first_TP += scores_TP
        first_TP /= np.float32(len(self.scorers))
        return first_TP


@dataclass(frozen=True)
class ArchiveScorer:
    """Scores written before, by `write_log_likelihoods` or by Kaldi.

    `entries` maps utterances to their place.
    """

    entries: dict[str, Entry]

    def log_likelihoods(self, utterance: str) -> np.ndarray:
        if utterance not in self.entries:
            raise InputError(f"utterance {utterance}: not in the archive of log-likelihoods; write it again")
        return load_matrix(self.entries[utterance], "write it again")


@dataclass(frozen=True)
class GmmSource:
    """Scores of a set from the mixtures in `align_dir` (a system of stage align)."""

    align_dir: Path
    features_dir: Path
    subset: str

    def load(self) -> GmmScorer:
        from asr_am.features.adapted import open_features
        from asr_am.hmm.gmm_system import GmmSystem

        reader = open_features(self.features_dir, GmmSystem.kind(self.align_dir), self.subset)
        return GmmScorer(load_gmms(self.align_dir / "gmm.npz"), reader.__getitem__)


@dataclass(frozen=True)
class NeuralSource:
    """Scores of a set from the checkpoint `model`, which records its feature kind and pdf counts."""

    model: Path
    features_dir: Path
    subset: str
    window: Window

    def load(self) -> NeuralScorer | ChainScorer:
        from asr_am.features.fusion import InputReader

        model, info = load_network(self.model)
        counts, kind = info.get("pdf_counts"), info["kind"]
        if info.get("chain") or info.get("ctc"):
            reader = InputReader(self.features_dir, kind, self.subset)
            return ChainScorer(model, reader.__getitem__, self.window, bool(info.get("ctc")))
        if counts is None or len(counts) != info["num_pdfs"] or int(counts.sum()) == 0:
            raise InputError(
                f"{self.model}: has no counts of its {info['num_pdfs']} pdfs, so no priors; train the model again"
            )
        features = InputReader(self.features_dir, kind, self.subset).__getitem__
        return NeuralScorer(model.eval(), features, log_priors(counts.numpy()), self.window, stack_of(kind))


@dataclass(frozen=True)
class MeanSource:
    """The mean of the scores of several networks."""

    sources: tuple[NeuralSource, ...]

    def load(self) -> MeanScorer:
        return MeanScorer(tuple(source.load() for source in self.sources))


@dataclass(frozen=True)
class ArchiveSource:
    """Scores from the archive with the index `scp`, see `write_log_likelihoods`."""

    scp: Path

    def load(self) -> ArchiveScorer:
        return ArchiveScorer(read_scp(self.scp, "write it with write_log_likelihoods"))


def write_log_likelihoods(scorer: Scorer, utterances: Iterable[str], states: StateTable | None, scp: Path) -> None:
    """Writes scores as a Kaldi archive.

    Args:
        states: if given, write a column per graph label (column l - 1 for label l, as `latgen-faster-mapped` needs with
            our HCLG.fst). If None, write a column per pdf, as `ArchiveSource` needs.
        scp: the index. The archive is beside it.
    """

    def entries() -> Iterator[tuple[str, np.ndarray]]:
        for utterance in utterances:
            scores_TP = scorer.log_likelihoods(utterance)
            yield utterance, np.ascontiguousarray(scores_TP if states is None else scores_TP[:, states.pdf_L])

    write_archive(scp.parent, scp.stem, entries())
