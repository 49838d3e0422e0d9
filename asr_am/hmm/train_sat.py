"""Speaker-adaptive training: triphones on fMLLR features (Kaldi's train_sat.sh).

Adds to the files of a system:

    lda.mat                     unchanged
    transforms/train_trans.*    transforms of the training speakers
    unadapted.npz               mixtures with the same Gaussians for unadapted features, for the first pass over a new
                                speaker (Kaldi's final.alimdl)

Shapes: N frames, D feature dimension, E = D + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from asr_am.features.adapted import Projection, apply, mean_transform, write_transforms
from asr_am.hmm.adaptation import FmllrOptions, adapt_speakers, aligned_groups
from asr_am.hmm.alignments import FramePdfs, load_labels
from asr_am.hmm.em import UpdateOptions, accumulate, update
from asr_am.hmm.flat_start import flat_gmms
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.gmm_system import PROJECTION, TRANSFORMS, UNADAPTED, GmmSystem
from asr_am.hmm.train_lda_mllt import projected_context
from asr_am.hmm.train_tri import TriOptions, init_system
from asr_am.hmm.training import TrainingContext, align_and_save, speech_frames, subset_of, train_mixtures
from asr_am.hmm.viterbi import Alignment, align


@dataclass(frozen=True, kw_only=True)
class SatOptions(TriOptions):
    """Options of the system sat.

    Attributes:
        fmllr_passes: passes (from 1) that begin with new transforms.
        fmllr: minimum frame counts and sweeps.
    """

    utterances: int = 100_000
    fmllr_passes: Sequence[int] = (2, 4, 6, 12)
    fmllr: FmllrOptions = field(default_factory=FmllrOptions)


def train_sat(ctx: TrainingContext, previous: Path, options: SatOptions, out: Path) -> None:
    """Trains on set "train", aligns all sets, and writes the system with lda.mat, transforms and unadapted mixtures.

    Args:
        ctx: sets of MFCCs with deltas.
        previous: folder of the LDA+MLLT system to start from.
    """
    projection = Projection.load(previous / PROJECTION, ctx.train.dim // 3)
    part = subset_of(ctx, options.utterances)
    speakers = SpeakerFeatures(projected_context(part, projection), options.fmllr)
    first = GmmSystem.load(previous)
    labels_N = load_labels(previous / "ali", "train", part.train, first.states, part.others)
    speakers.adapt("sat pass 0", "train", first, labels_N)
    adapted = speakers.adapted_context()
    system, alignment, var_D = init_system("sat", adapted, previous, options)
    graphs = adapted.compile("train", system.tree, system.states, options.align)

    def transform(
        iteration: int, title: str, gmms: DiagGmms, frames: FrameStore, labels_N: np.ndarray
    ) -> tuple[DiagGmms, FrameStore]:
        if iteration not in options.fmllr_passes:
            return gmms, frames
        return gmms, speakers.adapt(title, "train", replace(system, gmms=gmms), labels_N)

    gmms, alignment = train_mixtures("sat", adapted, system, graphs, alignment, options, var_D, transform)
    system = replace(system, gmms=gmms)
    out.mkdir(parents=True, exist_ok=True)
    projection.save(out / PROJECTION)
    unadapted = unadapted_gmms(speakers, system, alignment, options)
    if part is ctx:
        speakers.adapt("sat", "train", system, alignment.labels_N)
    else:
        known = {"train": speakers.transforms["train"]}
        speakers = SpeakerFeatures(projected_context(ctx, projection), options.fmllr, transforms=known)
        adapt_from_scratch(speakers, "train", system, unadapted, options)
    for subset in set(ctx.sets) - {"train"}:
        adapt_from_scratch(speakers, subset, system, unadapted, options)
    (out / TRANSFORMS).mkdir(exist_ok=True)
    write_transforms(out / TRANSFORMS, "train", speakers.transforms["train"])
    unadapted.save(out / UNADAPTED)
    trained = (graphs, alignment) if part is ctx else (None, None)
    align_and_save("sat", speakers.adapted_context(), system, options, out, *trained)


@dataclass
class SpeakerFeatures:
    """The projected frames of all sets, and the speakers' current transforms with the frames they give.

    Attributes:
        ctx: sets of projected frames, without fMLLR.
        frames: adapted frames by set, for sets adapted so far.
        transforms: the transform of each speaker, by set.
    """

    ctx: TrainingContext
    options: FmllrOptions
    frames: dict[str, FrameStore] = field(default_factory=dict)
    transforms: dict[str, Mapping[str, np.ndarray]] = field(default_factory=dict)

    def adapt(
        self, title: str, subset: str, system: GmmSystem, labels_N: np.ndarray, target: DiagGmms | None = None
    ) -> FrameStore:
        """Re-estimates the transforms of a set.

        Args:
            system: gives the posteriors of the currently adapted frames.
            labels_N: alignment of the set by `system`.
            target: mixtures to adapt to. Default: those of `system`.

        Returns:
            The frames with the new transforms.
        """
        data, jobs = self.ctx.sets[subset], self.ctx.jobs
        base, lang = data.frames, self.ctx.lang
        pdf_N = speech_frames(labels_N, lang, system.states)
        groups = list(aligned_groups(base, self.frames.get(subset, base), data.speakers_U, pdf_N))
        start = mean_transform(self.transforms["train"]) if "train" in self.transforms else None
        transforms = adapt_speakers(groups, system.gmms, self.options, jobs, title, target, start)
        index_of = {utterance: index for index, utterance in enumerate(base.utterances)}

        def adapted(utterance: str) -> np.ndarray:
            index = index_of[utterance]
            return apply(transforms[data.speakers_U[index]], base.read(base.span(index)))

        self.transforms[subset] = transforms
        self.frames[subset] = FrameStore.write(
            self.ctx.scratch / f"frames_fmllr_{subset}", base.utterances, adapted, f"adapting {subset}"
        )
        return self.frames[subset]

    def adapted_context(self) -> TrainingContext:
        """Returns the same sets, with adapted frames where a set was adapted."""
        sets = {n: replace(m, frames=self.frames.get(n, m.frames)) for n, m in self.ctx.sets.items()}
        return replace(self.ctx, sets=sets)


def unadapted_gmms(speakers: SpeakerFeatures, system: GmmSystem, alignment: Alignment, options: SatOptions) -> DiagGmms:
    """Estimates the system's mixtures for unadapted features, with the posteriors of adapted frames."""
    base, pdf_N = speakers.ctx.train, FramePdfs.of(alignment.labels_N, system.states)
    acc = accumulate(
        system.gmms, speakers.frames["train"], pdf_N, speakers.ctx.jobs, "sat: unadapted mixtures", stats_frames=base
    )
    _, var_D = flat_gmms(base, 1)
    keep_all = UpdateOptions(min_occupancy=0.0, variance_floor=options.variance_floor)
    return update(system.gmms, acc, keep_all, var_D)


def adapt_from_scratch(
    speakers: SpeakerFeatures, subset: str, system: GmmSystem, unadapted: DiagGmms, options: SatOptions
) -> None:
    """Estimates transforms of a set with known transcripts: align unadapted, adapt, realign, adapt again."""
    plain = replace(system, gmms=unadapted)
    graphs = speakers.ctx.compile(subset, system.tree, system.states, options.align)
    for pass_, (model, target) in enumerate(((plain, system.gmms), (system, None)), start=1):
        title = f"sat: {subset} pass {pass_}"
        frames = speakers.adapted_context().sets[subset].frames
        result = align(graphs, frames, model.gmms, options.align, speakers.ctx.jobs, f"{title}: align")
        speakers.adapt(title, subset, model, result.labels_N, target)
