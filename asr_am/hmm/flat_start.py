"""The first alignment of all, without any model: frames shared out equally along a path through each graph.

Shapes: N frames of a set, U utterances, C graph labels in one utterance's graph.
"""

from __future__ import annotations

import functools
from pathlib import Path

import kaldifst
import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.align import Alignment, Graphs, labels_of_shard
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.gmm import DiagGmms, single_gaussians
from asr_am.parallel import parallel_map


def flat_gmms(frames: FrameStore, num_pdfs: int) -> tuple[DiagGmms, np.ndarray]:
    """All pdfs with the mean and variance of all frames; and that variance, float64 [D]."""
    mean_D = np.mean(frames.x_ND, axis=0, dtype=np.float64)
    var_D = np.asarray(np.mean(np.square(frames.x_ND), axis=0, dtype=np.float64) - mean_D**2)
    if not (var_D > 1e-8).all():
        raise InputError(f"{frames.folder.name}: a feature has the same value in every frame; run stage features again")
    return single_gaussians(np.tile(mean_D, (num_pdfs, 1)), np.tile(var_D, (num_pdfs, 1))), var_D


def equal_alignment(graphs: Graphs, frames: FrameStore, seed: int, jobs: int) -> Alignment:
    """A random path of every utterance (optional silences at random), its frames spread evenly over its states."""
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
