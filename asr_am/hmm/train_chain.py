"""States of chain models: phones of one HMM state at a fraction of the frame rate, and a tree on them.

Povey et al. (Interspeech 2016), section 2.4, take a score every third frame, and a topology that a phone can pass in
one step. A phone is one state with a self-loop, and its first step has a pdf of its own, so that a phone that follows
itself is told from a longer one. The tree is grown as that of triphones, on the frames of whole phones in the
alignments of a GMM system. Both pdfs of a phone are of the same leaf. There are no mixtures.

Shapes: N frames of a set, T frames of an utterance, K steps of it, R runs, M contexts, L graph labels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from asr_am import disk
from asr_am.errors import InputError
from asr_am.features.adapted import open_features
from asr_am.features.fusion import middle_labels
from asr_am.hmm.alignments import Runs, load_labels, range_runs, read_alignments, write_alignments
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.hmm_topology import estimate_transitions, phone_states, state_table
from asr_am.hmm.states import StateTable
from asr_am.hmm.train_tri import digit_questions, word_position_questions
from asr_am.hmm.tree import DecisionTree
from asr_am.hmm.tree_build import TreeOptions, TreeStats, accumulate_tree_stats, build_tree, phone_questions
from asr_am.lang.lang_dir import Lang

logger = logging.getLogger(__name__)
UTTERANCES = 1000  # whose transitions are counted at a time


@dataclass(frozen=True)
class ChainTreeOptions:
    """Sizes of the tree.

    Attributes:
        leaves: largest number of leaves before merging.
        min_leaf_occupancy: frames of speech that a leaf needs.
    """

    leaves: int = 300
    min_leaf_occupancy: float = 100.0

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if self.leaves < 1 or not self.min_leaf_occupancy > 0:
            raise InputError("chain.leaves must be at least 1, and chain.min_leaf_occupancy above 0")


def train_chain(
    features_dir: Path, lang_dir: Path, previous: Path, out: Path, options: ChainTreeOptions, subsampling: int,
    sets: Sequence[str] = ("train", "dev"), jobs: int = 1,
) -> None:  # fmt: skip
    """Writes tree.json, states.npz and ali/<set>.ark of a chain model. Alignments are of all frames.

    Args:
        features_dir: output of stages features and speaker.
        previous: folder of the GMM system whose alignments and features to take.
        out: an existing folder.
        subsampling: frames per step of the HMM.
        sets: sets to write alignments of, "train" first. The tree is grown on that.

    Raises:
        InputError: an input is missing or damaged.
    """
    lang, old = Lang.load(lang_dir), StateTable.load(previous / "states.npz")
    states_P = phone_states(lang.nonsilence_phones, lang.silence_phones, 1, 1)
    kind = GmmSystem.kind(previous)
    tree: DecisionTree | None = None
    for subset in sets:
        reader = open_features(features_dir, kind, subset)
        frames = FrameStore.write(out / "scratch", reader.utterances, reader.__getitem__, f"reading {kind} of {subset}")
        labels_N = load_labels(previous / "ali", subset, frames, old)
        if tree is None:
            stats = of_phones(accumulate_tree_stats(frames, labels_N, old, jobs))
            extra = word_position_questions(lang) + digit_questions(lang)
            questions = phone_questions(stats, lang.roots, lang.silence_phones, extra)
            growing = TreeOptions(options.leaves, options.min_leaf_occupancy)
            tree = build_tree(stats, lang.roots, states_P, lang.silence_phones, questions, growing)
            states = chain_states(tree, states_P, subsampling)
        write_alignments(out / "ali", subset, frames, chain_labels(labels_N, frames, old, tree, states))
    assert tree is not None
    states = with_transitions(states, step_visits(out / "ali", states))
    tree.save(out / "tree.json")
    states.save(out / "states.npz")
    disk.remove(out / "scratch")
    logger.info("chain: %d contexts seen, %d questions, %d leaves", len(stats.state_M), len(questions), tree.num_pdfs)


def of_phones(stats: TreeStats) -> TreeStats:
    """Returns the statistics of whole phones: sums over their states."""
    windows_M3, row_M = np.unique(stats.windows_M3, axis=0, return_inverse=True)
    sums_MF = np.zeros((len(windows_M3), stats.sums_MF.shape[1]))
    np.add.at(sums_MF, row_M, stats.sums_MF)
    return TreeStats(windows_M3, np.zeros(len(windows_M3), stats.state_M.dtype), sums_MF)


def chain_states(tree: DecisionTree, states_P: Mapping[int, int], subsampling: int) -> StateTable:
    """Returns the states of a chain model. A leaf of the tree has two pdfs: of first steps, and of others."""
    first = state_table(tree, states_P)
    labels_L3 = np.concatenate([first.labels_L3, first.labels_L3 + np.array([0, 1, tree.num_pdfs], np.int32)])
    order = np.lexsort(labels_L3.T[::-1])
    twice = {name: np.tile(getattr(first, name), 2)[order] for name in ("loop_L", "next_L")}
    return StateTable(
        labels_L3[order], **twice, states_P=states_P, num_pdfs=2 * tree.num_pdfs, subsampling=subsampling,
        first_steps=True,
    )  # fmt: skip


def chain_labels(
    labels_N: np.ndarray, frames: FrameStore, old: StateTable, tree: DecisionTree, states: StateTable
) -> np.ndarray:
    """Converts the alignment of a GMM system: the first frame of a phone has the label of first steps.

    Args:
        labels_N: labels of the GMM system.
        old: its states.
    """
    converted_N = np.zeros_like(labels_N)
    for (first, end), runs in zip(frames.ranges(), range_runs(labels_N, frames, old), strict=True):
        contexts_M4, context_R = runs.contexts()
        pdf_M = tree.pdfs(contexts_M4[:, :3], np.zeros(len(contexts_M4), np.int32))
        pairs = zip(contexts_M4[:, 1].tolist(), pdf_M.tolist(), strict=True)
        labels = [states.label(phone, 0, pdf) for phone, pdf in pairs]
        label_R = np.array(labels, dtype=labels_N.dtype)[context_R]
        rows = frames.rows(first, end)
        converted_N[rows][labels_N[rows] > 0] = np.repeat(states.loop_label_L[label_R - 1], runs.length_R)
        begins_R = runs.state_R == 0
        converted_N[rows][runs.start_R[begins_R]] = label_R[begins_R]
    return converted_N


def step_labels(labels_T: np.ndarray, states: StateTable) -> np.ndarray:
    """Returns the graph label of each step of the HMM, [K]: of the phone of its middle frame."""
    visit_T = np.cumsum(states.labels_L3[labels_T - 1, 1] == 0)
    begins_K = np.diff(middle_labels(visit_T, states.subsampling), prepend=-1) > 0
    first_K = states.first_label_L[middle_labels(labels_T, states.subsampling) - 1]
    return np.where(begins_K, first_K, states.loop_label_L[first_K - 1])


def frame_labels(labels_K: np.ndarray, states: StateTable) -> np.ndarray:
    """Returns the graph label of each frame of some steps, [K x subsampling], the inverse of `step_labels`."""
    labels_T = np.repeat(states.loop_label_L[labels_K - 1], states.subsampling)
    labels_T[:: states.subsampling] = labels_K
    return labels_T


def step_visits(folder: Path, states: StateTable) -> Iterator[Runs]:
    """Yields a run for each phone in <folder>/train.ark, with the label of its first step, in steps."""
    steps = (step_labels(labels_T, states) for _, labels_T in read_alignments(folder, "train"))
    while utterances := list(islice(steps, UTTERANCES)):
        labels_N = np.concatenate(utterances)
        start_R = np.flatnonzero(states.labels_L3[labels_N - 1, 1] == 0)
        length_R, label_R = np.diff(start_R, append=len(labels_N)), labels_N[start_R]
        yield Runs(label_R, start_R, length_R, np.zeros((len(start_R), 3), np.int32), np.zeros_like(label_R))


def with_transitions(states: StateTable, visits: Iterable[Runs]) -> StateTable:
    """Returns the states with the transitions of their first steps for all steps."""
    found = estimate_transitions(states, visits)
    first_L = states.first_label_L - 1
    return replace(found, loop_L=found.loop_L[first_L], next_L=found.next_L[first_L])
