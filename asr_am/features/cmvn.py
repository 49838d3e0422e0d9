"""Cepstral mean and variance normalisation from sums in Kaldi's form.

Shapes: T frames, D features. Statistics are float64 [2, D + 1]: row 0 the sums of x and the number of frames, row 1
the sums of x squared and a zero.
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
