"""Linear discriminant analysis of spliced frames, whose classes are the pdfs of an alignment.

Shapes: N frames of a set, P pdfs, C values of a spliced frame, D dimensions kept, S static features of a frame.

The rows of the result are the directions in which the classes' means differ most, scaled so that the covariance within
classes is the identity (Haeb-Umbach & Ney 1992; Kaldi's est-lda). Diagonal Gaussians fit what is left of it, MLLT does
the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from asr_am.errors import InputError
from asr_am.features.projection import Projection, splice
from asr_am.hmm.frames import FrameStore
from asr_am.parallel import track

BLOCK = 20_000  # frames in memory at a time


@dataclass(frozen=True)
class ClassStats:
    """count_P, sums_PC: of the frames of each class; second_CC: sum of x x' over all of them. float64."""

    count_P: np.ndarray
    sums_PC: np.ndarray
    second_CC: np.ndarray


def accumulate_classes(
    mfcc: FrameStore, num_static: int, context: int, pdf_N: np.ndarray, num_pdfs: int, description: str
) -> ClassStats:
    """Statistics of spliced static features, the first `num_static` columns of `mfcc`; pdf < 0: frame left out."""
    width = num_static * (2 * context + 1)
    stats = ClassStats(np.zeros(num_pdfs), np.zeros((num_pdfs, width)), np.zeros((width, width)))
    pending: list[np.ndarray] = []
    begin = 0
    for utterance in track(range(len(mfcc.utterances)), description):
        span = mfcc.span(utterance)
        pending.append(splice(mfcc.x_ND[span, :num_static], context))
        if span.stop - begin >= BLOCK or utterance == len(mfcc.utterances) - 1:
            _add(stats, np.concatenate(pending).astype(np.float64), pdf_N[begin : span.stop])
            pending, begin = [], span.stop
    return stats


def _add(stats: ClassStats, x_NC: np.ndarray, pdf_N: np.ndarray) -> None:
    order_N = np.argsort(pdf_N, kind="stable")
    order_N = order_N[np.searchsorted(pdf_N[order_N], 0) :]
    pdfs, first, counts = np.unique(pdf_N[order_N], return_index=True, return_counts=True)
    if len(pdfs) == 0:
        return
    x_NC = x_NC[order_N]
    stats.count_P[pdfs] += counts
    stats.sums_PC[pdfs] += np.add.reduceat(x_NC, first, axis=0)
    stats.second_CC[:] += x_NC.T @ x_NC


def estimate_lda(stats: ClassStats, dim: int, num_static: int) -> Projection:
    """The projection to the `dim` most discriminative directions, at most C. InputError where LDA has no solution."""
    total = stats.count_P.sum()
    mean_C = stats.sums_PC.sum(axis=0) / max(total, 1)
    seen = stats.count_P > 0
    scaled_PC = stats.sums_PC[seen] / np.sqrt(stats.count_P[seen, None] * total)
    of_means_CC = scaled_PC.T @ scaled_PC
    within_CC = stats.second_CC / max(total, 1) - of_means_CC
    try:
        _, vectors_CC = scipy.linalg.eigh(of_means_CC - np.outer(mean_C, mean_C), within_CC)
    except (np.linalg.LinAlgError, ValueError) as error:
        raise InputError(
            f"align: {total:.0f} frames of speech have linearly dependent MFCCs, so that LDA has no solution; "
            "look at the recordings, or use align=triphone"
        ) from error
    return Projection(np.ascontiguousarray(vectors_CC[:, ::-1][:, :dim].T, dtype=np.float32), num_static)
