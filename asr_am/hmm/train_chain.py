"""States of chain models: phones of one HMM state at a fraction of the frame rate, and a tree on them.

Povey et al. (Interspeech 2016), section 2.4, take a score every third frame, and a topology that a phone can pass in
one step. Here a phone is one state with a self-loop. The tree is grown as that of triphones, on the frames of whole
phones in the alignments of a GMM system. There are no mixtures.

Shapes: N frames of a set, T frames of an utterance, K steps of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from asr_am import disk
from asr_am.errors import InputError
from asr_am.features.adapted import open_features
from asr_am.features.fusion import middle_labels
from asr_am.hmm.alignments import Runs, load_labels, read_alignments, runs_of, write_alignments
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.hmm_topology import estimate_transitions, phone_states, state_table
from asr_am.hmm.states import StateTable
from asr_am.hmm.train_tri import convert_labels, digit_questions, word_position_questions
from asr_am.hmm.tree import DecisionTree, monophone_tree
from asr_am.hmm.tree_build import TreeOptions, accumulate_tree_stats, build_tree, phone_questions
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
        lang_dir: output of stage lang.
        previous: folder of the GMM system whose alignments and features to take.
        out: an existing folder.
        options: sizes of the tree.
        subsampling: frames per step of the HMM.
        sets: sets to write alignments of, "train" first. The tree is grown on that.
        jobs: threads.

    Raises:
        InputError: an input is missing or damaged.
    """
    lang, old = Lang.load(lang_dir), StateTable.load(previous / "states.npz")
    states_P = phone_states(lang.nonsilence_phones, lang.silence_phones, 1, 1)
    whole = monophone_tree(lang.roots, states_P)
    phones = state_table(whole, states_P)
    phone_L1 = np.zeros(len(old.labels_L3) + 1, np.int32)  # label of a whole phone, by label of the old system
    phone_L1[1:] = [phones.label(phone, 0, whole.pdf((phone,), 0)) for phone in old.labels_L3[:, 0].tolist()]
    kind = GmmSystem.kind(previous)
    tree: DecisionTree | None = None
    for subset in sets:
        reader = open_features(features_dir, kind, subset)
        frames = FrameStore.write(out / "scratch", reader.utterances, reader.__getitem__, f"reading {kind} of {subset}")
        labels_N = phone_L1[load_labels(previous / "ali", subset, frames, old)]
        if tree is None:
            stats = accumulate_tree_stats(frames, labels_N, phones, jobs)
            extra = word_position_questions(lang) + digit_questions(lang)
            questions = phone_questions(stats, lang.roots, lang.silence_phones, extra)
            growing = TreeOptions(options.leaves, options.min_leaf_occupancy)
            tree = build_tree(stats, lang.roots, states_P, lang.silence_phones, questions, growing)
            states = replace(state_table(tree, states_P), subsampling=subsampling)
        labels_N = convert_labels(labels_N, frames, phones, tree, states)
        write_alignments(out / "ali", subset, frames, labels_N)
    assert tree is not None
    states = estimate_transitions(states, step_runs(out / "ali", states))
    tree.save(out / "tree.json")
    states.save(out / "states.npz")
    disk.remove(out / "scratch")
    logger.info("chain: %d contexts seen, %d questions, %d pdfs", len(stats.state_M), len(questions), tree.num_pdfs)


def step_labels(labels_T: np.ndarray, states: StateTable) -> np.ndarray:
    """Returns the graph label of each step of the HMM, that of its middle frame, [K]."""
    return middle_labels(labels_T, states.subsampling)


def step_runs(folder: Path, states: StateTable) -> Iterator[Runs]:
    """Yields the runs of steps in <folder>/train.ark."""
    steps: Iterable[np.ndarray] = (step_labels(labels_T, states) for _, labels_T in read_alignments(folder, "train"))
    steps = iter(steps)
    while utterances := list(islice(steps, UTTERANCES)):
        offsets = np.cumsum([0, *map(len, utterances)])
        yield runs_of(np.concatenate(utterances), offsets, states)
