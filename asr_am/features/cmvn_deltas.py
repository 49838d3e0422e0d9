"""Cepstral mean and variance normalisation from sums in Kaldi's form.

Shapes: T frames, D features. Statistics are float64 [2, D + 1]: row 0 the sums of x and the number of frames, row 1
the sums of x squared and a zero.


Time derivatives of features, as Kaldi's add-deltas computes them.

The second order convolves the original frames with the twice convolved filter, and frames beyond an edge repeat the
frame at the edge. (Taking deltas of deltas, as torchaudio.functional.compute_deltas twice would, differs in the first
and last frames.)

Shapes: T frames, D features.
"""

from __future__ import annotations

import numpy as np

VARIANCE_FLOOR = 1.0e-20  # Kaldi's


def accumulate(features_TD: np.ndarray) -> np.ndarray:
    """Statistics of one utterance; those of a speaker are their sum."""
    x = features_TD.astype(np.float64)
    stats = np.zeros((2, x.shape[1] + 1))
    stats[0, :-1], stats[0, -1] = x.sum(axis=0), len(x)
    stats[1, :-1] = np.square(x).sum(axis=0)
    return stats


def normalise(features_TD: np.ndarray, stats: np.ndarray, *, variance: bool) -> np.ndarray:
    """Features with the mean of `stats` taken off and, with `variance`, divided by its deviation. float32 [T, D]."""
    count = stats[0, -1]
    mean_D = stats[0, :-1] / count
    if not variance:
        return features_TD - mean_D.astype(np.float32)
    variance_D = np.maximum(stats[1, :-1] / count - mean_D**2, VARIANCE_FLOOR)
    scale_D = 1.0 / np.sqrt(variance_D)
    return features_TD * scale_D.astype(np.float32) - (mean_D * scale_D).astype(np.float32)


WINDOW = 2
_first = np.arange(-WINDOW, WINDOW + 1) / (2.0 * sum(i * i for i in range(1, WINDOW + 1)))
FILTERS = (_first, np.convolve(_first, _first))


def add_deltas(features_TD: np.ndarray) -> np.ndarray:
    """[T, 3D] float32: the features, their deltas, their double deltas."""
    num_frames = len(features_TD)
    reach = len(FILTERS[-1]) // 2
    padded = np.pad(features_TD, ((reach, reach), (0, 0)), mode="edge")
    blocks = [features_TD]
    for taps in FILTERS:
        offset = reach - len(taps) // 2
        delta_TD = np.zeros_like(features_TD)
        for position, tap in enumerate(taps, start=offset):
            if tap:
                delta_TD += np.float32(tap) * padded[position : position + num_frames]
        blocks.append(delta_TD)
    return np.concatenate(blocks, axis=1)
