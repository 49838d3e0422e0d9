"""Connectionist temporal classification (Graves et al., ICML 2006): phones in their order, and blanks between them.

The units are the phones of the lexicon, without context. An output is a phone or blank, and the loss of a chunk is
minus the log of the summed probabilities of all outputs that become its phones when repetitions and blanks are removed.
A phone that a chunk cuts counts in both chunks. To decode with the graphs of chain models, a phone's first step emits
the phone, and a later one the phone again or blank (`ctc_scores`): what CTC emits is emitted by a path of such a graph.

Shapes: B chunks, T frames, K outputs, F features, H inputs of the output layer, L phones, C = L + 1 outputs that are
used (phones, then blank) of P = 2 L pdfs, N phones of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from asr_am.errors import InputError
from asr_am.models.acoustic import AcousticModel
from asr_am.train.chain_loss import output_phones
from asr_am.train.frame_loss import frame_loss


@dataclass(frozen=True)
class CtcOptions:
    """Options of the loss.

    Attributes:
        xent: weight of the cross-entropy of a second output layer, as of chain models.
    """

    xent: float = 0.1

    def __post_init__(self) -> None:
        """Raises InputError if the weight is negative."""
        if not 0 <= self.xent < math.inf:
            raise InputError(f"train.ctc.xent={self.xent}: must not be negative")


class CtcLoss:
    """The loss of a batch. Has the same interface as `chain_loss.ChainLoss`.

    Args:
        num_pdfs: outputs of the model, P.
        options: weights.
    """

    def __init__(self, num_pdfs: int, options: CtcOptions) -> None:
        self._leaves, self._options = num_pdfs // 2, options

    def __call__(
        self, model: AcousticModel, x_BTF: Tensor, lengths_B: Tensor | None, targets_BT: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the same as `ChainLoss`, with this loss.

        A chunk is left out if its phones, and a blank between each two that are equal, are more than its outputs.
        """
        assert model.xent is not None
        h_BKH = model.hidden(x_BTF, lengths_B, dtype)
        outputs = output_phones(model, targets_BT, lengths_B, self._leaves)
        W_CH, b_C = (x[: self._leaves + 1].to(h_BKH.dtype) for x in (model.output.weight, model.output.bias))
        scores_KBC = functional.linear(h_BKH, W_CH, b_C).float().log_softmax(-1).transpose(0, 1)
        known_BK, last_B = outputs.frames_BK > 0, outputs.phone_BK[:, -1]
        phones_BN = outputs.leaf_BK.new_zeros(len(last_B), int(last_B.max()) + 1)
        phones_BN.scatter_reduce_(1, outputs.phone_BK, outputs.leaf_BK.where(known_BK, 0), "amax")
        ctc = functional.ctc_loss(
            scores_KBC, phones_BN, known_BK.sum(1), last_B + 1, self._leaves, "sum", zero_infinity=True
        )
        xent, correct = frame_loss(h_BKH, model.xent, outputs.pdf_BK, weights_BT=outputs.frames_BK)
        return model.subsampling * ctc + self._options.xent * xent, correct


def ctc_scores(logits_KP: Tensor) -> Tensor:
    """Returns scores of the pdfs of first steps, phones, and of later ones, the phone or blank. [K, P]"""
    leaves = logits_KP.shape[1] // 2
    scores_KC = logits_KP[:, : leaves + 1].log_softmax(-1)
    phones_KL, blank_K1 = scores_KC[:, :leaves], scores_KC[:, leaves:]
    return torch.cat([phones_KL, torch.logaddexp(phones_KL, blank_K1)], dim=1)
