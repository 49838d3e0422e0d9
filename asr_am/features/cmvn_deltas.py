"""Cepstral mean and variance normalisation, and deltas as Kaldi's add-deltas computes them.

CMVN statistics are sums in Kaldi's form, float64 [2, D + 1]: row 0 holds the sums of x and the number of frames, row 1
the sums of x squared and a zero.

Double deltas convolve the original frames with the twice convolved filter, with edge frames repeated. (Deltas of
deltas, as from applying torchaudio.functional.compute_deltas twice, differ in the first and last frames.)

Shapes: T frames, D features.
"""

from __future__ import annotations

import numpy as np

VARIANCE_FLOOR = 1.0e-20  # as in Kaldi
RELATIVE_FLOOR = 1.0e-10  # of the squared mean: below it, float32 has the variance of its rounding
WINDOW = 2  # frames on each side of the first-order delta filter
_first = np.arange(-WINDOW, WINDOW + 1) / (2.0 * sum(i * i for i in range(1, WINDOW + 1)))
FILTERS = (_first, np.convolve(_first, _first))


def accumulate(features_TD: np.ndarray) -> np.ndarray:
    """Returns the statistics of one utterance. Those of a speaker are their sum."""
    x = features_TD.astype(np.float64)
    stats = np.zeros((2, x.shape[1] + 1))
    stats[0, :-1], stats[0, -1] = x.sum(axis=0), len(x)
    stats[1, :-1] = np.square(x).sum(axis=0)
    return stats


def normalise(features_TD: np.ndarray, stats: np.ndarray, *, variance: bool) -> np.ndarray:
    """Normalises the mean of features and, with `variance`, their standard deviation. Returns float32 [T, D]."""
    count = stats[0, -1]
    mean_D = stats[0, :-1] / count
    if not variance:
        return features_TD - mean_D.astype(np.float32)
    floor_D = np.maximum(RELATIVE_FLOOR * mean_D**2, VARIANCE_FLOOR)
    variance_D = np.maximum(stats[1, :-1] / count - mean_D**2, floor_D)
    scale_D = 1.0 / np.sqrt(variance_D)
    return features_TD * scale_D.astype(np.float32) - (mean_D * scale_D).astype(np.float32)


def add_deltas(features_TD: np.ndarray) -> np.ndarray:
    """Returns the features, their deltas and their double deltas, float32 [T, 3D]."""
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
