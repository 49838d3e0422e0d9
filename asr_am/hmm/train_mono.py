"""Monophone training from a flat start (the steps of Kaldi's train_mono.sh, with fewer passes)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asr_am.hmm.em import UpdateOptions, accumulate, update
from asr_am.hmm.flat_start import equal_alignment, flat_gmms
from asr_am.hmm.system import System
from asr_am.hmm.topology import phone_states, state_table
from asr_am.hmm.training import EmOptions, Workplace, finish, pdfs_of, train_mixtures
from asr_am.hmm.tree import monophone_tree

logger = logging.getLogger(__name__)

REALIGN = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 21, 24)


@dataclass(frozen=True, kw_only=True)
class MonoOptions(EmOptions):
    """phone_states, silence_states: emitting states. flat_min_occupancy: min_occupancy of the first update."""

    iterations: int = 25
    realign: Sequence[int] = REALIGN
    gaussians: int = 1500
    increase_until: int = 20
    phone_states: int = 3
    silence_states: int = 3
    flat_min_occupancy: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("phone_states", "silence_states")


def train_mono(place: Workplace, options: MonoOptions, out: Path, *, final: Path) -> None:
    """Train on set "train", align all sets, write the system and its alignments to `out` (final name: `final`)."""
    lang = place.lang
    states_P = phone_states(lang.nonsilence_phones, lang.silence_phones, options.phone_states, options.silence_states)
    tree = monophone_tree(lang.roots, states_P)
    states = state_table(tree, states_P)
    graphs = place.compile("train", tree, states, options.align)
    gmms, var_D = flat_gmms(place.train, tree.num_pdfs)
    alignment = equal_alignment(graphs, place.train, options.seed, place.jobs)
    if alignment.failed:
        logger.warning("mono: %d utterances are too short for their transcripts", len(alignment.failed))
    first = UpdateOptions(options.flat_min_occupancy, options.variance_floor)
    acc = accumulate(gmms, place.train, pdfs_of(alignment.labels_N, states), place.jobs, "mono flat start")
    system = System(tree, states, update(gmms, acc, first, var_D))
    gmms, alignment = train_mixtures("mono", place, system, graphs, alignment, options, var_D)
    finish("mono", place, replace(system, gmms=gmms), graphs, alignment, options, out, final)
