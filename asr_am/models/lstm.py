"""The acoustic model of Ladkat et al. (Interspeech 2019, section 3.2): unidirectional LSTMs with a short look-ahead.

Shapes: B chunks or utterances, T frames, F features, P pdfs, A frames of look-ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asr_am.models.acoustic import AcousticModel, ModelOptions, check_dropout
from asr_am.models.dropout import Dropout
from asr_am.models.lstm_layers import cudnn_lstm, reset_lstm, run_lstm


@dataclass(frozen=True)
class LstmOptions(ModelOptions):
    """Sizes of an `Lstm`.

    Attributes:
        layers: Number of LSTM layers.
        cells: Cells of a layer.
        lookahead: Number of following frames that the model has seen when it classifies a frame, A.
        dropout: Dropout after every LSTM layer.
    """

    layers: int = 2
    cells: int = 256
    lookahead: int = 3
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        self.check_least(layers=1, cells=1, lookahead=0)
        check_dropout(self.dropout)

    def make(self, inputs: int, outputs: int) -> Lstm:
        return Lstm(self, inputs, outputs)

    def activations(self) -> int:
        return 8 * self.layers * self.cells


class Lstm(AcousticModel):
    """Stack of layers x (LSTM from left to right, dropout) and a linear output.

    The logits of frame t are the outputs after frame t + A. The last frame of a sequence is repeated to provide them at
    its end. The last A frames of a chunk are trained with repeated frames, which is why overlapping windows decode
    better.
    """

    cuda_graph = True

    options: LstmOptions

    def __init__(self, options: LstmOptions, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.options = options
        widths = [inputs] + [options.cells] * (options.layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(width, options.cells) for width in widths)
        self.dropout = Dropout(options.dropout)
        self.output = nn.Linear(options.cells, outputs)
        for layer in self.layers:
            assert isinstance(layer, nn.LSTM)
            reset_lstm(layer)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def hidden(self, x_BTF: Tensor, lengths_B: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        h_TBF = self.normalise(self._extend(x_BTF, lengths_B)).transpose(0, 1)
        for layer in self.layers:
            assert isinstance(layer, nn.LSTM)
            if h_TBF.device.type == "cpu":
                h_TBF = run_lstm(h_TBF, layer.all_weights[0], dtype, self.training)
            else:
                h_TBF = cudnn_lstm(h_TBF, layer.all_weights, dtype, self.training)
            h_TBF = self.dropout(h_TBF)
        return h_TBF[self.options.lookahead :].transpose(0, 1)

    def _extend(self, x_BTF: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Returns [B, T + A, F], with frames past the end of a sequence replaced by its last one."""
        batch, frames, _ = x_BTF.shape
        frame_T = torch.arange(frames + self.options.lookahead, device=x_BTF.device)
        last_B = torch.full((batch,), frames) if lengths_B is None else lengths_B
        frame_BT = torch.minimum(frame_T, last_B.to(x_BTF.device)[:, None] - 1)
        return x_BTF.gather(1, frame_BT[..., None].expand(-1, -1, x_BTF.shape[2]))
