"""Viterbi alignment of transcripts. Jobs take shards of utterances and write the labels they find into one file.

Shapes: N frames of a set, T frames of one utterance, C columns of scores, Q pdfs of one graph, P pdfs.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import NamedTuple

import kaldifst
import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.alignment_graphs import Graphs, align_graph
from asr_am.hmm.alignments import LabelFile
from asr_am.hmm.frame_loops import AlignGraph, Mixtures, Scores, best_path
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.gmm import DiagGmms
from asr_am.parallel import threaded_map

logger = logging.getLogger(__name__)

# For scores that are all known.
NO_MIXTURES = Mixtures(np.empty((0, 0), np.float32), np.empty(0, np.float32), np.zeros(1, np.int64), 0)
NO_PDFS = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass(frozen=True)
class AlignOptions:
    """Options of alignment.

    Attributes:
        beam: on log-likelihoods times `acoustic_scale`.
        retry_beam: for utterances without a path within `beam`.
        acoustic_scale: scale on log-likelihoods.
        self_loop_scale: scale on transition log probabilities.
    """

    beam: float = 10.0
    retry_beam: float = 40.0
    acoustic_scale: float = 0.1
    self_loop_scale: float = 0.1


@dataclass(frozen=True)
class Alignment:
    """The alignment of a set.

    Attributes:
        labels_N: graph labels, 0 for failed utterances. int32.
        loglik: log-likelihood per aligned frame.
        retried: utterances that needed the retry beam.
        failed: utterances without an alignment.
    """

    labels_N: np.ndarray
    loglik: float
    retried: int
    failed: list[str]


def align(
    graphs: Graphs, frames: FrameStore, gmms: DiagGmms, options: AlignOptions, jobs: int, description: str,
    boost: dict[int, float] | None = None,
) -> Alignment:  # fmt: skip
    """Finds the best path of every utterance.

    Args:
        description: label of the progress bar, and prefix of the error message.
        boost: factors on the likelihoods of some pdfs (Kaldi's boost-silence).

    Raises:
        InputError: no utterance has a path.
    """
    labels = LabelFile.create(graphs.folder, frames.num_frames)
    boost_P = np.zeros(gmms.num_pdfs, np.float32)
    if boost:
        boost_P[list(boost)] = np.log(list(boost.values()))
    work = functools.partial(_align_shard, graphs, frames, gmms.packed(), boost_P, options, labels)
    total, aligned, retried, failed = 0.0, 0, 0, []
    for part in threaded_map(work, graphs.shards, jobs, description, sent=True):
        total, aligned, retried = total + part.total, aligned + part.frames, retried + part.retried
        failed += [frames.utterances[index] for index in part.failed]
    if aligned == 0:
        raise InputError(
            f"{description}: no utterance could be aligned; check transcripts, lexicon and features. Minutes of speech "
            "are too few for an adapted system: align=triphone features=logmel"
        )
    return Alignment(labels.read(), total / aligned, retried, failed)


class ShardResult(NamedTuple):
    """The alignment of a shard: its log-likelihood and aligned frames, utterances that were retried, and failed."""

    total: float
    frames: int
    retried: int
    failed: list[int]


def _align_shard(
    graphs: Graphs, frames: FrameStore, mixtures: Mixtures, boost_P: np.ndarray, options: AlignOptions,
    labels: LabelFile, task: tuple[int, int, int],
) -> ShardResult:  # fmt: skip
    """Aligns a shard and writes its labels."""
    shard, first, end = task
    part, rows, scale = graphs.load(shard), frames.rows(first, end), np.float32(options.acoustic_scale)
    x_ND, labels_N = frames.read(rows), np.zeros(rows.stop - rows.start, np.int32)
    total, aligned, retried, failed = 0.0, 0, 0, []
    for index in range(first, end):
        span = slice(*(frames.offsets_U1[index : index + 2] - rows.start))
        pdf_Q = part.pdfs(index - first)
        unknown_TQ = np.full((span.stop - span.start, len(pdf_Q)), np.nan, np.float32)
        scores = Scores(unknown_TQ, x_ND[span], mixtures, pdf_Q, boost_P, scale)
        found, used_retry = _search(part.graph(index - first), scores, options, labels_N[span])
        retried += used_retry
        if math.isnan(found):
            failed.append(index)
        else:
            total, aligned = total + found / options.acoustic_scale, aligned + span.stop - span.start
    labels.write(rows.start, labels_N)
    return ShardResult(total, aligned, retried, failed)


def _search(graph: AlignGraph, scores: Scores, options: AlignOptions, label_T: np.ndarray) -> tuple[float, bool]:
    """Returns the sum of scores of the best path, NaN without one, and whether the retry beam was used."""
    found = best_path(graph, scores, options.beam, label_T)
    if not math.isnan(found):
        return found, False
    return best_path(graph, scores, options.retry_beam, label_T), True


def search(graph: kaldifst.StdVectorFst, ll_TC: np.ndarray, options: AlignOptions) -> tuple[np.ndarray | None, bool]:
    """Finds the best path to a final state.

    Args:
        graph: input label c reads column c - 1 of `ll_TC`.
        ll_TC: scaled log-likelihoods, C-contiguous float32.

    Returns:
        Input labels [T], None if there is no path, and whether the retry beam was used.
    """
    arrays, label_T = FstArrays.from_fst(graph), np.zeros(len(ll_TC), np.int32)
    if arrays.num_states == 0:
        return None, True
    scores = Scores(ll_TC, np.empty((len(ll_TC), 0), np.float32), NO_MIXTURES, *NO_PDFS, np.float32(1))
    found, used_retry = _search(align_graph(arrays, arrays.ilabel_A - 1), scores, options, label_T)
    return (None if math.isnan(found) else label_T.astype(np.int64)), used_retry


def log_alignment(name: str, subset: str, alignment: Alignment, utterances: int) -> None:
    """Logs the alignment result of a set, with the ids of up to ten failures."""
    logger.info(
        "%s: %s: %d of %d utterances aligned, %d needed the retry beam, log-likelihood per frame %.2f",
        name, subset, utterances - len(alignment.failed), utterances, alignment.retried, alignment.loglik,
    )  # fmt: skip
    if alignment.failed:
        examples = " ".join(alignment.failed[:10])
        logger.warning("%s: %s: %d utterances have no alignment: %s", name, subset, len(alignment.failed), examples)
