"""TDNN-F: a time-delay network of factorised layers (Povey et al., Interspeech 2018), in the form of Kaldi's recipes.

A layer is two matrices with a bottleneck between them, each over two frames, and ReLU, normalisation, dropout and .66
of its input. The first matrix M is semi-orthogonal up to a scale that floats: M M^T = a^2 I (section 3.2).

The paper updates M every few steps, M <- M - (P - a^2 I) M / (2 a^2) with P = M M^T and a^2 = tr(P P) / tr(P). Here the
same update, repeated, is a part of the network (`semi_orthogonal`): it maps the trained weights to the matrix that is
used. So the constraint holds where a step of the optimizer is not the learner's (parameter servers), where weights are
means of several learners', and with messages that are compressed. After it, M M^T differs from a^2 I by rounding.

Kaldi normalises by statistics of the batch. Layer normalisation in its place needs no running statistics, which no
strategy would send, does not count padding, and makes N learners equal to one with their total batch.

Shapes: B chunks, T frames, F features, H width, N bottleneck, P pdfs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.models.acoustic import (
    AcousticModel,
    ModelOptions,
    autocast,
    check_dropout,
    check_subsampling,
    padding_mask,
    subsample,
)  # fmt: skip

BYPASS = 0.66
STRIDE = 3  # input frames between the two frames of a later layer
UPDATES = 5  # of the paper's equation: take a singular value of .3 a to .99 a


@dataclass(frozen=True)
class TdnnfOptions(ModelOptions):
    """Sizes of a `Tdnnf`.

    Attributes:
        near_layers: Factorised layers over neighbouring frames.
        far_layers: Factorised layers after them, over frames that are `STRIDE` apart.
        width: Outputs of a layer, H.
        bottleneck: Values between its two matrices, N.
        projection: Inputs of the output layer.
        dropout: Spread of the dropout.
        subsampling: Frames per output.
    """

    near_layers: int = 3
    far_layers: int = 6
    width: int = 384
    bottleneck: int = 64
    projection: int = 128
    dropout: float = 0.0
    subsampling: int = 1

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        self.check_least(near_layers=0, far_layers=0, width=1, bottleneck=1, projection=1)
        check_dropout(self.dropout)
        check_subsampling(self.subsampling, (1, STRIDE))

    def make(self, inputs: int, outputs: int) -> Tdnnf:
        return Tdnnf(self, inputs, outputs)

    def activations(self) -> int:
        layers = self.near_layers + 2 + self.far_layers / self.subsampling
        return round(layers * (4 * self.width + 4 * self.bottleneck))


class Tdnnf(AcousticModel):
    """A layer over three frames, near layers, a layer over one, far layers, and Kaldi's prefinal layer.

    With subsampling, every third frame goes on from the layer over one, and the far layers take neighbours of these.
    """

    cuda_graph = True

    options: TdnnfOptions

    def __init__(self, options: TdnnfOptions, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.options, self.subsampling = options, options.subsampling
        sizes = (options.width, options.bottleneck, options.dropout)
        self.first = nn.Linear(3 * inputs, options.width)
        self.norm = nn.LayerNorm(options.width)
        self.near = nn.ModuleList(Factorised(*sizes, stride=1) for _ in range(options.near_layers))
        self.middle = Factorised(*sizes, stride=0)
        far_stride = STRIDE // options.subsampling
        self.far = nn.ModuleList(Factorised(*sizes, stride=far_stride) for _ in range(options.far_layers))
        self.prefinal = Prefinal(options.width, options.projection)
        self.output = nn.Linear(options.projection, outputs)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def hidden(self, x_BTF: Tensor, lengths_B: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        mask_BT1 = padding_mask(x_BTF, lengths_B)
        with autocast(x_BTF.device, dtype):
            x_BTF = mask(self.normalise(x_BTF), mask_BT1)
            h_BTH = self.first(torch.cat([shift(x_BTF, -1), x_BTF, shift(x_BTF, 1)], dim=2))
            h_BTH = constant_dropout(self.norm(h_BTH.relu()), self.options.dropout, self.training)
            for layer in self.near:
                h_BTH = layer(h_BTH, mask_BT1)
            if self.subsampling > 1:
                h_BTH, lengths_B = subsample(h_BTH, lengths_B, self.subsampling)
                mask_BT1 = padding_mask(h_BTH, lengths_B)
            for layer in (self.middle, *self.far):
                h_BTH = layer(h_BTH, mask_BT1)
            return self.prefinal(h_BTH).to(dtype)


class Factorised(nn.Module):
    """Linear layer [h(t - stride), h(t)] -> N, affine layer [z(t), z(t + stride)] -> H, and what follows them.

    With stride 0, both are over one frame.
    """

    def __init__(self, width: int, bottleneck: int, dropout: float, stride: int) -> None:
        super().__init__()
        self.stride, self.share = stride, dropout
        frames = 2 if stride else 1
        self.linear = nn.Linear(frames * width, bottleneck, bias=False)
        self.affine = nn.Linear(frames * bottleneck, width)
        self.norm = nn.LayerNorm(width)
        nn.init.orthogonal_(self.linear.weight)

    def forward(self, h_BTH: Tensor, mask_BT1: Tensor | None) -> Tensor:
        W = semi_orthogonal(self.linear.weight)
        if self.stride:  # products before the shift, as fewer values are shifted
            past, present = (functional.linear(h_BTH, part) for part in W.chunk(2, dim=1))
            z_BTN = mask(shift(past, -self.stride) + present, mask_BT1)
            z_BTN = torch.cat([z_BTN, shift(z_BTN, self.stride)], dim=2)
        else:
            z_BTN = functional.linear(h_BTH, W)
        y_BTH = self.norm(self.affine(z_BTN).relu())
        return BYPASS * h_BTH + constant_dropout(y_BTH, self.share, self.training)


class Prefinal(nn.Module):
    """Semi-orthogonal layer to `projection`, affine layer back with a ReLU, another semi-orthogonal one."""

    def __init__(self, width: int, projection: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(width, projection, bias=False)
        self.expand = nn.Linear(projection, width)
        self.wide_norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, projection, bias=False)
        self.norm = nn.LayerNorm(projection)
        for layer in (self.reduce, self.linear):
            nn.init.orthogonal_(layer.weight)

    def forward(self, h_BTH: Tensor) -> Tensor:
        h_BTH = self.expand(functional.linear(h_BTH, semi_orthogonal(self.reduce.weight)))
        return self.norm(functional.linear(self.wide_norm(h_BTH.relu()), semi_orthogonal(self.linear.weight)))


def semi_orthogonal(M: Tensor) -> Tensor:
    """Returns a times the semi-orthogonal matrix nearest to M, with the paper's floating scale a.

    Repeats the paper's update. Each one multiplies M by C = 3/2 I - P / (2 a^2) from the left, so that all but the
    last product is of matrices with the smaller of both sizes.

    Args:
        M: weights [n, m] of rank min(n, m).
    """
    if M.shape[0] > M.shape[1]:
        return semi_orthogonal(M.mT).mT
    with autocast(M.device, M.dtype):
        P = M @ M.mT
        eye = torch.eye(len(P), dtype=M.dtype, device=M.device)
        factor = eye
        for _ in range(UPDATES):
            squared_scale = P.square().sum() / P.diagonal().sum()  # P is symmetric
            C = 1.5 * eye - P / (2 * squared_scale)
            factor, P = C @ factor, C @ P @ C
        return factor @ M


def shift(x_BTH: Tensor, frames: int) -> Tensor:
    """Returns x(t + frames) for each t, 0 outside the sequence."""
    size = x_BTH.shape[1]
    if frames < 0:
        return functional.pad(x_BTH, (0, 0, -frames, 0))[:, :size]
    return functional.pad(x_BTH, (0, 0, 0, frames))[:, frames:]


def mask(x_BTH: Tensor, mask_BT1: Tensor | None) -> Tensor:
    """Sets frames outside the mask to 0."""
    return x_BTH if mask_BT1 is None else x_BTH * mask_BT1


def constant_dropout(x_BTH: Tensor, spread: float, training: bool) -> Tensor:
    """Kaldi's dropout: factors uniform between 1 - 2 spread and 1 + 2 spread, one per value for all frames."""
    if not (training and spread):
        return x_BTH
    factor_B1H = 1 + 2 * spread * (2 * torch.rand_like(x_BTH[:, :1]) - 1)
    return x_BTH * factor_B1H
