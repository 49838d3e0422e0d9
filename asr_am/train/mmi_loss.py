"""Lattice-free MMI: the log posterior of the alignment among all paths of a denominator graph.

Povey et al., "Purely sequence-trained neural networks for ASR based on lattice-free MMI" (Interspeech 2016), as a
second training after cross-entropy: the frame rate, the pdfs and the priors stay, so scores are used as before. The
numerator is the one path of the alignment. An output of the model that is for several frames is the score of each. In
decoding each frame is the middle one of an output. The gradient with respect to the log posterior of pdf p in frame t:

    acoustic_scale x (is p the aligned pdf? - probability that a path through the graph has p in frame t).

Shapes: B chunks, T frames, K outputs of the model, F features, P pdfs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from asr_am.egs.loader import IGNORE
from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.acoustic import AcousticModel
from asr_am.train.frame_loss import output_targets
from asr_am.train.path_sums import PathSums


@dataclass(frozen=True)
class MmiOptions:
    """Options of the loss.

    Attributes:
        acoustic_scale: weight of acoustic scores beside the graph, 1 / LM weight.
        ce_weight: weight of the cross-entropy that is added, against overfitting.
    """

    acoustic_scale: float = 0.15
    ce_weight: float = 0.1

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if not (0 < self.acoustic_scale < math.inf and 0 <= self.ce_weight < math.inf):
            raise InputError(
                f"train.mmi: acoustic_scale={self.acoustic_scale} must be above 0, and ce_weight={self.ce_weight} must "
                "not be negative"
            )


class MmiLoss:
    """The loss of a batch. Has the same interface as `frame_loss.batch_loss`.

    Args:
        graph: the denominator.
        log_priors_P: see `asr_am.egs.store.log_priors`.
        options: weights.
        device: of the model.
    """

    def __init__(
        self, graph: DenominatorGraph, log_priors_P: np.ndarray, options: MmiOptions, device: torch.device
    ) -> None:
        self.paths = PathSums(graph, device)
        self._log_priors_P = torch.from_numpy(log_priors_P).to(device)
        self._options = options

    def __call__(
        self, model: AcousticModel, x_BTF: Tensor, lengths_B: Tensor | None, targets_BT: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the loss, summed over frames, and of correct frames the number that `frame_loss.batch_loss` counts.

        The loss is minus the log posterior of the alignment, up to the alignment's probability in the graph, which does
        not depend on the weights, plus the weighted cross-entropy.

        Args:
            model: the network.
            x_BTF: features.
            lengths_B: frames of each chunk, None: all T.
            targets_BT: pdf of each frame, IGNORE in padding.
            dtype: of the matrix products of the network, float32 or bfloat16.
        """
        h_BKH, output = model.hidden(x_BTF, lengths_B, dtype), model.output
        logits_BKP = functional.linear(h_BKH, output.weight.to(h_BKH.dtype), output.bias.to(h_BKH.dtype)).float()
        logits_BTP = logits_BKP.repeat_interleave(model.subsampling, dim=1)[:, : x_BTF.shape[1]]
        posteriors_BTP = logits_BTP.log_softmax(2)
        known_BT1 = (targets_BT != IGNORE)[..., None]
        target_BT1 = targets_BT[..., None].clamp_min(0)
        # padding has the score 0 for all pdfs, so that the sum over its paths is 1
        scores_BTP = self._options.acoustic_scale * (posteriors_BTP - self._log_priors_P) * known_BT1
        path = scores_BTP.gather(2, target_BT1).sum()
        all_paths = self.paths.log_sum(scores_BTP)
        cross_entropy = -(posteriors_BTP.gather(2, target_BT1) * known_BT1).sum()
        targets_BK, frames_BK = output_targets(model, targets_BT, lengths_B)
        correct = ((logits_BKP.argmax(2) == targets_BK) * frames_BK).sum().float()
        return all_paths - path + self._options.ce_weight * cross_entropy, correct
