"""Viterbi alignment of transcripts: compiled graphs on disk, searched with kaldi_decoder's FasterDecoder.

Graphs are compiled once per tree and used in every pass, with the transition probabilities of that moment. At self-loop
scale 0.1 their later changes have little effect compared with the likelihoods. The input labels of a graph are
renumbered from 1 to C, so that the matrix read by the decoder has only the columns that the utterance needs.

Shapes: N frames of a set, T frames of one utterance, D feature dimension, C graph labels in one utterance's graph,
P pdfs among them, U utterances.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kaldi_decoder
import kaldifst
import numpy as np
import torch

from asr_am.data.npz import read_npz, write_npz
from asr_am.errors import InputError
from asr_am.hmm import REMEDY
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.states import StateTable, Tree
from asr_am.hmm.training_graph import read_lexicon_fst, training_graph
from asr_am.lang.fst_file import silence_stderr
from asr_am.parallel import parallel_map

logger = logging.getLogger(__name__)


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
class Graphs:
    """Compiled graphs of a set.

    Attributes:
        folder: holds <shard>.ark and <shard>.npz.
        bounds_S1: shard s has utterances bounds_S1[s] to bounds_S1[s + 1].
    """

    folder: Path
    bounds_S1: tuple[int, ...]

    @property
    def shards(self) -> list[tuple[int, int, int]]:
        """(shard, first utterance, end) of each shard."""
        return [(s, self.bounds_S1[s], self.bounds_S1[s + 1]) for s in range(len(self.bounds_S1) - 1)]


@dataclass(frozen=True)
class Alignment:
    """The alignment of a set.

    Attributes:
        labels_N: graph labels, 0 for failed utterances.
        loglik: log-likelihood per aligned frame.
        retried: utterances that needed the retry beam.
        failed: utterances without an alignment.
    """

    labels_N: np.ndarray
    loglik: float
    retried: int
    failed: list[str]


def compile_graphs(
    folder: Path, frames: FrameStore, words_U: Sequence[Sequence[int]], lexicon: Path, tree: Tree, states: StateTable,
    options: AlignOptions, jobs: int,
) -> Graphs:  # fmt: skip
    """Compiles the graphs of all utterances of a set into `folder`, which is replaced.

    Args:
        folder: output folder.
        frames: utterances and their lengths.
        words_U: word ids of each utterance.
        lexicon: path of L.fst.
        tree: decision tree of the system.
        states: states of the system.
        options: self-loop scale.
        jobs: worker processes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    edges = np.linspace(0, frames.num_frames, max(4 * jobs, 8) + 1)
    graphs = Graphs(folder, tuple(np.unique(np.searchsorted(frames.offsets_U1, edges)).tolist()))
    build = functools.partial(_compile_shard, graphs.folder, lexicon, tree, states, options.self_loop_scale)
    tasks = [(shard, frames.utterances[first:end], words_U[first:end]) for shard, first, end in graphs.shards]
    parallel_map(build, tasks, jobs, f"graphs {folder.name}")
    return graphs


def _compile_shard(
    folder: Path, lexicon_path: Path, tree: Tree, states: StateTable, self_loop_scale: float,
    task: tuple[int, Sequence[str], Sequence[Sequence[int]]],
) -> None:  # fmt: skip
    shard, utterances, words_U = task
    lexicon = read_lexicon_fst(lexicon_path)
    labels = []
    with kaldifst.VectorFstWriter(f"ark:{folder / str(shard)}.ark") as writer:
        for utterance, words in zip(utterances, words_U, strict=True):
            try:
                arrays = FstArrays.from_fst(
                    training_graph(words, lexicon, states, tree, self_loop_scale=self_loop_scale)
                )
            except InputError as error:
                raise InputError(f"utterance {utterance}: {error}") from error
            labels_C, columns_A = np.unique(np.append(arrays.ilabel_A, 0), return_inverse=True)  # column 0 is epsilon
            with silence_stderr():
                writer.write(utterance, arrays.relabel(columns_A[:-1]).to_fst())
            labels.append(labels_C[1:])
    counts = [len(labels_C) for labels_C in labels]
    write_npz(folder / f"{shard}.npz", {"labels": np.concatenate(labels), "counts": counts})


def labels_of_shard(folder: Path, shard: int) -> list[np.ndarray]:
    """Returns, for each utterance, the graph labels [C] of the input labels 1 to C of its graph."""
    labels, counts = read_npz(folder / f"{shard}.npz", "labels", "counts", remedy=REMEDY)
    return np.split(labels, np.cumsum(counts)[:-1])


def align(
    graphs: Graphs, frames: FrameStore, gmms: DiagGmms, states: StateTable, options: AlignOptions, jobs: int,
    description: str, boost: dict[int, float] | None = None,
) -> Alignment:  # fmt: skip
    """Finds the best path of every utterance.

    Args:
        graphs: compiled graphs.
        frames: frames of the same utterances.
        gmms: mixtures of the system.
        states: states of the system.
        options: beams and acoustic scale.
        jobs: worker processes.
        description: label of the progress bar, and prefix of the error message.
        boost: factors on the likelihoods of some pdfs (Kaldi's boost-silence).

    Raises:
        InputError: no utterance has a path.
    """
    work = functools.partial(_align_shard, graphs.folder, frames, gmms, states, options, boost or {})
    results = [path for paths in parallel_map(work, graphs.shards, jobs, description) for path in paths]
    labels_N = np.zeros(frames.num_frames, dtype=np.int32)
    total, aligned, retried, failed = 0.0, 0, 0, []
    for index, (labels_T, loglik, used_retry) in enumerate(results):
        retried += used_retry
        if labels_T is None:
            failed.append(frames.utterances[index])
            continue
        labels_N[frames.span(index)] = labels_T
        total, aligned = total + loglik, aligned + len(labels_T)
    if aligned == 0:
        raise InputError(f"{description}: no utterance could be aligned; check transcripts, lexicon and features")
    return Alignment(labels_N, total / aligned, retried, failed)


AlignedPath = tuple[np.ndarray | None, float, bool]  # labels [T], log-likelihood, retry beam used


def _align_shard(
    folder: Path, frames: FrameStore, gmms: DiagGmms, states: StateTable, options: AlignOptions,
    boost: dict[int, float], task: tuple[int, int, int],
) -> list[AlignedPath]:  # fmt: skip
    shard, first, end = task
    labels_C = labels_of_shard(folder, shard)
    acoustic_scale = np.float32(options.acoustic_scale)
    boost_P = np.zeros(gmms.num_pdfs, dtype=np.float32)
    boost_P[list(boost)] = np.log(list(boost.values()))
    paths: list[AlignedPath] = []
    with kaldifst.SequentialVectorFstReader(f"ark:{folder / str(shard)}.ark") as reader:
        for index, labels, (_, graph) in zip(range(first, end), labels_C, reader, strict=True):
            pdfs, column_C = np.unique(states.pdf_L[labels - 1], return_inverse=True)
            x_TD = torch.from_numpy(np.array(frames.x_ND[frames.span(index)]))
            ll_TP = gmms.log_likelihoods(x_TD, pdfs).numpy() + boost_P[pdfs]
            ll_TC = np.take(ll_TP * acoustic_scale, column_C, axis=1)
            columns_T, used_retry = search(graph, ll_TC, options)
            if columns_T is None:
                paths.append((None, 0.0, used_retry))
                continue
            loglik = float(np.take_along_axis(ll_TC, columns_T[:, None] - 1, axis=1).sum(dtype=np.float64))
            paths.append((labels[columns_T - 1], loglik / options.acoustic_scale, used_retry))
    return paths


def search(graph: kaldifst.StdVectorFst, ll_TC: np.ndarray, options: AlignOptions) -> tuple[np.ndarray | None, bool]:
    """Finds the best path to a final state.

    Args:
        graph: input label c reads column c - 1 of `ll_TC`.
        ll_TC: scaled log-likelihoods, C-contiguous float32.
        options: beams.

    Returns:
        Input labels [T], None if there is no path, and whether the retry beam was used.
    """
    for used_retry, beam in enumerate((options.beam, options.retry_beam)):
        decoder = kaldi_decoder.FasterDecoder(graph, kaldi_decoder.FasterDecoderOptions(beam=beam))
        decoder.decode(kaldi_decoder.DecodableCtc(ll_TC))
        if decoder.reached_final():
            _, path = decoder.get_best_path()
            _, labels, _, _ = kaldifst.get_linear_symbol_sequence(path)
            if len(labels) == len(ll_TC):
                return np.array(labels, dtype=np.int64), bool(used_retry)
    return None, True


def log_alignment(name: str, subset: str, alignment: Alignment, utterances: int) -> None:
    """Logs the alignment result of a set, with the ids of up to ten failures."""
    logger.info(
        "%s: %s: %d of %d utterances aligned, %d needed the retry beam, log-likelihood per frame %.2f",
        name, subset, utterances - len(alignment.failed), utterances, alignment.retried, alignment.loglik,
    )  # fmt: skip
    if alignment.failed:
        examples = " ".join(alignment.failed[:10])
        logger.warning("%s: %s: %d utterances have no alignment: %s", name, subset, len(alignment.failed), examples)
