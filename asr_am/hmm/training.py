"""GMM training shared by all systems: their data, and the loop of realignment, EM and mixture splitting.

Shapes: N frames of a set, U utterances, D feature dimension, P pdfs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.hmm.alignments import check_alignments, runs_of, write_alignments
from asr_am.hmm.em import UpdateOptions, accumulate, mix_up, update
from asr_am.hmm.flat_start import flat_gmms
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.hmm_topology import estimate_transitions
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree
from asr_am.hmm.viterbi import Alignment, AlignOptions, Graphs, align, compile_graphs, log_alignment
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
        min_occupancy: see UpdateOptions.
        variance_floor: see UpdateOptions.
        boost_silence: factor on the likelihood of the optional silence during realignment.
        beam: see AlignOptions.
        retry_beam: see AlignOptions.
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
        frames: frames of all utterances.
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
        lang: lexicon and phones.
        scratch: folder for graphs and frames.
        jobs: worker processes.
    """

    sets: dict[str, AlignedData]
    lang: Lang
    scratch: Path
    jobs: int

    @property
    def train(self) -> FrameStore:
        return self.sets["train"].frames

    def compile(self, subset: str, tree: DecisionTree, states: StateTable, options: AlignOptions) -> Graphs:
        """Compiles the alignment graphs of a set's transcripts."""
        data = self.sets[subset]
        folder, lexicon = self.scratch / f"graphs_{subset}", self.lang.directory / "L.fst"
        return compile_graphs(folder, data.frames, data.words_U, lexicon, tree, states, options, self.jobs)


# Called before the EM of each pass with its number, title, mixtures, frames and latest alignment (graph labels [N]).
# Returns mixtures and frames, transformed by LDA+MLLT or fMLLR in some passes.
Transform = Callable[[int, str, DiagGmms, FrameStore, np.ndarray], tuple[DiagGmms, FrameStore]]


def train_mixtures(
    name: str, ctx: TrainingContext, system: GmmSystem, graphs: Graphs, alignment: Alignment, options: EmOptions,
    global_var_D: np.ndarray, transform: Transform | None = None,
) -> tuple[DiagGmms, Alignment]:  # fmt: skip
    """Runs realignment, EM and mixture splitting.

    Args:
        name: prefix of log lines.
        ctx: data to train on.
        system: initial system.
        graphs: alignment graphs of set "train".
        alignment: initial alignment of set "train".
        options: passes and sizes.
        global_var_D: variance of all frames, for the variance floor.
        transform: transforms features before some passes.

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
            alignment = align(graphs, frames, gmms, states, options.align, ctx.jobs, f"{title}: align", boost)
        pdf_N = pdfs_of(alignment.labels_N, states)
        if transform is not None:
            before = frames
            gmms, frames = transform(iteration, title, gmms, frames, alignment.labels_N)
            if frames is not before:
                _, global_var_D = flat_gmms(frames, 1)
        acc = accumulate(gmms, frames, pdf_N, ctx.jobs, f"{title}: EM")
        gmms = update(gmms, acc, options.update, global_var_D)
        if iteration <= last_increase:
            target = start + (options.gaussians - start) * iteration // last_increase
            occ_P = np.bincount(pdf_N[pdf_N >= 0], minlength=gmms.num_pdfs)
            gmms = mix_up(gmms, occ_P, target, rng, options.power)
        logger.debug("%s: log-likelihood per frame %.3f, %d Gaussians", title, acc.loglik_per_frame, gmms.num_gaussians)
    return gmms, alignment


def align_and_save(
    name: str, ctx: TrainingContext, system: GmmSystem, graphs: Graphs, alignment: Alignment, options: EmOptions,
    out: Path,
) -> None:  # fmt: skip
    """Estimates the final transition probabilities, aligns every set, and writes all files, gmm.npz last.

    Args:
        name: prefix of log lines.
        ctx: sets to align.
        system: trained system.
        graphs: alignment graphs of set "train".
        alignment: latest alignment of set "train", for the transition probabilities.
        options: beams.
        out: output folder.
    """
    tree, states, gmms = system.tree, system.states, system.gmms
    states = estimate_transitions(states, runs_of(alignment.labels_N, ctx.train.offsets_U1, states))
    for subset, data in ctx.sets.items():
        if subset != "train":
            graphs = ctx.compile(subset, tree, states, options.align)
        result = align(graphs, data.frames, gmms, states, options.align, ctx.jobs, f"{name}: align {subset}")
        log_alignment(name, subset, result, len(data.frames.utterances))
        if subset == "train":
            require_aligned(name, result.failed, len(data.frames.utterances))
        write_alignments(out / "ali", subset, data.frames, result.labels_N)
        write_lines(out / "ali" / f"{subset}_failed.txt", result.failed)
        lengths = dict(zip(data.frames.utterances, np.diff(data.frames.offsets_U1).tolist(), strict=True))
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


def pdfs_of(labels_N: np.ndarray, states: StateTable) -> np.ndarray:
    """Returns the pdf of every frame, -1 without an alignment."""
    return np.where(labels_N > 0, states.pdf_L[labels_N - 1], -1)


def without_silence(pdf_N: np.ndarray, lang: Lang, states: StateTable) -> np.ndarray:
    """Returns `pdf_N` with -1 for silence frames, which carry no information about the speaker."""
    return np.where((pdf_N >= 0) & speech_pdfs(lang, states)[pdf_N], pdf_N, -1)


def speech_pdfs(lang: Lang, states: StateTable) -> np.ndarray:
    """Returns bool [P]: True for pdfs that no silence phone uses."""
    silent = np.isin(states.labels_L3[:, 0], lang.silence_phones)
    return np.isin(np.arange(states.num_pdfs), states.pdf_L[silent], invert=True)


def silence_pdfs(lang: Lang, states: StateTable) -> list[int]:
    """Returns the pdfs of the optional silence."""
    return np.unique(states.pdf_L[states.labels_L3[:, 0] == lang.optional_silence]).tolist()
