"""Monophone training from a flat start (the steps of Kaldi's train_mono.sh, with fewer passes)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.alignments import FramePdfs
from asr_am.hmm.em import UpdateOptions, accumulate, update
from asr_am.hmm.flat_start import equal_alignment, flat_gmms
from asr_am.hmm.gmm_system import GmmSystem
from asr_am.hmm.hmm_topology import phone_states, state_table
from asr_am.hmm.training import EmOptions, TrainingContext, align_and_save, by_hash, reduced, train_mixtures
from asr_am.hmm.tree import monophone_tree

logger = logging.getLogger(__name__)

CANDIDATES = 0.25  # share of the frames that short utterances are drawn from, if there are enough
REALIGN = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 21, 24)


@dataclass(frozen=True, kw_only=True)
class MonoOptions(EmOptions):
    """Options of the system mono.

    Attributes:
        phone_states: emitting states of a nonsilence phone.
        silence_states: emitting states of a silence phone.
        flat_min_occupancy: `min_occupancy` of the first update.
        frames: train on short utterances with that many frames in total, see `shortest`. 0: on all. A flat start works
            best on short utterances, and the next system trains on all.
    """

    iterations: int = 25
    realign: Sequence[int] = REALIGN
    gaussians: int = 1500
    increase_until: int = 20
    phone_states: int = 3
    silence_states: int = 3
    flat_min_occupancy: float = 3.0
    frames: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("phone_states", "silence_states")
        if not isinstance(self.frames, int) or self.frames < 0:
            raise InputError(
                f"align: mono.frames is {self.frames!r}; it must be a number of frames, or 0 to train on all utterances"
            )


def train_mono(ctx: TrainingContext, options: MonoOptions, out: Path) -> None:
    """Trains on set "train", aligns all sets, and writes the system."""
    lang, part = ctx.lang, shortest(ctx, options.frames)
    states_P = phone_states(lang.nonsilence_phones, lang.silence_phones, options.phone_states, options.silence_states)
    tree = monophone_tree(lang.roots, states_P)
    states = state_table(tree, states_P)
    graphs = part.compile("train", tree, states, options.align)
    gmms, var_D = flat_gmms(part.train, tree.num_pdfs)
    alignment = equal_alignment(graphs, part.train, options.seed, part.jobs)
    if alignment.failed:
        logger.warning("mono: %d utterances are too short for their transcripts", len(alignment.failed))
    first = UpdateOptions(options.flat_min_occupancy, options.variance_floor)
    acc = accumulate(gmms, part.train, FramePdfs.of(alignment.labels_N, states), part.jobs, "mono flat start")
    system = GmmSystem(tree, states, update(gmms, acc, first, var_D))
    gmms, alignment = train_mixtures("mono", part, system, graphs, alignment, options, var_D)
    trained = (graphs, alignment) if part is ctx else (None, None)
    align_and_save("mono", ctx, replace(system, gmms=gmms), options, out, *trained)


def shortest(ctx: TrainingContext, num_frames: int) -> TrainingContext:
    """Reduces set "train" to short utterances with at least `num_frames` frames in total, in their order.

    They are drawn from the shortest utterances with a share CANDIDATES of the frames, as in Kaldi's recipes. The very
    shortest of a large corpus are a few words such as "yeah", from which no model of all phones can be trained.

    Returns `ctx` itself if the set has no more frames than that, or if `num_frames` is 0.
    """
    length_U = np.diff(ctx.train.offsets_U1)
    if not 0 < num_frames < length_U.sum():
        return ctx
    order = np.argsort(length_U, kind="stable")
    order = order[: 1 + np.searchsorted(np.cumsum(length_U[order]), max(num_frames, CANDIDATES * length_U.sum()))]
    drawn = order[by_hash([ctx.train.utterances[index] for index in order])]
    kept = np.sort(drawn[: 1 + np.searchsorted(np.cumsum(length_U[drawn]), num_frames)])
    part = reduced(ctx, kept.tolist(), "shortest")
    logger.info("mono: trained on %d short utterances, %d frames", len(kept), part.train.num_frames)
    return part
