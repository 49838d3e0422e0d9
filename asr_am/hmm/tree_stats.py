"""What the decision tree is grown from: sums over the frames of every (window, state) that was seen.

Shapes: R runs, D feature dimension, M distinct (window, state), N frames.

The log-likelihood of frames under their own best Gaussian depends on their count and their first and second order sums
only, so merging and splitting sets of contexts is adding and subtracting rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from asr_am.hmm.frames import FrameStore
from asr_am.hmm.runs import Runs

BLOCK = 8000  # runs summed at a time, so that memory stays small
VARIANCE_FLOOR = 0.01


@dataclass(frozen=True)
class TreeStats:
    """windows_M3, state_M: int; sums_MF: float64 [M, 1 + 2D], columns count, sum of x, sum of x*x."""

    windows_M3: np.ndarray
    state_M: np.ndarray
    sums_MF: np.ndarray

    @property
    def dim(self) -> int:
        return (self.sums_MF.shape[1] - 1) // 2


def accumulate_tree_stats(frames: FrameStore, runs: Runs) -> TreeStats:
    """Sums over the frames of `runs` by (window, state)."""
    keys_M4, key_R = runs.contexts()
    dim = frames.dim
    sums_MF = np.zeros((len(keys_M4), 1 + 2 * dim))
    sums_MF[:, 0] = np.bincount(key_R, runs.length_R, minlength=len(keys_M4))
    for begin in range(0, len(key_R), BLOCK):
        block = slice(begin, begin + BLOCK)
        order = np.argsort(key_R[block], kind="stable")
        keys, first = np.unique(key_R[block][order], return_index=True)
        sums_RF = _run_sums(frames, runs.start_R[block], runs.length_R[block])
        sums_MF[keys, 1:] += np.add.reduceat(sums_RF[order], first, axis=0)
    return TreeStats(keys_M4[:, :3], keys_M4[:, 3], sums_MF)


def _run_sums(frames: FrameStore, start_R: np.ndarray, length_R: np.ndarray) -> np.ndarray:
    """Sums of x and of x*x over each run, float64 [R, 2D]; runs in the order of the frames."""
    first = int(start_R[0])
    x_ND = frames.x_ND[first : int(start_R[-1] + length_R[-1])].astype(np.float64)
    bounds = np.stack([start_R, start_R + length_R], axis=1).ravel() - first
    # every second piece lies between runs; the last run ends where the frames end
    return np.add.reduceat(np.concatenate([x_ND, x_ND * x_ND], axis=1), bounds[:-1], axis=0)[::2]


def log_likelihood(sums_XF: np.ndarray) -> np.ndarray:
    """Log-likelihood [X] of the frames behind each row under the Gaussian of that row; 0 for rows without frames."""
    dim = (sums_XF.shape[1] - 1) // 2
    count_X1 = np.maximum(sums_XF[:, :1], 1e-10)
    mean_XD = sums_XF[:, 1 : 1 + dim] / count_X1
    var_XD = np.maximum(sums_XF[:, 1 + dim :] / count_X1 - mean_XD**2, VARIANCE_FLOOR)
    return -0.5 * sums_XF[:, 0] * (dim * (1 + math.log(2 * math.pi)) + np.log(var_XD).sum(axis=1))
