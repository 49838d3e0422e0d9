"""Tests i-vectors by nearest neighbours among utterances of speakers that no model was trained on.

    python scripts/bench/ivector_speakers.py exp/an4/features

Every utterance gets an i-vector from itself alone (2.6 s on average on AN4). For each utterance of dev and test, the
nearest other one (by cosine) should be of the same speaker. UBM, extractor, centring, whitening and LDA are trained on
the set train, which has other speakers. Prints the correct share for i-vectors that are centred, centred and whitened,
and after LDA (to as many dimensions as there are, whitened within speakers). All recordings of a speaker are of one
session, so speaker and channel are recognised together.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # must be set before torch is loaded

import argparse
from pathlib import Path

import numpy as np
from scipy.linalg import eigh

from asr_am.features.ivector.extract_ivectors import load_estimator, load_options
from asr_am.features.ivector.speech import Speech

HELD_OUT = ("dev", "test")


def utterance_ivectors(features: Path, subset: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns i-vectors, float64 [U, S], and the speaker of each."""
    folder = features / "ivector"
    estimate, speech = load_estimator(folder), Speech(features, subset, load_options(folder).normalise)
    utterances = speech.reader.utterances
    rows_US = estimate.offline([speech.frames(utterance)] for utterance in utterances).numpy()
    return rows_US, np.array([speech.reader.speaker(utterance) for utterance in utterances])


def within_and_total(x_US: np.ndarray, speaker_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns covariances [S, S] about the means of the speakers, and about the total mean."""
    _, index_U = np.unique(speaker_U, return_inverse=True)
    counts = np.bincount(index_U)
    means = np.stack([np.bincount(index_U, column) for column in x_US.T], axis=1) / counts[:, None]
    return np.cov((x_US - means[index_U]).T, bias=True), np.cov(x_US.T, bias=True)


def nearest_is_right(x_US: np.ndarray, speaker_U: np.ndarray) -> float:
    """Returns the share of rows whose nearest other row, by cosine, has the same speaker."""
    unit_US = x_US / np.linalg.norm(x_US, axis=1, keepdims=True)
    cosine_UU = unit_US @ unit_US.T
    np.fill_diagonal(cosine_UU, -np.inf)
    return float(np.mean(speaker_U[cosine_UU.argmax(axis=1)] == speaker_U))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path, help="exp/<corpus>/features, with ivector/ in it")
    features = parser.parse_args().features
    train_US, train_speaker_U = utterance_ivectors(features, "train")
    sets = [utterance_ivectors(features, subset) for subset in HELD_OUT]
    x_US = np.concatenate([x for x, _ in sets]) - train_US.mean(axis=0)
    speaker_U = np.concatenate([speakers for _, speakers in sets])
    within_SS, total_SS = within_and_total(train_US, train_speaker_U)
    whitening_SS = np.linalg.inv(np.linalg.cholesky(total_SS)).T
    lda_SS = eigh(total_SS, within_SS)[1][:, ::-1][:, : len(np.unique(train_speaker_U)) - 1]
    print(f"{len(x_US)} utterances of {len(np.unique(speaker_U))} speakers; nearest neighbour of the same speaker:")
    for name, transform_SS in (("centred", np.eye(x_US.shape[1])), ("whitened", whitening_SS), ("LDA", lda_SS)):
        print(f"{name:9s} {100 * nearest_is_right(x_US @ transform_SS, speaker_U):.1f} %")


if __name__ == "__main__":
    main()
