"""Low frame rate: adjacent frames stacked into one, as Ladkat et al. (Interspeech 2019, section 3.2) do with three.

Features on disk, alignments and decoding graphs keep the full rate. Stage egs stacks features and takes the label of
the middle frame of each stack; decoding repeats the score of a stack for each of its frames, so that HMM topology, LM
weights and word times are those of the full rate. A kind that ends in `_lfr` says that its models work so.

Shapes: T frames, K stacks, F features, N = STACK frames of a stack.
"""

from __future__ import annotations

import numpy as np

STACK = 3
SUFFIX = "_lfr"


def stack_of(kind: str) -> int:
    """Frames that a model for features of `kind` takes as one."""
    return STACK if kind.endswith(SUFFIX) else 1


def base_of(kind: str) -> str:
    """The kind of the features that are stacked, which is on disk."""
    return kind.removesuffix(SUFFIX)


def stack_frames(x_TF: np.ndarray, size: int, phase: int = 0) -> np.ndarray:
    """[K, size F], K = ceil((T - phase) / size): frames from `phase` on, `size` side by side; the last is repeated."""
    if size == 1:
        return x_TF
    count = -(-(len(x_TF) - phase) // size)
    frame_K = np.arange(phase, phase + count * size)
    return x_TF[np.minimum(frame_K, len(x_TF) - 1)].reshape(count, -1)


def middle_labels(labels_T: np.ndarray, size: int, phase: int = 0) -> np.ndarray:
    """[K]: the label of the middle frame of each stack (of the last frame, where the stack has no middle)."""
    middle_K = np.arange(phase, len(labels_T), size) + size // 2
    return labels_T[np.minimum(middle_K, len(labels_T) - 1)]


def repeat_stacks(scores_KP: np.ndarray, size: int, frames: int) -> np.ndarray:
    """[frames, P]: the scores of each stack (of phase 0) for all of its frames."""
    return np.repeat(scores_KP, size, axis=0)[:frames]
