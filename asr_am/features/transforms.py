"""Affine transforms of features, one for each speaker (fMLLR), as Kaldi archives: <set>_trans.ark and .scp.

Shapes: D features, E = D + 1. A transform is [A b], float32 [D, E]: y = A x + b.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from asr_am.errors import InputError
from asr_am.features.archive import load_matrix, read_scp, write_archive

REMEDY = "run stage 4 (speaker) again"


def write_transforms(folder: Path, subset: str, transforms: Mapping[str, np.ndarray], *, final: Path) -> None:
    """Write the transforms of the speakers of a set into `folder`, which will be called `final`."""
    write_archive(folder, f"{subset}_trans", {s: t.astype(np.float32) for s, t in transforms.items()}, final=final)


def read_transforms(folder: Path, subset: str, dim: int | None = None) -> dict[str, np.ndarray]:
    """[D, E] by speaker; InputError where a file is missing or damaged, or a transform not of `dim` features."""
    found = {}
    for speaker, place in read_scp(folder / f"{subset}_trans.scp", REMEDY).items():
        transform_DE = load_matrix(place, REMEDY)
        rows, columns = transform_DE.shape
        if columns != rows + 1 or rows != (dim or rows) or not np.isfinite(transform_DE).all():
            raise InputError(f"{place}: speaker {speaker} has no transform of {dim or rows} features; {REMEDY}")
        found[speaker] = transform_DE
    return found


def mean_transform(transforms: Mapping[str, np.ndarray]) -> np.ndarray:
    """[D, E], that of the average speaker."""
    return np.mean([np.asarray(t, dtype=np.float64) for t in transforms.values()], axis=0)


def apply(transform_DE: np.ndarray, x_TD: np.ndarray) -> np.ndarray:
    """float32 [T, D]: A x + b of every frame."""
    return x_TD @ transform_DE[:, :-1].T + transform_DE[:, -1]
