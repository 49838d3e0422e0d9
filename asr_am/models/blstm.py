"""The acoustic model of Zhang et al. (ICASSP 2019, section 4.2): bidirectional LSTMs, a projection, a softmax.

Shapes: B chunks or utterances, T frames, K outputs, F features, P pdfs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.models.acoustic import AcousticModel, ModelOptions, check_dropout, check_subsampling, stack_frames
from asr_am.models.dropout import Dropout
from asr_am.models.lstm_layers import BiLSTM


@dataclass(frozen=True)
class BlstmOptions(ModelOptions):
    """Sizes of a `Blstm`.

    Attributes:
        layers: Number of LSTM layers.
        cells: Cells of one direction.
        projection: Outputs of the linear layer before the last.
        dropout: Dropout after every LSTM layer.
        subsampling: Frames per output. As many frames side by side are the input of the first layer.
    """

    layers: int = 2
    cells: int = 128
    projection: int = 256
    dropout: float = 0.0
    subsampling: int = 1

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        self.check_least(layers=1, cells=1, projection=1)
        check_dropout(self.dropout)
        check_subsampling(self.subsampling)

    def make(self, inputs: int, outputs: int) -> Blstm:
        return Blstm(self, inputs, outputs)

    def activations(self) -> int:
        return round(16 * self.layers * self.cells / self.subsampling)


class Blstm(AcousticModel):
    """Stack of layers x (BiLSTM, dropout), a linear projection and a linear output."""

    cuda_graph = True

    def __init__(self, options: BlstmOptions, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.options, self.subsampling = options, options.subsampling
        widths = [options.subsampling * inputs] + [2 * options.cells] * (options.layers - 1)
        self.layers = nn.ModuleList(BiLSTM(width, options.cells) for width in widths)
        self.dropout = Dropout(options.dropout)
        self.projection = nn.Linear(2 * options.cells, options.projection)
        self.output = nn.Linear(options.projection, outputs)
        for linear in (self.projection, self.output):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def hidden(self, x_BTF: Tensor, lengths_B: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        x_BKF, lengths_B = stack_frames(self.normalise(x_BTF), lengths_B, self.subsampling)
        h_KBF = x_BKF.transpose(0, 1)
        for layer in self.layers:
            h_KBF = self.dropout(layer(h_KBF, lengths_B, dtype))
        W, b = self.projection.weight.to(dtype), self.projection.bias.to(dtype)
        return functional.linear(h_KBF, W, b).transpose(0, 1)
