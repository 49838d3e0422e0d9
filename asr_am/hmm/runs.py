"""An alignment as runs: maximal stretches of frames in one state of one phone.

Shapes: N frames of a set, U utterances, R runs, M distinct contexts of runs, L graph labels.

Alignments of a whole set are one vector of graph labels, labels_N, parallel to the rows of its `FrameStore`; 0 marks
the frames of utterances that have no alignment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asr_am.hmm.states import StateTable


@dataclass(frozen=True)
class Runs:
    """label_R: graph label; start_R, length_R: frames; windows_R3: previous, own, next phone (0 = edge); state_R."""

    label_R: np.ndarray
    start_R: np.ndarray
    length_R: np.ndarray
    windows_R3: np.ndarray
    state_R: np.ndarray

    def contexts(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct windows with their states, int64 [M, 4] in order, and which of them each run has, int [R]."""
        keys_R4 = np.column_stack([self.windows_R3, self.state_R]).astype(np.int64)
        key_R = np.ravel_multi_index(tuple(keys_R4.T), keys_R4.max(axis=0, initial=0) + 1)  # sorted faster than rows
        _, first_M, context_R = np.unique(key_R, return_index=True, return_inverse=True)
        return keys_R4[first_M], context_R


def runs_of(labels_N: np.ndarray, offsets_U1: np.ndarray, table: StateTable) -> Runs:
    """The runs of all aligned utterances. A phone begins with its first state: topologies have no skips.

    Two phones of one state each that follow one another as the same phone cannot be told apart and make one run.
    """
    new_N = np.ones(len(labels_N), dtype=bool)
    new_N[1:] = labels_N[1:] != labels_N[:-1]
    new_N[offsets_U1[:-1][offsets_U1[:-1] < len(labels_N)]] = True
    start_R = np.flatnonzero(new_N)
    length_R = np.diff(np.append(start_R, len(labels_N)))
    aligned_R = labels_N[start_R] > 0
    start_R, length_R = start_R[aligned_R], length_R[aligned_R]

    label_R = labels_N[start_R]
    phone_R, state_R = table.labels_L3[label_R - 1, 0], table.labels_L3[label_R - 1, 1]
    utterance_R = np.searchsorted(offsets_U1, start_R, side="right")
    return Runs(label_R, start_R, length_R, _windows(phone_R, state_R, utterance_R), state_R)


def _windows(phone_R: np.ndarray, state_R: np.ndarray, utterance_R: np.ndarray) -> np.ndarray:
    """Previous, own and next phone of each run, 0 beyond its utterance."""
    first_R = state_R == 0
    phone_S, utterance_S = phone_R[first_R], utterance_R[first_R]  # S: phone instances
    joined = utterance_S[1:] == utterance_S[:-1]
    left_S, right_S = np.zeros_like(phone_S), np.zeros_like(phone_S)
    left_S[1:] = np.where(joined, phone_S[:-1], 0)
    right_S[:-1] = np.where(joined, phone_S[1:], 0)
    windows_S3 = np.stack([left_S, phone_S, right_S], axis=1)
    return windows_S3[np.cumsum(first_R) - 1]
