"""Diagonal-covariance Gaussian mixtures of all pdfs, as flat arrays, and their log-likelihoods.

Gaussians are sorted by pdf: those of pdf p are rows offsets_P1[p] to offsets_P1[p + 1]. The log density of a Gaussian
is linear in (x, x*x), so all of them are one matrix product per utterance.

Shapes: T frames of one utterance, D feature dimension, G Gaussians of all pdfs, P pdfs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asr_am.data.npz import read_npz, write_npz
from asr_am.errors import InputError
from asr_am.hmm import REMEDY
from asr_am.hmm.frame_loops import LANES, Mixtures


@dataclass(frozen=True)
class DiagGmms:
    """The mixtures of all pdfs.

    Attributes:
        weights_G: float32, sum to one within a pdf.
        means_GD: float32.
        vars_GD: float32.
        offsets_P1: first Gaussian of each pdf, and G. int64.
        linear_G2D: coefficients of x and of x*x in the log density, float32.
        constant_G: log weight plus log normaliser, float32.
    """

    weights_G: np.ndarray
    means_GD: np.ndarray
    vars_GD: np.ndarray
    offsets_P1: np.ndarray
    linear_G2D: np.ndarray = field(init=False, repr=False, compare=False)
    constant_G: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        precisions = 1.0 / self.vars_GD.astype(np.float64)
        linear = np.concatenate([self.means_GD * precisions, -0.5 * precisions], axis=1)
        squares = (self.means_GD.astype(np.float64) ** 2 * precisions).sum(axis=1)
        normaliser = self.dim * math.log(2 * math.pi) + np.log(self.vars_GD.astype(np.float64)).sum(axis=1)
        constant = np.log(self.weights_G.astype(np.float64)) - 0.5 * (normaliser + squares)
        object.__setattr__(self, "linear_G2D", linear.astype(np.float32))
        object.__setattr__(self, "constant_G", constant.astype(np.float32))

    @property
    def dim(self) -> int:
        return self.means_GD.shape[1]

    @property
    def num_pdfs(self) -> int:
        return len(self.offsets_P1) - 1

    @property
    def num_gaussians(self) -> int:
        return len(self.weights_G)

    def packed(self) -> Mixtures:
        """Returns the mixtures as the compiled loops read them."""
        width = -(-2 * self.dim // LANES) * LANES
        linear_GW = np.zeros((self.num_gaussians, width), np.float32)
        linear_GW[:, : 2 * self.dim] = self.linear_G2D
        return Mixtures(linear_GW, self.constant_G, self.offsets_P1, int(np.diff(self.offsets_P1).max()))

    def log_likelihoods(self, x_TD: Tensor, pdfs: np.ndarray | None = None) -> Tensor:
        """Computes log p(x | pdf) of the frames of an utterance.

        The product uses torch, whose thread count can be limited after a fork. The rest uses numpy, whose exp is
        faster.

        Args:
            x_TD: frames, float32.
            pdfs: distinct pdf ids, one per column of the result. Default: all.

        Returns:
            float32 [T, P].
        """
        ids = np.arange(self.num_pdfs) if pdfs is None else np.asarray(pdfs)
        order, rows, widths = self._by_component(ids)
        linear, constant = torch.from_numpy(self.linear_G2D[rows]), torch.from_numpy(self.constant_G[rows])
        ll_GT = torch.addmm(constant[:, None], linear, torch.cat([x_TD, x_TD * x_TD], dim=1).T).numpy()
        ll_TP = np.empty((len(x_TD), len(ids)), dtype=np.float32)
        ll_TP[:, order] = _log_sum_exp(ll_GT, widths).T
        return torch.from_numpy(ll_TP)

    def _by_component(self, pdfs: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Arranges Gaussians by their index within a pdf: all first Gaussians, then all second ones, and so on.

        Returns:
            order: sorts `pdfs` by falling number of Gaussians.
            rows: the Gaussians in the new arrangement.
            widths: how many of the pdfs have a first, second, ... Gaussian.
        """
        sizes = np.diff(self.offsets_P1)[pdfs]
        order = np.argsort(-sizes, kind="stable")
        starts, sizes = self.offsets_P1[:-1][pdfs[order]], sizes[order]
        widths = np.searchsorted(-sizes, -np.arange(sizes[0]), side="left").tolist()
        rows = np.concatenate([starts[:width] + k for k, width in enumerate(widths)])
        return order, rows, widths

    def save(self, path: Path) -> None:
        """Writes .npz (plain arrays, no pickles), atomically."""
        arrays = {"weights": self.weights_G, "means": self.means_GD, "vars": self.vars_GD, "offsets": self.offsets_P1}
        write_npz(path, arrays)

    @classmethod
    def load(cls, path: Path) -> DiagGmms:
        """Reads what `save` wrote. Raises InputError if the file is missing, damaged or inconsistent."""
        arrays = read_npz(path, "weights", "means", "vars", "offsets", remedy=REMEDY)
        try:
            _validate(*arrays)
        except ValueError as error:
            raise InputError(f"{path}: holds {error}; {REMEDY}") from error
        return cls(*arrays)


def single_gaussians(mean_PD: np.ndarray, var_PD: np.ndarray) -> DiagGmms:
    """Returns mixtures of one Gaussian per pdf."""
    num_pdfs = len(mean_PD)
    return DiagGmms(
        np.ones(num_pdfs, dtype=np.float32), mean_PD.astype(np.float32), var_PD.astype(np.float32),
        np.arange(num_pdfs + 1, dtype=np.int64),
    )  # fmt: skip


def _log_sum_exp(ll_GT: np.ndarray, widths: list[int]) -> np.ndarray:
    """Returns the log-likelihood of each pdf, [P, T], from rows arranged by `_by_component`, which are overwritten."""
    edges = [0, *itertools.accumulate(widths)]
    parts = [ll_GT[begin:end] for begin, end in itertools.pairwise(edges)]
    highest = parts[0].copy()
    for part in parts[1:]:
        top = highest[: len(part)]
        np.maximum(top, part, out=top)
    for part in parts:
        part -= highest[: len(part)]
    np.exp(ll_GT, out=ll_GT)
    total = parts[0]
    for part in parts[1:]:
        total[: len(part)] += part
    return highest + np.log(total, out=total)


def _validate(weights_G: np.ndarray, means_GD: np.ndarray, vars_GD: np.ndarray, offsets_P1: np.ndarray) -> None:
    """Raises ValueError unless the arrays form valid mixtures."""
    for array in (weights_G, means_GD, vars_GD):
        if array.dtype != np.float32 or not np.isfinite(array).all():
            raise ValueError("parameters that are not finite float32 values")
    if means_GD.ndim != 2 or means_GD.shape != vars_GD.shape or weights_G.shape != means_GD.shape[:1]:
        raise ValueError("weights, means and variances of different shapes")
    if offsets_P1.ndim != 1 or offsets_P1.dtype.kind != "i" or len(offsets_P1) < 2:
        raise ValueError("no pdfs")
    if offsets_P1[0] != 0 or offsets_P1[-1] != len(weights_G) or (np.diff(offsets_P1) < 1).any():
        raise ValueError("pdfs without Gaussians")
    sums = np.add.reduceat(weights_G, offsets_P1[:-1])
    if not (weights_G > 0).all() or not (vars_GD > 0).all() or not np.allclose(sums, 1, atol=1e-3):
        raise ValueError("weights that do not sum to one, or variances that are not positive")
