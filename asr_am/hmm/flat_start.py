"""Flat start: global mean and variance for all pdfs, and equal alignments along a path through each graph.

Shapes: N frames of a set, D feature dimension.
"""

from __future__ import annotations

import functools

import kaldifst
import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.alignment_graphs import Graphs
from asr_am.hmm.alignments import LabelFile
from asr_am.hmm.frame_loops import add_moments
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms, single_gaussians
from asr_am.hmm.viterbi import Alignment
from asr_am.parallel import parallel_map

BLOCK = 2**15  # frames in memory at a time


def flat_gmms(frames: FrameStore, num_pdfs: int) -> tuple[DiagGmms, np.ndarray]:
    """Returns one Gaussian per pdf with the mean and variance of all frames, and that variance, float64 [D]."""
    mean_D, square_D = _moments(frames)
    var_D = square_D - mean_D**2
    if not (var_D > 1e-8).all():
        raise InputError(f"{frames.folder.name}: a feature is constant over all frames; run stage 2 (features) again")
    return single_gaussians(np.tile(mean_D, (num_pdfs, 1)), np.tile(var_D, (num_pdfs, 1))), var_D


def _moments(frames: FrameStore) -> tuple[np.ndarray, np.ndarray]:
    """Returns the means of x and of x*x over all frames, float64 [D], in blocks to bound memory."""
    sum_D, square_D = np.zeros(frames.dim), np.zeros(frames.dim)
    for begin in range(0, frames.num_frames, BLOCK):
        add_moments(frames.read(slice(begin, min(begin + BLOCK, frames.num_frames))), sum_D, square_D)
    return sum_D / frames.num_frames, square_D / frames.num_frames


def equal_alignment(graphs: Graphs, frames: FrameStore, seed: int, jobs: int) -> Alignment:
    """Aligns every utterance to a random path through its graph, with its frames spread evenly over the states.

    Args:
        seed: random seed of the first utterance's path, which chooses pronunciations and optional silences.
    """
    labels = LabelFile.create(graphs.folder, frames.num_frames)
    work = functools.partial(_equal_shard, graphs, frames, seed, labels)
    failed = [index for shard in parallel_map(work, graphs.shards, jobs, "equal alignment") for index in shard]
    return Alignment(labels.read(), float("nan"), 0, [frames.utterances[index] for index in failed])


def _equal_shard(
    graphs: Graphs, frames: FrameStore, seed: int, labels: LabelFile, task: tuple[int, int, int]
) -> list[int]:
    """Writes the labels of a shard. Returns the utterances that failed."""
    shard, first, end = task
    part, rows, failed = graphs.load(shard), frames.rows(first, end), []
    labels_N = np.zeros(rows.stop - rows.start, np.int32)
    for index in range(first, end):
        span = frames.span(index)
        path = _equal_path(part.fst(index - first), span.stop - span.start, seed + index)
        if path is None:
            failed.append(index)
        else:
            labels_N[span.start - rows.start : span.stop - rows.start] = path
    labels.write(rows.start, labels_N)
    return failed


def _equal_path(graph: kaldifst.StdVectorFst, frames: int, seed: int) -> np.ndarray | None:
    succeeded, path = kaldifst.equal_align(graph, frames, seed)
    if not succeeded:
        return None
    _, labels, _, _ = kaldifst.get_linear_symbol_sequence(path)
    return np.array(labels) if len(labels) == frames else None
