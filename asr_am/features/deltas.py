"""Time derivatives of features, as Kaldi's add-deltas computes them.

The second order convolves the original frames with the twice convolved filter, and frames beyond an edge repeat the
frame at the edge. (Taking deltas of deltas, as torchaudio.functional.compute_deltas twice would, differs in the first
and last frames.)

Shapes: T frames, D features.
"""

from __future__ import annotations

import numpy as np

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
