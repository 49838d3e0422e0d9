"""Base class of acoustic models: maps features, which it normalises, to logits of pdfs.

Shapes: B chunks or utterances, T frames, F features, P pdfs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AcousticModel(nn.Module):
    """Base class. Maps x_BTF and lengths_B (None: all T) to logits [B, T, P], without a softmax.

    A subclass has all layers but the last in `hidden`. Training takes these and `output` apart, see `frame_loss`.
    Frames at or past a sequence's length do not influence others, and their own logits have no meaning.

    Attributes:
        options: Sizes of the model, a dataclass.
        inputs: Dimension of the features, F.
        outputs: Number of pdfs, P.
        mean_F: Buffer, subtracted from the features.
        scale_F: Buffer, multiplied with the features after that.
        dropout: Applied after every layer.
        output: The last layer, linear.
    """

    options: Any
    mean_F: Tensor
    scale_F: Tensor
    dropout: nn.Dropout
    output: nn.Linear

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.register_buffer("mean_F", torch.zeros(inputs))
        self.register_buffer("scale_F", torch.ones(inputs))

    def set_normalisation(self, mean_F: Tensor, deviation_F: Tensor) -> None:
        """Sets mean and standard deviation of the features, so that inputs get zero mean and unit variance."""
        self.mean_F.copy_(mean_F)
        self.scale_F.copy_(1.0 / deviation_F.clamp_min(1e-5))

    def normalise(self, x_BTF: Tensor) -> Tensor:
        """Returns features of zero mean and unit variance [B, T, F]."""
        return (x_BTF - self.mean_F) * self.scale_F

    def hidden(self, x_BTF: Tensor, lengths_B: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the inputs of the output layer [B, T, H], with matrix products in `dtype`. Weights stay float32."""
        raise NotImplementedError

    def forward(self, x_BTF: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Returns logits [B, T, P]."""
        return self.output(self.hidden(x_BTF, lengths_B))
