"""What all acoustic models have in common: features in, normalised first, and logits of pdfs out.

Shapes: B chunks or utterances, T frames, F features, P pdfs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AcousticModel(nn.Module):
    """options: a dataclass, the model's sizes. inputs: dimension of the features. outputs: number of pdfs.

    The buffers mean_F and scale_F normalise the features as they come in: (x - mean) * scale. dropout: what is applied
    after every layer.

    Called with x_BTF and lengths_B (None: all T) a model gives logits [B, T, P]; the softmax belongs to the loss.
    Frames at or past a sequence's length influence nothing; their own logits mean nothing.
    """

    options: Any
    mean_F: Tensor
    scale_F: Tensor
    dropout: nn.Dropout

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.register_buffer("mean_F", torch.zeros(inputs))
        self.register_buffer("scale_F", torch.ones(inputs))

    def set_normalisation(self, mean_F: Tensor, deviation_F: Tensor) -> None:
        """Normalise features to zero mean and unit variance, given their moments."""
        self.mean_F.copy_(mean_F)
        self.scale_F.copy_(1.0 / deviation_F.clamp_min(1e-5))

    def normalise(self, x_BTF: Tensor) -> Tensor:
        """Features of zero mean and unit variance, [B, T, F]."""
        return (x_BTF - self.mean_F) * self.scale_F
