"""Triphone training from the alignments of another system (the steps of Kaldi's train_deltas.sh).

Shapes: N frames, R runs, P pdfs, D feature dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.alignments import load_labels, range_runs
from asr_am.hmm.flat_start import flat_gmms
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms, single_gaussians
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.hmm_topology import estimate_transitions, state_table
from asr_am.hmm.states import StateTable
from asr_am.hmm.training import EmOptions, TrainingContext, align_and_save, subset_of, train_mixtures
from asr_am.hmm.tree import DecisionTree
from asr_am.hmm.tree_build import TreeOptions, TreeStats, accumulate_tree_stats, build_tree, phone_questions
from asr_am.hmm.viterbi import Alignment
from asr_am.lang.lang_dir import Lang
from asr_am.lang.lexicon import base_phone, strip_position

logger = logging.getLogger(__name__)
LEAVES_PER_STATE = 2.0  # without it, the states of a large phone set would use up all leaves


@dataclass(frozen=True, kw_only=True)
class TriOptions(EmOptions):
    """Options of the system tri.

    Attributes:
        utterances: train on that many, chosen by a hash of their names, and align more. 0: on all.
        leaves, min_leaf_occupancy, merge: see TreeOptions. At least LEAVES_PER_STATE leaves per state of a root are
            allowed.
    """

    iterations: int = 35
    realign: Sequence[int] = (10, 20, 30)
    gaussians: int = 4000
    increase_until: int = 25
    utterances: int = 30_000
    leaves: int = 300
    min_leaf_occupancy: float = 30.0
    merge: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.utterances < 0:
            raise InputError(f"align: utterances is {self.utterances}; it must be their number, or 0 to train on all")


def train_tri(ctx: TrainingContext, previous: Path, options: TriOptions, out: Path) -> None:
    """Trains on set "train", aligns all sets, and writes the system.

    Args:
        previous: folder of the system whose alignments to start from.
    """
    part = subset_of(ctx, options.utterances)
    system, alignment, var_D = init_system("tri", part, previous, options)
    graphs = part.compile("train", system.tree, system.states, options.align)
    gmms, alignment = train_mixtures("tri", part, system, graphs, alignment, options, var_D)
    trained = (graphs, alignment) if part is ctx else (None, None)
    align_and_save("tri", ctx, replace(system, gmms=gmms), options, out, *trained)


def init_system(
    name: str, ctx: TrainingContext, previous: Path, options: TriOptions
) -> tuple[GmmSystem, Alignment, np.ndarray]:
    """Builds a system with a new tree and one Gaussian per leaf from the alignments of another system.

    Args:
        ctx: sets with the features of the new system.
        previous: folder of the other system.

    Returns:
        The system, the alignment of set "train" with the pdfs of the new tree, and the variance of all frames [D].
    """
    old_states = StateTable.load(previous / "states.npz")
    labels_N = load_labels(previous / "ali", "train", ctx.train, old_states, ctx.others)
    stats = accumulate_tree_stats(ctx.train, labels_N, old_states, ctx.jobs)
    extra = word_position_questions(ctx.lang) + digit_questions(ctx.lang)
    questions = phone_questions(stats, ctx.lang.roots, ctx.lang.silence_phones, extra)
    growing = TreeOptions(options.leaves, options.min_leaf_occupancy, options.merge, LEAVES_PER_STATE)
    tree = build_tree(stats, ctx.lang.roots, old_states.states_P, ctx.lang.silence_phones, questions, growing)
    logger.info("%s: %d contexts seen, %d questions, %d pdfs", name, len(stats.state_M), len(questions), tree.num_pdfs)

    states = state_table(tree, old_states.states_P)
    labels_N = convert_labels(labels_N, ctx.train, old_states, tree, states)
    states = estimate_transitions(states, range_runs(labels_N, ctx.train, states))
    background, var_D = flat_gmms(ctx.train, tree.num_pdfs)
    gmms = gaussians_of_leaves(stats, tree, background, options.variance_floor * var_D)
    return GmmSystem(tree, states, gmms), Alignment(labels_N, float("nan"), 0, []), var_D


def word_position_questions(lang: Lang) -> list[set[int]]:
    """Returns questions about word begin, word end, both and neither. Empty without position-dependent phones."""
    if not lang.position_dependent:
        return []
    begin = {phone for phone in lang.nonsilence_phones if lang.is_word_begin(phone)}
    end = {phone for phone in lang.nonsilence_phones if lang.is_word_end(phone)}
    return [begin, end, begin & end, set(lang.nonsilence_phones) - begin - end]


def digit_questions(lang: Lang) -> list[set[int]]:
    """Returns questions about the final digits of phone names (stress or tone), for phones that share a root."""
    questions: dict[str, set[int]] = {}
    for phones in lang.roots:
        names = {phone: strip_position(lang.phone_names[phone]) for phone in phones}
        if len(set(names.values())) > 1:
            for phone, name in names.items():
                questions.setdefault(name[len(base_phone(name)) :], set()).add(phone)
    return [questions[digits] for digits in sorted(questions)]


def convert_labels(
    labels_N: np.ndarray, frames: FrameStore, old_states: StateTable, tree: DecisionTree, states: StateTable
) -> np.ndarray:
    """Converts labels to the pdfs of another tree, with the same phones and states (Kaldi's convert-ali).

    Args:
        labels_N: labels of `old_states`.
    """
    converted_N = np.zeros_like(labels_N)
    for (first, end), runs in zip(frames.ranges(), range_runs(labels_N, frames, old_states), strict=True):
        contexts_M4, context_R = runs.contexts()
        pdf_M = tree.pdfs(contexts_M4[:, :3], contexts_M4[:, 3])
        labels = [
            states.label(phone, state, pdf)
            for (phone, state), pdf in zip(contexts_M4[:, [1, 3]].tolist(), pdf_M.tolist(), strict=True)
        ]
        rows = frames.rows(first, end)
        new_R = np.array(labels, dtype=labels_N.dtype)[context_R]
        converted_N[rows][labels_N[rows] > 0] = np.repeat(new_R, runs.length_R)
    return converted_N


def gaussians_of_leaves(stats: TreeStats, tree: DecisionTree, background: DiagGmms, floor_D: np.ndarray) -> DiagGmms:
    """Returns one Gaussian per leaf from the tree statistics. Leaves without data take the background's."""
    pdf_M = tree.pdfs(stats.windows_M3, stats.state_M)
    sums_PF = np.zeros((tree.num_pdfs, stats.sums_MF.shape[1]))
    np.add.at(sums_PF, pdf_M, stats.sums_MF)
    count_P1 = np.maximum(sums_PF[:, :1], 1e-10)
    mean_PD = sums_PF[:, 1 : 1 + stats.dim] / count_P1
    var_PD = np.maximum(sums_PF[:, 1 + stats.dim :] / count_P1 - mean_PD**2, floor_D)
    seen_P1 = sums_PF[:, :1] >= 2
    return single_gaussians(
        np.where(seen_P1, mean_PD, background.means_GD), np.where(seen_P1, var_PD, background.vars_GD)
    )
