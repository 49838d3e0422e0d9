"""What monophone and triphone training share: their material, and the loop of realigning, EM and splitting Gaussians.

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

logger = logging.getLogger(__name__)
MAX_FAILED_SHARE = 0.5  # share of the training utterances without alignment beyond which there is no point in going on


@dataclass(frozen=True, kw_only=True)
class EmOptions:
    """How the mixtures of a system are trained, and how utterances are aligned with it.

    iterations: passes of EM. realign: passes (from 1) that begin with a new alignment. gaussians: of all pdfs together,
    reached by equal steps at pass `increase_until`, shared out by the number of frames to the power `power`.
    min_occupancy, variance_floor: see UpdateOptions. boost_silence: factor on the likelihood of the optional silence
    while aligning for training. beam, retry_beam: see AlignOptions. seed: of the directions in which Gaussians split.
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
    """One set: its frames, and the word ids and speakers of its utterances in the same order."""

    frames: FrameStore
    words_U: Sequence[Sequence[int]]
    speakers_U: Sequence[str] = ()


@dataclass(frozen=True)
class TrainingContext:
    """Where systems are trained. sets: by name, "train" is trained on; scratch: folder for graphs; jobs: processes."""

    sets: dict[str, AlignedData]
    lang: Lang
    scratch: Path
    jobs: int

    @property
    def train(self) -> FrameStore:
        return self.sets["train"].frames

    def compile(self, subset: str, tree: DecisionTree, states: StateTable, options: AlignOptions) -> Graphs:
        """The graphs of all transcripts of a set."""
        data = self.sets[subset]
        folder, lexicon = self.scratch / f"graphs_{subset}", self.lang.directory / "L.fst"
        return compile_graphs(folder, data.frames, data.words_U, lexicon, tree, states, options, self.jobs)


# What some systems do before the EM of some passes (number, title): transform the frames, and the Gaussians with them,
# by what the latest alignment (graph labels [N]) shows.
Transform = Callable[[int, str, DiagGmms, FrameStore, np.ndarray], tuple[DiagGmms, FrameStore]]


def train_mixtures(
    name: str, ctx: TrainingContext, system: GmmSystem, graphs: Graphs, alignment: Alignment, options: EmOptions,
    global_var_D: np.ndarray, transform: Transform | None = None,
) -> tuple[DiagGmms, Alignment]:  # fmt: skip
    """EM from `system` and `alignment`; returns the mixtures after the last pass and the last alignment made."""
    gmms, states, frames = system.gmms, system.states, ctx.train
    rng = np.random.default_rng(options.seed)
    boost = dict.fromkeys(silence_pdfs(ctx.lang, states), options.boost_silence)
    start, last_increase = gmms.num_gaussians, min(options.increase_until, options.iterations)
    for iteration in range(1, options.iterations + 1):
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
        logger.info("%s: log-likelihood per frame %.3f, %d Gaussians", title, acc.loglik_per_frame, gmms.num_gaussians)
    return gmms, alignment


def align_and_save(
    name: str, ctx: TrainingContext, system: GmmSystem, graphs: Graphs, alignment: Alignment, options: EmOptions, out: Path,
    final: Path,
) -> None:  # fmt: skip
    """Final transition probabilities and alignments of every set, written to `out` with the model last."""
    tree, states, gmms = system.tree, system.states, system.gmms
    states = estimate_transitions(states, runs_of(alignment.labels_N, ctx.train.offsets_U1, states))
    for subset, data in ctx.sets.items():
        if subset != "train":
            graphs = ctx.compile(subset, tree, states, options.align)
        result = align(graphs, data.frames, gmms, states, options.align, ctx.jobs, f"{name}: align {subset}")
        log_alignment(name, subset, result, len(data.frames.utterances))
        if subset == "train":
            require_aligned(name, result.failed, len(data.frames.utterances))
        write_alignments(out / "ali", subset, data.frames, result.labels_N, final=final / "ali")
        write_lines(out / "ali" / f"{subset}_failed.txt", result.failed)
        lengths = dict(zip(data.frames.utterances, np.diff(data.frames.offsets_U1).tolist(), strict=True))
        check_alignments(out / "ali", subset, lengths, states)
    GmmSystem(tree, states, gmms).save(out)


def require_aligned(name: str, failed: Sequence[str], count: int) -> None:
    """InputError where most of the training utterances have no alignment."""
    if len(failed) > MAX_FAILED_SHARE * count:
        raise InputError(
            f"{name}: {len(failed)} of {count} training utterances cannot be aligned, the first {failed[0]}; do "
            "text and audio belong together, and is the lexicon of this language? Utterances of minutes may need wider "
            f"beams (align.{name}.beam, align.{name}.retry_beam), or segments"
        )


def pdfs_of(labels_N: np.ndarray, states: StateTable) -> np.ndarray:
    """The pdf of every frame, -1 where there is no alignment."""
    return np.where(labels_N > 0, states.pdf_L[labels_N - 1], -1)


def without_silence(pdf_N: np.ndarray, lang: Lang, states: StateTable) -> np.ndarray:
    """`pdf_N` with -1 in the frames of silence phones, which say nothing of a speaker."""
    return np.where((pdf_N >= 0) & speech_pdfs(lang, states)[pdf_N], pdf_N, -1)


def speech_pdfs(lang: Lang, states: StateTable) -> np.ndarray:
    """bool [P]: whether a pdf is of no silence phone."""
    silent = np.isin(states.labels_L3[:, 0], lang.silence_phones)
    return np.isin(np.arange(states.num_pdfs), states.pdf_L[silent], invert=True)


def silence_pdfs(lang: Lang, states: StateTable) -> list[int]:
    """The pdfs of the optional silence."""
    return np.unique(states.pdf_L[states.labels_L3[:, 0] == lang.optional_silence]).tolist()
