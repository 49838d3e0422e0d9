"""The acoustic model of Zhang et al. (ICASSP 2019, section 4.2): bidirectional LSTMs, a projection, a softmax.

Shapes: B chunks or utterances, T frames, F features, P pdfs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asr_am.model.lstm import BiLSTM


@dataclass(frozen=True)
class BlstmOptions:
    """Sizes of the model. `cells` counts one direction. Dropout is applied after every LSTM layer."""

    layers: int = 2
    cells: int = 128
    projection: int = 256
    dropout: float = 0.0


class Blstm(nn.Module):
    """layers x (BiLSTM, dropout), a linear projection, a linear output; the softmax belongs to the loss.

    inputs: dimension of the features. outputs: number of pdfs. The buffers mean_F and scale_F normalise the features
    as they come in: (x - mean) * scale.
    """

    mean_F: Tensor
    scale_F: Tensor

    def __init__(self, options: BlstmOptions, inputs: int, outputs: int) -> None:
        super().__init__()
        self.options, self.inputs, self.outputs = options, inputs, outputs
        self.register_buffer("mean_F", torch.zeros(inputs))
        self.register_buffer("scale_F", torch.ones(inputs))
        widths = [inputs] + [2 * options.cells] * (options.layers - 1)
        self.layers = nn.ModuleList(BiLSTM(width, options.cells) for width in widths)
        self.dropout = nn.Dropout(options.dropout)
        self.projection = nn.Linear(2 * options.cells, options.projection)
        self.output = nn.Linear(options.projection, outputs)
        for linear in (self.projection, self.output):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def set_normalisation(self, mean_F: Tensor, deviation_F: Tensor) -> None:
        """Normalise features to zero mean and unit variance, given their moments."""
        self.mean_F.copy_(mean_F)
        self.scale_F.copy_(1.0 / deviation_F.clamp_min(1e-5))

    def forward(self, x_BTF: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Logits [B, T, P]. Frames at or past a sequence's length influence nothing; their own logits mean nothing."""
        h_TBF = ((x_BTF - self.mean_F) * self.scale_F).transpose(0, 1)
        for layer in self.layers:
            h_TBF = self.dropout(layer(h_TBF, lengths_B))
        return self.output(self.projection(h_TBF)).transpose(0, 1)
