"""i-vector models and statistics as .npz files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from asr_am.data.npz import read_npz, write_npz
from asr_am.errors import InputError
from asr_am.features.ivector.extractor import Extractor
from asr_am.features.ivector.ivector_archive import REMEDY
from asr_am.features.ivector.statistics import Statistics, StatisticsTotals
from asr_am.features.ivector.ubm import DiagUbm


def save_ubm(path: Path, ubm: DiagUbm) -> None:
    """Writes weights [G], means and vars [G, D]."""
    write_arrays(path, {"weights": ubm.weights_G, "means": ubm.means_GD, "vars": ubm.vars_GD})


def load_ubm(path: Path) -> DiagUbm:
    """Reads a UBM. Raises InputError if the file is missing, damaged, or not a mixture."""
    weights_G, means_GD, vars_GD = read_arrays(path, "weights", "means", "vars")
    fits = means_GD.ndim == 2 and means_GD.shape == vars_GD.shape and weights_G.shape == means_GD.shape[:1]
    if not fits or not (weights_G > 0).all() or not (vars_GD > 0).all():
        raise InputError(f"{path}: holds no mixture of Gaussians; {REMEDY}")
    return DiagUbm(weights_G, means_GD, vars_GD)


def save_extractor(path: Path, extractor: Extractor) -> None:
    """Writes loadings [G, D, S], covariances [G, D, D] and offset [1]."""
    offset = torch.tensor([extractor.offset], dtype=torch.float64)
    write_arrays(path, {"loadings": extractor.loadings_GDS, "covariances": extractor.covariances_GDD, "offset": offset})


def load_extractor(path: Path) -> Extractor:
    """Reads an extractor. Raises InputError if the file is missing, damaged, or not an extractor."""
    loadings_GDS, covariances_GDD, offset = read_arrays(path, "loadings", "covariances", "offset")
    fits = loadings_GDS.ndim == 3 and covariances_GDD.shape == (*loadings_GDS.shape[:2], loadings_GDS.shape[1])
    if not fits or offset.shape != (1,) or torch.linalg.cholesky_ex(covariances_GDD).info.any():
        raise InputError(f"{path}: holds no i-vector extractor; {REMEDY}")
    return Extractor(loadings_GDS, covariances_GDD, float(offset))


def save_statistics(path: Path, statistics: Statistics, second_GDD: Tensor) -> None:
    """Writes counts [K, G] and first [K, G, D] of each utterance, and the totals count, first_sum and second."""
    totals = {"count": statistics.counts_KG.double().sum(dim=0), "first_sum": statistics.first_KGD.double().sum(dim=0)}
    arrays = {"counts": statistics.counts_KG, "first": statistics.first_KGD, **totals, "second": second_GDD}
    write_arrays(path, arrays)


def load_statistics(path: Path) -> Statistics:
    """Reads the statistics of each utterance in the file."""
    return Statistics(*read_arrays(path, "counts", "first"))


def load_totals(path: Path) -> StatisticsTotals:
    """Reads the statistics summed over all utterances in the file."""
    return StatisticsTotals(*read_arrays(path, "count", "first_sum", "second"))


def write_arrays(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Writes tensors as .npz, atomically."""
    write_npz(path, {name: array.cpu().numpy() for name, array in arrays.items()})


def read_arrays(path: Path, *names: str) -> list[Tensor]:
    """Reads the arrays `names`. Raises InputError if the file is missing or damaged, or if a value is not finite."""
    tensors = [torch.from_numpy(array) for array in read_npz(path, *names, remedy=REMEDY)]
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise InputError(f"{path}: holds values that are not finite; {REMEDY}")
    return tensors
