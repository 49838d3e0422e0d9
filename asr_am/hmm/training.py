"""GMM training shared by all systems: their data, and the loop of realignment, EM and mixture splitting.

Shapes: N frames of a set, U utterances, D feature dimension, P pdfs.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asr_am.data.speed import originals
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.hmm.alignment_graphs import Graphs, compile_graphs
from asr_am.hmm.alignments import FramePdfs, check_alignments, range_runs, write_alignments
from asr_am.hmm.em import UpdateOptions, accumulate, mix_up, update
from asr_am.hmm.flat_start import flat_gmms
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.hmm_topology import estimate_transitions
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree
from asr_am.hmm.viterbi import Alignment, AlignOptions, align, log_alignment
from asr_am.lang.lang_dir import Lang
from asr_am.progress import track

logger = logging.getLogger(__name__)
MAX_FAILED_SHARE = 0.5  # training stops if a larger share of the utterances has no alignment


@dataclass(frozen=True, kw_only=True)
class EmOptions:
    """Options of mixture training and alignment.

    Attributes:
        iterations: passes of EM.
        realign: passes (from 1) that begin with a realignment.
        gaussians: of all pdfs together, reached in equal steps at pass `increase_until`.
        increase_until: last pass that splits Gaussians.
        power: Gaussians are shared among pdfs by their frames to this power.
        min_occupancy, variance_floor: see UpdateOptions.
        boost_silence: factor on the likelihood of the optional silence during realignment.
        beam, retry_beam: see AlignOptions.
        seed: random seed of the directions in which Gaussians are split.
    """

    iterations: int
    realign: Sequence[int]
    gaussians: int
    increase_until: int
    power: float = 0.25
    min_occupancy: float = 10.0
    variance_floor: float = 0.01
    boost_silence: float = 1.0
    beam: float = 10.0
    retry_beam: float = 40.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_positive(
            "iterations", "gaussians", "increase_until", "variance_floor", "boost_silence", "beam", "retry_beam"
        )

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not value > 0:
                raise InputError(f"align: {name} is {value!r}; it must be a number above 0")

    @property
    def update(self) -> UpdateOptions:
        return UpdateOptions(self.min_occupancy, self.variance_floor)

    @property
    def align(self) -> AlignOptions:
        return AlignOptions(self.beam, self.retry_beam)


@dataclass(frozen=True)
class AlignedData:
    """The utterances of one set.

    Attributes:
        words_U: word ids of each utterance.
        speakers_U: speaker of each utterance.
    """

    frames: FrameStore
    words_U: Sequence[Sequence[int]]
    speakers_U: Sequence[str] = ()


@dataclass(frozen=True)
class TrainingContext:
    """Data, lexicon and resources shared by the training of all systems.

    Attributes:
        sets: data by set name. "train" is trained on.
        scratch: folder for graphs and frames.
        jobs: worker processes or threads.
        others: utterances that the systems before may have aligned beside those of set "train".
        copies: train on copies at other speeds too. False: they are only aligned.
    """

    sets: dict[str, AlignedData]
    lang: Lang
    scratch: Path
    jobs: int
    others: Collection[str] = ()
    copies: bool = True

    @property
    def train(self) -> FrameStore:
        return self.sets["train"].frames

    def compile(self, subset: str, tree: DecisionTree, states: StateTable, options: AlignOptions) -> Graphs:
        """Compiles the alignment graphs of a set's transcripts."""
        data = self.sets[subset]
        folder, lexicon = self.scratch / f"graphs_{subset}", self.lang.directory / "L.fst"
        scale = options.self_loop_scale
        return compile_graphs(folder, data.frames, data.words_U, lexicon, tree, states, scale, self.jobs)


def subset_of(ctx: TrainingContext, count: int) -> TrainingContext:
    """Reduces set "train" to `count` utterances to train on, chosen by a hash of their names. 0: to all of these.

    A smaller subset is part of a larger one. Returns `ctx` itself if the set has no more.
    """
    names = ctx.train.utterances
    ours = list(range(len(names)))
    if not ctx.copies:
        ours = [index for index, original in enumerate(originals(names)) if original == names[index]]
    count = min(count or sys.maxsize, len(ours))
    if count == len(names):
        return ctx
    if count == len(ours):
        return reduced(ctx, ours, f"{count}")
    chosen = by_hash([names[index] for index in ours])[:count]
    return reduced(ctx, sorted(ours[index] for index in chosen), f"{count}")


def by_hash(names: Sequence[str]) -> list[int]:
    """Returns the indices of utterances in an order that depends on nothing but each one's name."""
    return sorted(range(len(names)), key=lambda index: hashlib.blake2b(names[index].encode(), digest_size=8).digest())


def reduced(ctx: TrainingContext, kept: Sequence[int], name: str) -> TrainingContext:
    """Reduces set "train" to some utterances, by index in rising order. Their frames are copied to a new store."""
    data, index_of = ctx.sets["train"], {ctx.train.utterances[index]: index for index in kept}
    folder = ctx.scratch / f"frames_train_{name}"
    frames = FrameStore.write(
        folder, list(index_of), lambda utterance: ctx.train.read(ctx.train.span(index_of[utterance])), folder.name
    )
    speakers_U = [data.speakers_U[index] for index in kept] if data.speakers_U else ()
    part = AlignedData(frames, [data.words_U[index] for index in kept], speakers_U)
    return replace(ctx, sets=ctx.sets | {"train": part}, others=ctx.others or ctx.train.utterances)


# Called before the EM of each pass with its number, title, mixtures, frames and latest alignment (graph labels [N]).
# Returns mixtures and frames, transformed by LDA+MLLT or fMLLR in some passes.
Transform = Callable[[int, str, DiagGmms, FrameStore, np.ndarray], tuple[DiagGmms, FrameStore]]


def train_mixtures(
    name: str, ctx: TrainingContext, system: GmmSystem, graphs: Graphs, alignment: Alignment, options: EmOptions,
    global_var_D: np.ndarray, transform: Transform | None = None,
) -> tuple[DiagGmms, Alignment]:  # fmt: skip
    """Runs realignment, EM and mixture splitting.

    Args:
        graphs: alignment graphs of set "train".
        alignment: initial alignment of set "train".
        global_var_D: variance of all frames, for the variance floor.

    Returns:
        The mixtures after the last pass, and the last alignment.
    """
    gmms, states, frames = system.gmms, system.states, ctx.train
    rng = np.random.default_rng(options.seed)
    boost = dict.fromkeys(silence_pdfs(ctx.lang, states), options.boost_silence)
    start, last_increase = gmms.num_gaussians, min(options.increase_until, options.iterations)
    for iteration in track(range(1, options.iterations + 1), f"training {name}"):
        title = f"{name} pass {iteration}/{options.iterations}"
        if iteration in options.realign:
            alignment = align(graphs, frames, gmms, options.align, ctx.jobs, f"{title}: align", boost)
        pdf_N = FramePdfs.of(alignment.labels_N, states)
        if transform is not None:
            before = frames
            gmms, frames = transform(iteration, title, gmms, frames, alignment.labels_N)
            if frames is not before:
                _, global_var_D = flat_gmms(frames, 1)
        acc = accumulate(gmms, frames, pdf_N, ctx.jobs, f"{title}: EM")
        gmms = update(gmms, acc, options.update, global_var_D)
        if iteration <= last_increase:
            target = start + (options.gaussians - start) * iteration // last_increase
            gmms = mix_up(gmms, pdf_N.counts(gmms.num_pdfs), target, rng, options.power)
        logger.debug("%s: log-likelihood per frame %.3f, %d Gaussians", title, acc.loglik_per_frame, gmms.num_gaussians)
    return gmms, alignment


def align_and_save(
    name: str, ctx: TrainingContext, system: GmmSystem, options: EmOptions, out: Path, graphs: Graphs | None = None,
    alignment: Alignment | None = None,
) -> None:  # fmt: skip
    """Aligns every set, estimates the final transition probabilities, and writes all files, gmm.npz last.

    Args:
        graphs: alignment graphs of set "train". Default: compiled here.
        alignment: an alignment of set "train", for the transition probabilities. Default: that which is made here.
    """
    tree, states, gmms = system.tree, system.states, system.gmms
    for subset in sorted(ctx.sets, key=lambda subset: subset != "train"):
        frames = ctx.sets[subset].frames
        if subset != "train" or graphs is None:
            graphs = ctx.compile(subset, tree, states, options.align)
        result = align(graphs, frames, gmms, options.align, ctx.jobs, f"{name}: align {subset}")
        log_alignment(name, subset, result, len(frames.utterances))
        if subset == "train":
            require_aligned(name, result.failed, len(frames.utterances))
            states = estimate_transitions(states, range_runs((alignment or result).labels_N, frames, states))
        write_alignments(out / "ali", subset, frames, result.labels_N)
        write_lines(out / "ali" / f"{subset}_failed.txt", result.failed)
        lengths = dict(zip(frames.utterances, np.diff(frames.offsets_U1).tolist(), strict=True))
        check_alignments(out / "ali", subset, lengths, states)
    GmmSystem(tree, states, gmms).save(out)


def require_aligned(name: str, failed: Sequence[str], count: int) -> None:
    """Raises InputError if most training utterances have no alignment."""
    if len(failed) > MAX_FAILED_SHARE * count:
        raise InputError(
            f"{name}: {len(failed)} of {count} training utterances cannot be aligned, the first {failed[0]}; check "
            "that transcripts match the audio and that the lexicon is of the same language. For utterances of minutes, "
            f"widen the beams (align.{name}.beam, align.{name}.retry_beam) or divide them into segments"
        )


def speech_frames(labels_N: np.ndarray, lang: Lang, states: StateTable) -> FramePdfs:
    """Returns the pdfs of labels, with silence frames ignored, which carry no information about the speaker."""
    return FramePdfs.of(labels_N, states).only(speech_pdfs(lang, states))


def speech_pdfs(lang: Lang, states: StateTable) -> np.ndarray:
    """Returns bool [P]: True for pdfs that no silence phone uses."""
    silent = np.isin(states.labels_L3[:, 0], lang.silence_phones)
    return np.isin(np.arange(states.num_pdfs), states.pdf_L[silent], invert=True)


def silence_pdfs(lang: Lang, states: StateTable) -> list[int]:
    """Returns the pdfs of the optional silence."""
    return np.unique(states.pdf_L[states.labels_L3[:, 0] == lang.optional_silence]).tolist()
