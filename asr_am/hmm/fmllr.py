"""fMLLR: an affine transform of one speaker's features that maximises their likelihood (Gales 1998, section 2.2).

The objective, the log-likelihood of the transformed frames up to a constant, is

    Q(W) = count log |det A| + sum_d (w_d k_d' - w_d G_d w_d' / 2),  W = [A b] with rows w_d,

with k_d = sum_n linear_nd x_n and G_d = sum_n precision_nd x_n x_n'. Given the other rows, the best row has a closed
form. Sweeps over the rows climb to a local maximum. All speakers are updated at once.

Shapes: S speakers, N frames, D feature dimension, E = D + 1 (a frame followed by a 1), F = E (E + 1) / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from asr_am.features.ivector.statistics import unpack
from asr_am.hmm.expectations import add_weighted_outer, packed_size

RIDGE = 1e-9  # share of the mean diagonal added to each G_d, which a constant feature would leave singular
MIN_GAIN = 1e-5  # sweeps end when one improves no log-likelihood per frame by more


@dataclass(frozen=True)
class FmllrStats:
    """Sufficient statistics of S speakers, float64.

    Attributes:
        count_S: frames.
        linear_SDE: the k_d.
        quadratic_SDF: the G_d, as packed upper triangles.
    """

    count_S: Tensor
    linear_SDE: Tensor
    quadratic_SDF: Tensor

    @classmethod
    def zeros(cls, speakers: int, dim: int, device: torch.device) -> FmllrStats:
        """Returns empty statistics."""
        shapes = (speakers,), (speakers, dim, dim + 1), (speakers, dim, packed_size(dim + 1))
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def of(self, speakers: Tensor) -> FmllrStats:
        """Returns the statistics of some speakers, by index."""
        return FmllrStats(self.count_S[speakers], self.linear_SDE[speakers], self.quadratic_SDF[speakers])

    def add(self, speaker: int, frames: float, x_ND: Tensor, precision_ND: Tensor, linear_ND: Tensor) -> None:
        """Accumulates frames of one speaker.

        Args:
            frames: number of frames, posteriors summed.
            x_ND: frames without any transform.
            precision_ND: their expected precisions, from `Expectation`.
            linear_ND: their precision-weighted means, from `Expectation`.
        """
        x_NE = pad(x_ND, (0, 1), value=1.0)
        self.count_S[speaker] += frames
        self.linear_SDE[speaker] += linear_ND.T @ x_NE
        add_weighted_outer(self.quadratic_SDF[speaker], precision_ND, x_NE)


def objective(stats: FmllrStats, transform_SDE: Tensor) -> Tensor:
    """Returns Q(W) per frame, [S]."""
    return _objective(stats, unpack(stats.quadratic_SDF, transform_SDE.shape[2]), transform_SDE)


def _objective(stats: FmllrStats, quadratic_SDEE: Tensor, transform_SDE: Tensor) -> Tensor:
    squares_S = ((quadratic_SDEE @ transform_SDE[..., None])[..., 0] * transform_SDE).sum(dim=(1, 2))
    log_det_S = torch.linalg.slogdet(transform_SDE[:, :, :-1]).logabsdet
    total_S = stats.count_S * log_det_S + (transform_SDE * stats.linear_SDE).sum(dim=(1, 2)) - squares_S / 2
    return total_S / stats.count_S


def identity(stats: FmllrStats) -> Tensor:
    """Returns identity transforms, [S, D, E]."""
    speakers, dim, _ = stats.linear_SDE.shape
    return torch.eye(dim, dim + 1, dtype=torch.float64, device=stats.count_S.device).repeat(speakers, 1, 1)


def estimate_offsets(stats: FmllrStats, start_SDE: Tensor) -> Tensor:
    """Returns the best transforms [S, D, E] that keep the matrices A of `start_SDE`, in closed form."""
    last_SDE = unpack(stats.quadratic_SDF, stats.linear_SDE.shape[2])[:, :, -1]
    pull_SD = stats.linear_SDE[:, :, -1] - (last_SDE * start_SDE)[:, :, :-1].sum(dim=2)
    return torch.cat([start_SDE[:, :, :-1], (pull_SD / last_SDE[:, :, -1])[:, :, None]], dim=2)


def estimate(stats: FmllrStats, sweeps: int, start_SDE: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Estimates full transforms.

    Args:
        sweeps: maximum number of sweeps over the rows.

    Returns:
        Transforms [S, D, E], and Q per frame [S] before the first and after each sweep.
    """
    transform_SDE = start_SDE.clone()
    width = transform_SDE.shape[2]
    quadratic_SDEE = unpack(stats.quadratic_SDF, width)
    ridge_SD = RIDGE * torch.diagonal(quadratic_SDEE, dim1=2, dim2=3).mean(dim=2)
    quadratic_SDEE += ridge_SD[:, :, None, None] * torch.eye(width, dtype=torch.float64, device=ridge_SD.device)
    inverse_SDEE = torch.linalg.inv(quadratic_SDEE)
    free_SDE = (inverse_SDEE @ stats.linear_SDE[..., None])[..., 0]  # the best rows if there were no determinant
    history = [_objective(stats, quadratic_SDEE, transform_SDE)]
    for _ in range(sweeps):
        _sweep(transform_SDE, inverse_SDEE, free_SDE, stats)
        history.append(_objective(stats, quadratic_SDEE, transform_SDE))
        if (history[-1] - history[-2]).max() < MIN_GAIN:
            break
    return transform_SDE, history


def _sweep(transform_SDE: Tensor, inverse_SDEE: Tensor, free_SDE: Tensor, stats: FmllrStats) -> None:
    """Replaces each row in turn by w = alpha p G^-1 + k G^-1, with p its cofactors up to their scale.

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
    """Returns the root alpha with the larger count log |alpha e1 + e2| - alpha^2 e1 / 2."""
    root_S = torch.sqrt(e2_S**2 + 4 * e1_S * count_S)
    alpha_2S = torch.stack([-e2_S + root_S, -e2_S - root_S]) / (2 * e1_S)
    value_2S = count_S * torch.log((alpha_2S * e1_S + e2_S).abs()) - alpha_2S**2 * e1_S / 2
    return torch.where(value_2S[0] >= value_2S[1], alpha_2S[0], alpha_2S[1])
