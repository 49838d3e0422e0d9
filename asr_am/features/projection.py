"""Spliced frames through one matrix for all speakers: LDA, or LDA and MLLT as one product.

Shapes: T frames, S static features of one frame, C = 2 context + 1 spliced frames, D features after the projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kaldiio
import numpy as np

from asr_am.data.archive import read_entry, reason
from asr_am.errors import InputError
from asr_am.features.archive import DAMAGE, REMEDY_ALIGN


def splice(x_TS: np.ndarray, context: int) -> np.ndarray:
    """[T, C S]: each frame with `context` frames on either side, in time order; frames at an edge are repeated."""
    num_frames = len(x_TS)
    index_TC = np.arange(num_frames)[:, None] + np.arange(-context, context + 1)
    return x_TS[np.clip(index_TC, 0, num_frames - 1)].reshape(num_frames, -1)


@dataclass(frozen=True)
class Projection:
    """matrix: float32 [D, C S], applied to spliced static features. num_static: S."""

    matrix: np.ndarray
    num_static: int

    @property
    def dim(self) -> int:
        return self.matrix.shape[0]

    @property
    def context(self) -> int:
        return (self.matrix.shape[1] // self.num_static - 1) // 2

    def __call__(self, x_TS: np.ndarray) -> np.ndarray:
        """float32 [T, D] of mean-normalised static features."""
        return splice(x_TS, self.context) @ self.matrix.T

    def then(self, transform_DD: np.ndarray) -> Projection:
        """This projection followed by another linear transform."""
        return Projection((transform_DD @ self.matrix.astype(np.float64)).astype(np.float32), self.num_static)

    def save(self, path: Path) -> None:
        """Write the matrix as Kaldi's binary matrix file (its `final.mat`); the splicing follows from its width."""
        temporary = path.with_name(f"tmp.{path.name}")
        kaldiio.save_mat(str(temporary), self.matrix)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path, num_static: int) -> Projection:
        """Read what `save` wrote; InputError where it is missing, damaged or not for `num_static` features."""
        try:
            matrix = read_entry(f"{path}:0")
        except DAMAGE as error:
            raise InputError(f"{path}: not readable ({reason(error)}); {REMEDY_ALIGN}") from error
        if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not np.isfinite(matrix).all():
            raise InputError(f"{path}: holds no finite matrix; {REMEDY_ALIGN}")
        frames, rest = divmod(matrix.shape[1], num_static)
        if rest or frames % 2 == 0:
            raise InputError(f"{path}: is for {matrix.shape[1]} values, not frames of {num_static}; {REMEDY_ALIGN}")
        return cls(matrix.astype(np.float32), num_static)
