"""Triphones on spliced MFCCs through LDA and MLLT (the steps of Kaldi's train_lda_mllt.sh).

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
from asr_am.hmm.alignments import load_labels
from asr_am.hmm.em import accumulate
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.gmm_system import PROJECTION
from asr_am.hmm.lda_mllt import accumulate_classes, accumulate_mllt, estimate_lda, estimate_mllt, transform_means
from asr_am.hmm.states import StateTable
from asr_am.hmm.train_tri import TriOptions, init_system
from asr_am.hmm.training import TrainingContext, align_and_save, pdfs_of, train_mixtures, without_silence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LdaOptions(TriOptions):
    """context: frames spliced on either side. dim: kept by LDA. mllt: passes that begin with an update of MLLT.

    device: torch's name of where the sums of MLLT are done.
    """

    context: int = 3
    dim: int = 40
    mllt: Sequence[int] = (2, 4, 6, 12)
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("context", "dim")

    def check(self, dim: int) -> None:
        """InputError where spliced MFCCs, a third of `dim` because of their deltas, have fewer values than are kept."""
        frames, mfccs = 2 * self.context + 1, dim // 3
        if self.dim > frames * mfccs:
            raise InputError(
                f"align.lda_mllt.dim={self.dim}: {frames} frames of {mfccs} MFCCs have {frames * mfccs} values; choose "
                "it smaller, or align.lda_mllt.context larger"
            )


def train_lda_mllt(ctx: TrainingContext, previous: Path, options: LdaOptions, out: Path, *, final: Path) -> None:
    """Train on set "train" with the alignments in `previous`, align all sets, write everything and lda.mat to `out`.

    The frames of `place` are MFCCs with deltas.
    """
    features = ProjectedFeatures(ctx, first_projection(ctx, previous, options), options.device)
    train = replace(ctx.sets["train"], frames=features.project("train"))
    adapted = replace(ctx, sets=ctx.sets | {"train": train})
    system, alignment, var_D = init_system("lda_mllt", adapted, previous, options)
    graphs = adapted.compile("train", system.tree, system.states, options.align)

    def transform(
        iteration: int, title: str, gmms: DiagGmms, frames: FrameStore, labels_N: np.ndarray
    ) -> tuple[DiagGmms, FrameStore]:
        if iteration not in options.mllt:
            return gmms, frames
        pdf_N = without_silence(pdfs_of(labels_N, system.states), ctx.lang, system.states)
        return features.update(title, gmms, frames, pdf_N)

    gmms, alignment = train_mixtures("lda_mllt", adapted, system, graphs, alignment, options, var_D, transform)
    out.mkdir(parents=True, exist_ok=True)
    features.projection.save(out / PROJECTION)
    done = projected_context(ctx, features.projection)
    align_and_save("lda_mllt", done, replace(system, gmms=gmms), graphs, alignment, options, out, final)


def first_projection(ctx: TrainingContext, previous: Path, options: LdaOptions) -> Projection:
    """LDA of the pdfs that the alignments in `previous` give; silence does not count."""
    states = StateTable.load(previous / "states.npz")
    labels_N = load_labels(previous / "ali", "train", ctx.train, states)
    pdf_N = without_silence(pdfs_of(labels_N, states), ctx.lang, states)
    num_static = ctx.train.dim // 3
    stats = accumulate_classes(ctx.train, num_static, options.context, pdf_N, states.num_pdfs, "lda_mllt: LDA")
    return estimate_lda(stats, options.dim, num_static)


def projected_context(ctx: TrainingContext, projection: Projection) -> TrainingContext:
    """The same sets with projected frames."""
    features = ProjectedFeatures(ctx, projection)
    return replace(ctx, sets={n: replace(data, frames=features.project(n)) for n, data in ctx.sets.items()})


@dataclass
class ProjectedFeatures:
    """The MFCCs of `place` through a projection that training improves."""

    ctx: TrainingContext
    projection: Projection
    device: str = "cpu"

    def project(self, subset: str) -> FrameStore:
        """Write the projected frames of a set into the scratch folder."""
        mfcc, num_static = self.ctx.sets[subset].frames, self.projection.num_static
        spans = {utterance: mfcc.span(index) for index, utterance in enumerate(mfcc.utterances)}
        return FrameStore.write(
            self.ctx.scratch / f"frames_lda_{subset}", mfcc.utterances,
            lambda utterance: self.projection(mfcc.x_ND[spans[utterance], :num_static]), f"projecting {subset}",
        )  # fmt: skip

    def update(self, title: str, gmms: DiagGmms, frames: FrameStore, pdf_N: np.ndarray) -> tuple[DiagGmms, FrameStore]:
        """One estimate of MLLT from the frames with a pdf >= 0: the Gaussians and frames after it."""
        acc = accumulate(gmms, frames, pdf_N, self.ctx.jobs, f"{title}: EM for MLLT")
        stats = accumulate_mllt(gmms, frames, pdf_N, acc, self.ctx.jobs, f"{title}: MLLT", self.device)
        transform_DD, history = estimate_mllt(stats)
        logger.info("%s: MLLT, log-likelihood per frame %+.3f", title, history[-1] - history[0])
        self.projection = self.projection.then(transform_DD)
        return transform_means(gmms, transform_DD), self.project("train")
