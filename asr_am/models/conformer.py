"""Conformer encoder (Gulati et al., Interspeech 2020), without positions beside those that its convolutions see.

The layers are those of torchaudio.models.Conformer, which differ here in what padding and several learners need: the
convolution does not read past the end of a sequence, and layer normalisation takes the place of batch normalisation
(`tdnnf` says why).

Shapes: B chunks, T frames, F features, D width, H heads, K values of a head, P pdfs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.errors import InputError
from asr_am.models.acoustic import (
    AcousticModel,
    ModelOptions,
    autocast,
    check_dropout,
    check_subsampling,
    padding_mask,
    stack_frames,
)  # fmt: skip
from asr_am.models.dropout import Dropout, dropout


@dataclass(frozen=True)
class ConformerOptions(ModelOptions):
    """Sizes of a `Conformer`.

    Attributes:
        layers: Number of layers.
        width: Outputs of a layer, D.
        heads: Heads of the attention.
        feed_forward: Hidden values of a feed-forward part.
        kernel: Frames that the convolution sees, odd.
        dropout: Dropout in every part of a layer.
        subsampling: Frames per output. As many frames side by side are the input of the first layer.
    """

    layers: int = 4
    width: int = 144
    heads: int = 4
    feed_forward: int = 384
    kernel: int = 15
    dropout: float = 0.0
    subsampling: int = 1

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        self.check_least(layers=1, width=1, heads=1, feed_forward=1, kernel=1)
        check_dropout(self.dropout)
        check_subsampling(self.subsampling)
        if self.width % self.heads:
            raise InputError(f"model.width={self.width}: must be a multiple of model.heads={self.heads}")
        if self.kernel % 2 == 0:
            raise InputError(f"model.kernel={self.kernel}: must be odd, as many frames before as after")

    def make(self, inputs: int, outputs: int) -> Conformer:
        return Conformer(self, inputs, outputs)

    def activations(self) -> int:
        return round(self.layers * (18 * self.width + 6 * self.feed_forward) / self.subsampling)


class Conformer(AcousticModel):
    """A linear layer to the width, layers x `ConformerLayer` and a linear output."""

    cuda_graph = True

    options: ConformerOptions

    def __init__(self, options: ConformerOptions, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.options, self.subsampling = options, options.subsampling
        self.input = nn.Linear(options.subsampling * inputs, options.width)
        self.layers = nn.ModuleList(ConformerLayer(options) for _ in range(options.layers))
        self.output = nn.Linear(options.width, outputs)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def hidden(self, x_BTF: Tensor, lengths_B: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        with autocast(x_BTF.device, dtype):
            x_BTF, lengths_B = stack_frames(self.normalise(x_BTF), lengths_B, self.subsampling)
            mask_BT1 = padding_mask(x_BTF, lengths_B)
            h_BTD = dropout(self.input(x_BTF), self.options.dropout, self.training)
            for layer in self.layers:
                h_BTD = layer(h_BTD, mask_BT1)
            return h_BTD.to(dtype)


class ConformerLayer(nn.Module):
    """Half a feed-forward part, self-attention, convolution, half a feed-forward part. Each is added to its input."""

    def __init__(self, options: ConformerOptions) -> None:
        super().__init__()
        self.feed_forward = FeedForward(options)
        self.attention = Attention(options)
        self.convolution = Convolution(options)
        self.feed_forward2 = FeedForward(options)
        self.norm = nn.LayerNorm(options.width)

    def forward(self, x_BTD: Tensor, mask_BT1: Tensor | None) -> Tensor:
        x_BTD = x_BTD + 0.5 * self.feed_forward(x_BTD)
        x_BTD = x_BTD + self.attention(x_BTD, mask_BT1)
        x_BTD = x_BTD + self.convolution(x_BTD, mask_BT1)
        return self.norm(x_BTD + 0.5 * self.feed_forward2(x_BTD))


class FeedForward(nn.Sequential):
    """Two linear layers with a SiLU between them."""

    def __init__(self, options: ConformerOptions) -> None:
        super().__init__(
            nn.LayerNorm(options.width),
            nn.Linear(options.width, options.feed_forward),
            nn.SiLU(),
            Dropout(options.dropout),
            nn.Linear(options.feed_forward, options.width),
            Dropout(options.dropout),
        )


class Attention(nn.Module):
    """Self-attention over all frames of a sequence."""

    def __init__(self, options: ConformerOptions) -> None:
        super().__init__()
        self.heads, self.dropout = options.heads, options.dropout
        self.norm = nn.LayerNorm(options.width)
        self.queries_keys_values = nn.Linear(options.width, 3 * options.width)
        self.output = nn.Linear(options.width, options.width)

    def forward(self, x_BTD: Tensor, mask_BT1: Tensor | None) -> Tensor:
        q, k, v = self.queries_keys_values(self.norm(x_BTD)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        keys_B11T = None if mask_BT1 is None else mask_BT1.mT[:, None]
        share = self.dropout if self.training else 0.0
        y_BHTK = functional.scaled_dot_product_attention(q, k, v, keys_B11T, share)
        return dropout(self.output(y_BHTK.transpose(1, 2).flatten(2)), self.dropout, self.training)


class Convolution(nn.Module):
    """Gated linear units, a convolution of each value over time, normalisation, a SiLU and a linear layer."""

    def __init__(self, options: ConformerOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width)
        self.gates = nn.Linear(options.width, 2 * options.width)
        self.depthwise = nn.Conv1d(
            options.width, options.width, options.kernel, padding="same", groups=options.width
        )  # fmt: skip
        self.inner_norm = nn.LayerNorm(options.width)
        self.output = nn.Linear(options.width, options.width)
        self.dropout = Dropout(options.dropout)

    def forward(self, x_BTD: Tensor, mask_BT1: Tensor | None) -> Tensor:
        x_BTD = functional.glu(self.gates(self.norm(x_BTD)), dim=2)
        if mask_BT1 is not None:
            x_BTD = x_BTD * mask_BT1
        x_BTD = self.over_time(x_BTD)
        return self.dropout(self.output(functional.silu(self.inner_norm(x_BTD))))

    def over_time(self, x_BTD: Tensor) -> Tensor:
        """Returns the convolution of each value with its own weights [B, T, D]."""
        if x_BTD.is_cuda:
            return self.depthwise(x_BTD.mT).mT
        # autocast to bfloat16 is over in a backward pass, and torch's own gradient follows it
        if self.training and x_BTD.dtype == self.depthwise.weight.dtype:
            return _DepthwiseConvolution.apply(x_BTD, self.depthwise.weight, self.depthwise.bias)
        return _depthwise(x_BTD, self.depthwise.weight, self.depthwise.bias)


def _depthwise(x_BTD: Tensor, weight_D1K: Tensor, bias_D: Tensor | None) -> Tensor:
    """Returns the convolution over time, [B, T, D], of an image of one row: on a CPU in a tenth of `conv1d`'s time."""
    image_BD1T, weight_D11K, padding = x_BTD.mT.unsqueeze(2), weight_D1K.unsqueeze(2), (0, weight_D1K.shape[2] // 2)
    return functional.conv2d(image_BD1T, weight_D11K, bias_D, padding=padding, groups=len(weight_D1K)).squeeze(2).mT


class _DepthwiseConvolution(torch.autograd.Function):
    """`_depthwise` with a product and a sum per tap as gradient of the weights, which takes less time than torch's."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_D1K: Tensor, bias_D: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, weight_D1K)
        return _depthwise(x_BTD, weight_D1K, bias_D)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x_BTD, weight_D1K = ctx.saved_tensors
        frames, taps = x_BTD.shape[1], weight_D1K.shape[2]
        padded_BSD = functional.pad(x_BTD, (0, 0, taps // 2, taps // 2))
        products = ((dy_BTD * padded_BSD[:, tap : tap + frames]).sum((0, 1)) for tap in range(taps))
        return _depthwise(dy_BTD, weight_D1K.flip(2), None), torch.stack([*products], 1)[:, None], dy_BTD.sum((0, 1))
