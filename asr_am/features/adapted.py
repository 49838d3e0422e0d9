"""Features that matrices make from mean-normalised MFCCs: `lda` (spliced, LDA+MLLT) and `fmllr` (`lda` with fMLLR).

Only the matrices are stored: `lda.mat` (LDA, or LDA and MLLT as one product), and for fMLLR also <set>_trans.ark and
.scp with one affine transform [A b] per speaker, y = A x + b, in Kaldi's format. Frames are computed when they are
read.

Shapes: T frames, S static features of one frame, C = 2 context + 1 spliced frames, D features after the projection,
E = D + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import kaldiio
import numpy as np

from asr_am.data.checksums import intact
from asr_am.data.kaldi_archive import Entry, read_entry, read_scp, reason, write_archive
from asr_am.data.temporary import replacing
from asr_am.errors import InputError
from asr_am.features.feature_archive import DAMAGE, REMEDY_ALIGN, load_matrix
from asr_am.features.kinds import read_kind
from asr_am.features.reader import FeatureReader

REMEDY = "run stage 4 (speaker) again"
BASE = "mfcc"  # the features that matrices are applied to
MATRIX = "lda.mat"


def splice(x_TS: np.ndarray, context: int) -> np.ndarray:
    """Returns [T, C S]: each frame with `context` frames on each side, in time order. Edge frames are repeated."""
    num_frames = len(x_TS)
    index_TC = np.arange(num_frames)[:, None] + np.arange(-context, context + 1)
    return x_TS[np.clip(index_TC, 0, num_frames - 1)].reshape(num_frames, -1)


@dataclass(frozen=True)
class Projection:
    """A linear projection of spliced static features.

    Attributes:
        matrix: float32 [D, C S].
        num_static: S.
    """

    matrix: np.ndarray
    num_static: int

    @property
    def dim(self) -> int:
        return self.matrix.shape[0]

    @property
    def context(self) -> int:
        return (self.matrix.shape[1] // self.num_static - 1) // 2

    def __call__(self, x_TS: np.ndarray) -> np.ndarray:
        """Projects mean-normalised static features to float32 [T, D]."""
        return splice(x_TS, self.context) @ self.matrix.T

    def then(self, transform_DD: np.ndarray) -> Projection:
        """Returns this projection followed by another linear transform."""
        return Projection((transform_DD @ self.matrix.astype(np.float64)).astype(np.float32), self.num_static)

    def save(self, path: Path) -> None:
        """Writes the matrix in Kaldi's binary format (its `final.mat`). The splicing context follows from its width."""
        with replacing(path) as temporary:
            kaldiio.save_mat(str(temporary), self.matrix)

    @classmethod
    def load(cls, path: Path, num_static: int) -> Projection:
        """Reads what `save` wrote. Raises InputError if it is missing, damaged or not for `num_static` features."""
        try:
            matrix = read_entry(Entry(str(intact(path)), 0))
        except DAMAGE as error:
            raise InputError(f"{path}: not readable ({reason(error)}); {REMEDY_ALIGN}") from error
        if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not np.isfinite(matrix).all():
            raise InputError(f"{path}: holds no finite matrix; {REMEDY_ALIGN}")
        frames, rest = divmod(matrix.shape[1], num_static)
        if rest or frames % 2 == 0:
            raise InputError(
                f"{path}: takes {matrix.shape[1]} values, not an odd number of frames of {num_static}; {REMEDY_ALIGN}"
            )
        return cls(matrix.astype(np.float32), num_static)


def write_transforms(folder: Path, subset: str, transforms: Mapping[str, np.ndarray]) -> None:
    """Writes the transforms of a set's speakers, [D, E] by speaker, into `folder`."""
    write_archive(folder, f"{subset}_trans", ((s, t.astype(np.float32)) for s, t in sorted(transforms.items())))


def read_transforms(folder: Path, subset: str, dim: int | None = None) -> dict[str, np.ndarray]:
    """Reads the transforms of a set's speakers.

    Args:
        folder: folder of <subset>_trans.scp.
        dim: expected D. Default: any.

    Returns:
        [D, E] by speaker.

    Raises:
        InputError: a file is missing or damaged, or a transform is not of `dim` features.
    """
    found = {}
    for speaker, location in read_scp(folder / f"{subset}_trans.scp", REMEDY).items():
        transform_DE = load_matrix(location, REMEDY)
        rows, columns = transform_DE.shape
        if columns != rows + 1 or rows != (dim or rows) or not np.isfinite(transform_DE).all():
            raise InputError(f"{location}: speaker {speaker} has no transform of {dim or rows} features; {REMEDY}")
        found[speaker] = transform_DE
    return found


def mean_transform(transforms: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the mean transform [D, E], that of the average speaker."""
    return np.mean([np.asarray(t, dtype=np.float64) for t in transforms.values()], axis=0)


def apply(transform_DE: np.ndarray, x_TD: np.ndarray) -> np.ndarray:
    """Returns A x + b of every frame, float32 [T, D]."""
    return x_TD @ transform_DE[:, :-1].T + transform_DE[:, -1]


class Features(Protocol):
    """The features of one set by utterance id. Picklable."""

    dim: int
    utterances: list[str]

    def speaker(self, utterance: str) -> str: ...

    def __contains__(self, utterance: str) -> bool: ...

    def __getitem__(self, utterance: str) -> np.ndarray: ...


def open_features(features_dir: Path, kind: str, subset: str) -> Features:
    """Opens the features of one set. Raises InputError if files are missing or inconsistent."""
    if kind not in ("lda", "fmllr"):
        return FeatureReader(features_dir, kind, subset)
    projection = load_projection(features_dir, features_dir / kind / MATRIX)
    transforms = read_transforms(features_dir / kind, subset, projection.dim) if kind == "fmllr" else None
    return AdaptedReader(features_dir, subset, projection, transforms)


def load_projection(features_dir: Path, path: Path) -> Projection:
    """Loads the matrix at `path` for the MFCCs in `features_dir`."""
    return Projection.load(path, read_kind(features_dir / BASE).dim)


class AdaptedReader:
    """MFCCs of one set through a projection and, if given, the speakers' transforms."""

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
        """Returns the speaker of `utterance`."""
        return self._reader.speaker(utterance)

    def __contains__(self, utterance: str) -> bool:
        return utterance in self._reader

    def __getitem__(self, utterance: str) -> np.ndarray:
        """Returns float32 [T, D]. Raises InputError for an unknown utterance or a damaged archive."""
        x_TD = self._projection(self._reader.static(utterance))
        return x_TD if self._transforms is None else apply(self._transforms[self.speaker(utterance)], x_TD)
