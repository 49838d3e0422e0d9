"""Features made from normalised MFCCs by matrices: `lda` (spliced, LDA+MLLT) and `fmllr` (`lda` adapted to speakers).

Their folders hold the matrices only (`lda.mat`, for fMLLR also <set>_trans.ark and .scp); frames are made when read,
so what is applied is what is stored.

Shapes: T frames, D features, E = D + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from asr_am.errors import InputError
from asr_am.features.projection import Projection
from asr_am.features.reader import FeatureReader, read_options
from asr_am.features.transforms import REMEDY, apply, read_transforms

BASE = "mfcc"  # what the matrices are applied to
MATRIX = "lda.mat"


class Features(Protocol):
    """The features of one set, by utterance id; picklable."""

    dim: int
    utterances: list[str]

    def speaker(self, utterance: str) -> str: ...

    def __contains__(self, utterance: str) -> bool: ...

    def __getitem__(self, utterance: str) -> np.ndarray: ...


def open_features(features_dir: Path, kind: str, subset: str) -> Features:
    """Features of one set as models of this kind take them; InputError where files are missing or do not agree."""
    if kind not in ("lda", "fmllr"):
        return FeatureReader(features_dir, kind, subset)
    projection = load_projection(features_dir, features_dir / kind / MATRIX)
    transforms = read_transforms(features_dir / kind, subset, projection.dim) if kind == "fmllr" else None
    return AdaptedReader(features_dir, subset, projection, transforms)


def load_projection(features_dir: Path, path: Path) -> Projection:
    """The matrix at `path`, for the MFCCs in `features_dir`."""
    return Projection.load(path, read_options(features_dir / BASE).dim)


class AdaptedReader:
    """MFCCs of one set through a projection and, where there are any, the speakers' transforms."""

    def __init__(
        self, features_dir: Path, subset: str, projection: Projection, transforms: Mapping[str, np.ndarray] | None
    ) -> None:
        """Raises InputError, naming the speaker, unless every speaker of the set has a transform [D, E]."""
        self._reader = FeatureReader(features_dir, BASE, subset)
        self._projection, self._transforms = projection, transforms
        self.dim, self.utterances = projection.dim, self._reader.utterances
        speakers = {self.speaker(utterance) for utterance in self.utterances}
        if transforms is not None and (missing := speakers - transforms.keys()):
            raise InputError(f"{subset}: no fMLLR transform for speaker {min(missing)}; {REMEDY}")

    def speaker(self, utterance: str) -> str:
        """The speaker of `utterance`."""
        return self._reader.speaker(utterance)

    def __contains__(self, utterance: str) -> bool:
        return utterance in self._reader

    def __getitem__(self, utterance: str) -> np.ndarray:
        """float32 [T, D]. Raises InputError for an unknown utterance or a damaged archive."""
        x_TD = self._projection(self._reader.static(utterance))
        return x_TD if self._transforms is None else apply(self._transforms[self.speaker(utterance)], x_TD)
