"""fMLLR: an affine transform of the features of one speaker that makes them likeliest (Gales 1998, section 2.2).

Shapes: S speakers, N frames, D feature dimension, E = D + 1 (a frame with a 1 after it), F = E (E + 1) / 2.

The objective, the log-likelihood of the transformed frames up to a constant, is

    Q(W) = count log |det A| + sum_d (w_d k_d' - w_d G_d w_d' / 2),  W = [A b] with rows w_d,

with k_d = sum_n linear_nd x_n and G_d = sum_n precision_nd x_n x_n'. Given the other rows, the best row is found in
closed form; sweeps over the rows climb to a local maximum. All speakers are updated at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from asr_am.hmm.expectations import add_weighted_outer, packed_size, unpack

RIDGE = 1e-9  # of the mean diagonal, added to each G_d: a feature that never moves leaves it singular
MIN_GAIN = 1e-5  # gain in log-likelihood per frame of one sweep, below which the next would not pay


@dataclass(frozen=True)
class FmllrStats:
    """count_S: frames; linear_SDE: the k_d; quadratic_SDF: the G_d, packed upper triangles. float64."""

    count_S: Tensor
    linear_SDE: Tensor
    quadratic_SDF: Tensor

    @classmethod
    def zeros(cls, speakers: int, dim: int, device: torch.device) -> FmllrStats:
        """No frames yet."""
        shapes = (speakers,), (speakers, dim, dim + 1), (speakers, dim, packed_size(dim + 1))
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def of(self, speakers: Tensor) -> FmllrStats:
        """Those of some speakers, by index."""
        return FmllrStats(self.count_S[speakers], self.linear_SDE[speakers], self.quadratic_SDF[speakers])

    def add(self, speaker: int, frames: float, x_ND: Tensor, precision_ND: Tensor, linear_ND: Tensor) -> None:
        """Frames of one speaker, as they are before any transform, with what `Expectation` makes of them."""
        x_NE = pad(x_ND, (0, 1), value=1.0)
        self.count_S[speaker] += frames
        self.linear_SDE[speaker] += linear_ND.T @ x_NE
        add_weighted_outer(self.quadratic_SDF[speaker], precision_ND, x_NE)


def objective(stats: FmllrStats, transform_SDE: Tensor) -> Tensor:
    """Q(W) per frame, [S]."""
    return _objective(stats, unpack(stats.quadratic_SDF, transform_SDE.shape[2]), transform_SDE)


def _objective(stats: FmllrStats, quadratic_SDEE: Tensor, transform_SDE: Tensor) -> Tensor:
    squares_S = ((quadratic_SDEE @ transform_SDE[..., None])[..., 0] * transform_SDE).sum(dim=(1, 2))
    log_det_S = torch.linalg.slogdet(transform_SDE[:, :, :-1]).logabsdet
    total_S = stats.count_S * log_det_S + (transform_SDE * stats.linear_SDE).sum(dim=(1, 2)) - squares_S / 2
    return total_S / stats.count_S


def identity(stats: FmllrStats) -> Tensor:
    """The transforms [S, D, E] that change nothing."""
    speakers, dim, _ = stats.linear_SDE.shape
    return torch.eye(dim, dim + 1, dtype=torch.float64, device=stats.count_S.device).repeat(speakers, 1, 1)


def estimate_offsets(stats: FmllrStats, start_SDE: Tensor) -> Tensor:
    """The best transforms [S, D, E] with the matrices A of `start_SDE`. In closed form."""
    last_SDE = unpack(stats.quadratic_SDF, stats.linear_SDE.shape[2])[:, :, -1]
    pull_SD = stats.linear_SDE[:, :, -1] - (last_SDE * start_SDE)[:, :, :-1].sum(dim=2)
    return torch.cat([start_SDE[:, :, :-1], (pull_SD / last_SDE[:, :, -1])[:, :, None]], dim=2)


def estimate(stats: FmllrStats, sweeps: int, start_SDE: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Full transforms [S, D, E] after at most `sweeps` over the rows, and Q per frame [S] before and after each."""
    transform_SDE = start_SDE.clone()
    width = transform_SDE.shape[2]
    quadratic_SDEE = unpack(stats.quadratic_SDF, width)
    ridge_SD = RIDGE * torch.diagonal(quadratic_SDEE, dim1=2, dim2=3).mean(dim=2)
    quadratic_SDEE += ridge_SD[:, :, None, None] * torch.eye(width, dtype=torch.float64, device=ridge_SD.device)
    inverse_SDEE = torch.linalg.inv(quadratic_SDEE)
    free_SDE = (inverse_SDEE @ stats.linear_SDE[..., None])[..., 0]  # the best rows without the determinant
    history = [_objective(stats, quadratic_SDEE, transform_SDE)]
    for _ in range(sweeps):
        _sweep(transform_SDE, inverse_SDEE, free_SDE, stats)
        history.append(_objective(stats, quadratic_SDEE, transform_SDE))
        if (history[-1] - history[-2]).max() < MIN_GAIN:
            break
    return transform_SDE, history


def _sweep(transform_SDE: Tensor, inverse_SDEE: Tensor, free_SDE: Tensor, stats: FmllrStats) -> None:
    """Replace each row in turn by w = alpha p G^-1 + k G^-1, with p its cofactors up to their scale.

    alpha is the root of alpha^2 p G^-1 p' + alpha p G^-1 k' - count = 0 with the larger Q. The inverse of A, whose
    columns are the cofactors, follows each row by a rank-one update.
    """
    inverse_SDD = torch.linalg.inv(transform_SDE[:, :, :-1])
    for d in range(transform_SDE.shape[1]):
        cofactor_SD = inverse_SDD[:, :, d]
        towards_SE = (inverse_SDEE[:, d, :, :-1] @ cofactor_SD[..., None])[..., 0]
        e1_S = (towards_SE[:, :-1] * cofactor_SD).sum(dim=1)
        e2_S = (free_SDE[:, d, :-1] * cofactor_SD).sum(dim=1)
        alpha_S = _better_root(e1_S, e2_S, stats.count_S)
        row_SE = alpha_S[:, None] * towards_SE + free_SDE[:, d]
        change_SD = ((row_SE - transform_SDE[:, d])[:, None, :-1] @ inverse_SDD)[:, 0]
        inverse_SDD = inverse_SDD - cofactor_SD[:, :, None] * (change_SD / (1 + change_SD[:, d, None]))[:, None]
        transform_SDE[:, d] = row_SE


def _better_root(e1_S: Tensor, e2_S: Tensor, count_S: Tensor) -> Tensor:
    """Of the two alpha, the one with the larger count log |alpha e1 + e2| - alpha^2 e1 / 2."""
    root_S = torch.sqrt(e2_S**2 + 4 * e1_S * count_S)
    alpha_2S = torch.stack([-e2_S + root_S, -e2_S - root_S]) / (2 * e1_S)
    value_2S = count_S * torch.log((alpha_2S * e1_S + e2_S).abs()) - alpha_2S**2 * e1_S / 2
    return torch.where(value_2S[0] >= value_2S[1], alpha_2S[0], alpha_2S[1])
