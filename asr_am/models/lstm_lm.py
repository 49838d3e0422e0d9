"""Recurrent language model: embeddings, LSTM with a recurrent projection, full or sampled softmax.

The model of Jozefowicz et al., "Exploring the limits of language modeling" (2016), as trained by Parallax (section 6):
one layer of 2,048 cells projected to 512. The projection is that of Sak et al. (2014), `proj_size` in torch.

Shapes: B sentences, T units of a sentence, N positions with a target, P projection, V units of the vocabulary.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.errors import InputError
from asr_am.models.sampled_softmax import LogUniform, sampled_loss

IGNORED = -1  # target of padding
warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")


@dataclass(frozen=True)
class LstmLmOptions:
    """Sizes of an `LstmLm`.

    Attributes:
        embedding: Dimension of the input embedding.
        layers: Number of LSTM layers.
        cells: LSTM cells.
        projection: Dimension of the recurrent projection, P.
        dropout: Dropout after the embedding, between layers and after the last one.
        samples: Samples of the sampled softmax. 0 selects the full softmax.
        tied: Shares input and output embeddings.
    """

    embedding: int = 128
    layers: int = 1
    cells: int = 256
    projection: int = 128
    dropout: float = 0.0
    samples: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        """Raises InputError for values out of range and for contradictions."""
        if min(self.embedding, self.layers, self.cells, self.projection) < 1:
            raise InputError("lm.model: embedding, layers, cells and projection must be at least 1")
        if self.projection >= self.cells:
            raise InputError(f"lm.model.projection={self.projection}: must be below cells={self.cells}")
        if not 0 <= self.dropout < 1 or self.samples < 0:
            raise InputError("lm.model: dropout must be at least 0 and below 1, samples at least 0")
        if self.tied and self.embedding != self.projection:
            raise InputError("lm.model.tied: embedding and projection must be equal")


@dataclass(frozen=True)
class BatchPart:
    """Place of a learner's rows in the batch of all learners.

    Attributes:
        first: number of its first row.
        rows: rows of all learners.
        longest: units of the longest row of all learners.
    """

    first: int
    rows: int
    longest: int


class PartDropout(nn.Module):
    """Dropout whose mask for a row depends on the batch of all learners, not on how they share it.

    Learners that draw from equal generators so train as one device does. Each draws the mask of all rows.

    Attributes:
        part: what the next input is a part of. None: it is the whole batch.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.part: BatchPart | None = None

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Drops elements of x [B, T, E] in training mode."""
        if not self.training or not self.share:
            return x_BTE
        rows, units, size = x_BTE.shape
        part = self.part or BatchPart(0, rows, units)
        mask = torch.empty(part.rows, part.longest, size, device=x_BTE.device).bernoulli_(1 - self.share)
        return x_BTE * mask[part.first : part.first + rows, :units].div_(1 - self.share)


class LstmLm(nn.Module):
    """Predicts each unit of a sentence, including its end, from the previous ones."""

    def __init__(self, options: LstmLmOptions, size: int) -> None:
        """Makes a model of `size` units with random weights from torch's default generator."""
        super().__init__()
        if options.samples > size:
            raise InputError(f"lm.model.samples={options.samples}: there are {size} units; 0 is the full softmax")
        self.options, self.size = options, size
        self.embedding = nn.Embedding(size, options.embedding)
        self.lstm = nn.LSTM(
            options.embedding, options.cells, options.layers, proj_size=options.projection, batch_first=True,
            dropout=options.dropout if options.layers > 1 else 0.0,
        )  # fmt: skip
        self.dropout = PartDropout(options.dropout)
        self.output = self.embedding if options.tied else nn.Embedding(size, options.projection)
        self.bias = nn.Embedding(size, 1)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.output.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, input_BT: Tensor, target_BT: Tensor) -> Tensor:
        """Returns the mean loss in nats over positions with a target. Samples the softmax in training mode only."""
        h_BTP = self.dropout(self.hidden(input_BT))
        counts_BT = target_BT != IGNORED
        h_NP, target_N = h_BTP[counts_BT], target_BT[counts_BT]
        if self.training and self.options.samples:
            sampled_S, draws = LogUniform(self.size).sample(self.options.samples)
            return sampled_loss(h_NP, target_N, self.output, self.bias, sampled_S, draws)
        return functional.cross_entropy(self.logits(h_NP), target_N)

    def hidden(self, input_BT: Tensor) -> Tensor:
        """Returns the projected outputs [B, T, P] of complete sentences."""
        return self.lstm(self.dropout(self.embedding(input_BT)))[0]

    def logits(self, h_NP: Tensor) -> Tensor:
        """Returns unnormalised log-probabilities [N, V]."""
        return functional.linear(h_NP, self.output.weight, self.bias.weight[:, 0])
