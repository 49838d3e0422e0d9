"""Flat start: global mean and variance for all pdfs, and equal alignments along a path through each graph.

Shapes: N frames of a set, D feature dimension, C graph labels in one utterance's graph.
"""

from __future__ import annotations

import functools
from pathlib import Path

import kaldifst
import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms, single_gaussians
from asr_am.hmm.viterbi import Alignment, Graphs, labels_of_shard
from asr_am.parallel import parallel_map

BLOCK = 8192  # frames in memory at a time


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
        x_ND = frames.x_ND[begin : begin + BLOCK]
        # adds row by row, which gives the same bits for any block size
        sum_D = np.concatenate([sum_D[None], x_ND]).sum(axis=0)
        square_D = np.concatenate([square_D[None], np.square(x_ND)]).sum(axis=0)
    return sum_D / frames.num_frames, square_D / frames.num_frames


def equal_alignment(graphs: Graphs, frames: FrameStore, seed: int, jobs: int) -> Alignment:
    """Aligns every utterance to a random path through its graph, with its frames spread evenly over the states.

    Args:
        graphs: compiled graphs.
        frames: frames of the same utterances.
        seed: random seed of the first utterance's path, which chooses pronunciations and optional silences.
        jobs: worker processes.
    """
    work = functools.partial(_equal_shard, graphs.folder, frames, seed)
    results = [labels for shard in parallel_map(work, graphs.shards, jobs, "equal alignment") for labels in shard]
    labels_N = np.zeros(frames.num_frames, dtype=np.int32)
    failed = []
    for index, labels_T in enumerate(results):
        if labels_T is None:
            failed.append(frames.utterances[index])
        else:
            labels_N[frames.span(index)] = labels_T
    return Alignment(labels_N, float("nan"), 0, failed)


def _equal_shard(folder: Path, frames: FrameStore, seed: int, task: tuple[int, int, int]) -> list[np.ndarray | None]:
    shard, first, end = task
    labels_C = labels_of_shard(folder, shard)
    found: list[np.ndarray | None] = []
    with kaldifst.SequentialVectorFstReader(f"ark:{folder / str(shard)}.ark") as reader:
        for index, labels, (_, graph) in zip(range(first, end), labels_C, reader, strict=True):
            span = frames.span(index)
            found.append(_equal_path(graph, labels, span.stop - span.start, seed + index))
    return found


def _equal_path(graph: kaldifst.StdVectorFst, labels_C: np.ndarray, frames: int, seed: int) -> np.ndarray | None:
    succeeded, path = kaldifst.equal_align(graph, frames, seed)
    if not succeeded:
        return None
    _, columns, _, _ = kaldifst.get_linear_symbol_sequence(path)
    return labels_C[np.array(columns) - 1] if len(columns) == frames else None
