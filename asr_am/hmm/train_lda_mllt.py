"""Triphone training on LDA+MLLT features of spliced MFCCs (the steps of Kaldi's train_lda_mllt.sh).

Shapes: N frames, D feature dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.features.adapted import Projection
from asr_am.hmm.alignments import FramePdfs, load_labels
from asr_am.hmm.em import accumulate
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.gmm_system import PROJECTION
from asr_am.hmm.lda_mllt import accumulate_classes, accumulate_mllt, estimate_lda, estimate_mllt, transform_means
from asr_am.hmm.states import StateTable
from asr_am.hmm.train_tri import TriOptions, init_system
from asr_am.hmm.training import TrainingContext, align_and_save, speech_frames, subset_of, train_mixtures

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LdaOptions(TriOptions):
    """Options of the system lda_mllt.

    Attributes:
        context: frames spliced on each side.
        dim: dimensions that LDA keeps.
        mllt: passes (from 1) that begin with an MLLT update.
        device: torch device of MLLT accumulation.
    """

    utterances: int = 100_000
    context: int = 3
    dim: int = 40
    mllt: Sequence[int] = (2, 4, 6, 12)
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("context", "dim")

    def check(self, dim: int) -> None:
        """Raises InputError if spliced MFCCs have fewer values than LDA keeps. `dim` is that of MFCCs with deltas."""
        frames, mfccs = 2 * self.context + 1, dim // 3  # without deltas and double deltas
        if self.dim > frames * mfccs:
            raise InputError(
                f"align.lda_mllt.dim={self.dim}: {frames} frames of {mfccs} MFCCs have only {frames * mfccs} values; "
                "decrease it, or increase align.lda_mllt.context"
            )


def train_lda_mllt(ctx: TrainingContext, previous: Path, options: LdaOptions, out: Path) -> None:
    """Trains on set "train", aligns all sets, and writes the system with its lda.mat.

    Args:
        ctx: sets of MFCCs with deltas.
        previous: folder of the system whose alignments to start from.
    """
    part = subset_of(ctx, options.utterances)
    features = ProjectedFeatures(part, first_projection(part, previous, options), options.device)
    train = replace(part.sets["train"], frames=features.project("train"))
    adapted = replace(part, sets=part.sets | {"train": train})
    system, alignment, var_D = init_system("lda_mllt", adapted, previous, options)
    graphs = adapted.compile("train", system.tree, system.states, options.align)

    def transform(
        iteration: int, title: str, gmms: DiagGmms, frames: FrameStore, labels_N: np.ndarray
    ) -> tuple[DiagGmms, FrameStore]:
        if iteration not in options.mllt:
            return gmms, frames
        pdf_N = speech_frames(labels_N, ctx.lang, system.states)
        return features.update(title, gmms, frames, pdf_N)

    gmms, alignment = train_mixtures("lda_mllt", adapted, system, graphs, alignment, options, var_D, transform)
    out.mkdir(parents=True, exist_ok=True)
    features.projection.save(out / PROJECTION)
    done = projected_context(ctx, features.projection)
    trained = (graphs, alignment) if part is ctx else (None, None)
    align_and_save("lda_mllt", done, replace(system, gmms=gmms), options, out, *trained)


def first_projection(ctx: TrainingContext, previous: Path, options: LdaOptions) -> Projection:
    """Estimates LDA with the pdfs of the alignments in `previous` as classes. Silence frames are ignored."""
    states = StateTable.load(previous / "states.npz")
    labels_N = load_labels(previous / "ali", "train", ctx.train, states, ctx.others)
    pdf_N = speech_frames(labels_N, ctx.lang, states)
    num_static = ctx.train.dim // 3
    stats = accumulate_classes(ctx.train, num_static, options.context, pdf_N, states.num_pdfs, "lda_mllt: LDA")
    return estimate_lda(stats, options.dim, num_static)


def projected_context(ctx: TrainingContext, projection: Projection) -> TrainingContext:
    """Returns the same sets with projected frames."""
    features = ProjectedFeatures(ctx, projection)
    return replace(ctx, sets={n: replace(data, frames=features.project(n)) for n, data in ctx.sets.items()})


@dataclass
class ProjectedFeatures:
    """Projects the MFCCs of a training context, and updates the projection by MLLT.

    Attributes:
        ctx: sets of MFCCs with deltas.
    """

    ctx: TrainingContext
    projection: Projection
    device: str = "cpu"

    def project(self, subset: str) -> FrameStore:
        """Writes the projected frames of a set into the scratch folder."""
        mfcc, num_static = self.ctx.sets[subset].frames, self.projection.num_static
        spans = {utterance: mfcc.span(index) for index, utterance in enumerate(mfcc.utterances)}
        return FrameStore.write(
            self.ctx.scratch / f"frames_lda_{subset}", mfcc.utterances,
            lambda utterance: self.projection(mfcc.read(spans[utterance])[:, :num_static]), f"projecting {subset}",
        )  # fmt: skip

    def update(self, title: str, gmms: DiagGmms, frames: FrameStore, pdf_N: FramePdfs) -> tuple[DiagGmms, FrameStore]:
        """Estimates MLLT once from the frames with a pdf >= 0.

        Args:
            pdf_N: pdf of each frame, negative for frames to ignore.

        Returns:
            The mixtures and frames in the new feature space.
        """
        acc = accumulate(gmms, frames, pdf_N, self.ctx.jobs, f"{title}: EM for MLLT")
        stats = accumulate_mllt(gmms, frames, pdf_N, acc, self.ctx.jobs, f"{title}: MLLT", self.device)
        transform_DD, history = estimate_mllt(stats)
        logger.debug("%s: MLLT, log-likelihood per frame %+.3f", title, history[-1] - history[0])
        self.projection = self.projection.then(transform_DD)
        return transform_means(gmms, transform_DD), self.project("train")
