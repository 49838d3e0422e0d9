"""Lattice-free MMI from random weights, at a fraction of the frame rate: chain models (Povey et al., Interspeech 2016).

The model's outputs are scores of pdfs without a softmax and without priors, and are used as they are in decoding. The
loss of a chunk is

    log sum over the paths of the denominator graph - log sum over the paths of the numerator
        + l2 / 2 x sum of the squared outputs + xent x cross-entropy of a second output layer

The numerator has the chunk's phones in their order. Each begins and ends up to `tolerance` steps earlier or later than
in the alignment. Stays and exits have the probabilities of the denominator, where durations are then as probable. The
second output layer, on the same hidden layer, is trained with the alignment. The finished model does not have it.

Shapes: B chunks, T frames, K outputs, F features, P pdfs, N phones of a chunk, at most K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.acoustic import AcousticModel
from asr_am.train.frame_loss import frame_loss, output_targets
from asr_am.train.path_sums import PathSums

NEVER = -1e30  # a log probability whose gradients are 0 and not NaN


@dataclass(frozen=True)
class ChainOptions:
    """Options of the loss. The defaults are Kaldi's, but for the tolerance of 5 frames that it has.

    Attributes:
        tolerance: steps that a phone may begin or end away from the alignment.
        leaky: see `path_sums`.
        l2: weight of the squared outputs.
        xent: weight of the cross-entropy.
    """

    tolerance: int = 1
    leaky: float = 1e-5
    l2: float = 5e-5
    xent: float = 0.1

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        if self.tolerance < 0:
            raise InputError(f"train.chain.tolerance={self.tolerance}: must not be negative")
        for name in ("leaky", "l2", "xent"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"train.chain.{name}={getattr(self, name)}: must not be negative")


class ChainLoss:
    """The loss of a batch. Has the same interface as `frame_loss.batch_loss`.

    Args:
        graph: the denominator, a state of which is a phone.
        options: weights.
        device: of the model.
    """

    def __init__(self, graph: DenominatorGraph, options: ChainOptions, device: torch.device) -> None:
        self.paths = PathSums(graph, device, options.leaky)
        self._options = options
        count_P = np.bincount(graph.pdf_S, minlength=graph.num_pdfs)
        loop_P = np.bincount(graph.pdf_S, graph.arcs_SS.diagonal(), graph.num_pdfs) / np.maximum(count_P, 1)
        loop_P = np.clip(loop_P, 0.01, 0.99)
        self._loop_P = torch.from_numpy(np.log(loop_P).astype(np.float32)).to(device)
        self._next_P = torch.from_numpy(np.log1p(-loop_P).astype(np.float32)).to(device)

    def __call__(
        self, model: AcousticModel, x_BTF: Tensor, lengths_B: Tensor | None, targets_BT: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the loss, summed over frames, and the number of frames whose best pdf is the aligned one.

        An output counts for its frames. The best pdf is that of the second output layer.

        Args:
            model: the network, with `add_xent`.
            x_BTF: features.
            lengths_B: frames of each chunk, None: all T.
            targets_BT: pdf of each frame, IGNORE in padding.
            dtype: of the matrix products of the network, float32 or bfloat16.
        """
        assert model.xent is not None
        h_BKH = model.hidden(x_BTF, lengths_B, dtype)
        targets_BK, frames_BK = output_targets(model, targets_BT, lengths_B)
        known_BK = frames_BK > 0
        W, b = model.output.weight.to(h_BKH.dtype), model.output.bias.to(h_BKH.dtype)
        scores_BKP = functional.linear(h_BKH, W, b).float() * known_BK[..., None]
        mmi = self.paths.log_sum(scores_BKP) - self.numerator(scores_BKP, targets_BK, known_BK)
        mmi = mmi + self._options.l2 / 2 * scores_BKP.square().sum()
        xent, correct = frame_loss(h_BKH, model.xent, targets_BK, weights_BT=frames_BK)
        return model.subsampling * mmi + self._options.xent * xent, correct

    def numerator(self, scores_BKP: Tensor, targets_BK: Tensor, known_BK: Tensor) -> Tensor:
        """Returns the log of the sum over the paths of the numerators, summed over chunks.

        Args:
            scores_BKP: outputs.
            targets_BK: aligned pdf of each output.
            known_BK: False in padding.
        """
        pdf_BN, first_BN, last_BN, phone_BK = _phones(targets_BK, known_BK)
        step_K = torch.arange(targets_BK.shape[1], device=targets_BK.device)
        tolerance = self._options.tolerance
        inside_BKN = (step_K[:, None] >= first_BN[:, None] - tolerance) & (
            step_K[:, None] <= last_BN[:, None] + tolerance
        )
        scores_BKN = scores_BKP.gather(2, pdf_BN[:, None].expand(-1, len(step_K), -1))
        scores_BKN = scores_BKN.masked_fill(~inside_BKN, NEVER)
        loop_BN, next_BN = self._loop_P[pdf_BN], self._next_P[pdf_BN]
        alpha_BN = functional.pad(scores_BKN[:, 0, :1], (0, len(step_K) - 1), value=NEVER)
        for k in range(1, len(step_K)):
            entered_BN = functional.pad((alpha_BN + next_BN)[:, :-1], (1, 0), value=NEVER)
            following_BN = torch.logaddexp(alpha_BN + loop_BN, entered_BN) + scores_BKN[:, k]
            alpha_BN = torch.where(known_BK[:, k, None], following_BN, alpha_BN)
        return alpha_BN.gather(1, phone_BK[:, -1:]).sum()


def _phones(targets_BK: Tensor, known_BK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns pdf, first and last step of each phone, [B, K] with unused ones at the end, and the phone of each step.

    Padding belongs to the last phone. Phones are told apart by their pdfs.
    """
    changes_BK = (targets_BK[:, 1:] != targets_BK[:, :-1]) & known_BK[:, 1:]
    phone_BK = functional.pad(changes_BK.long().cumsum(1), (1, 0))
    step_BK = torch.arange(targets_BK.shape[1], device=targets_BK.device).expand_as(targets_BK)
    aligned_BK = step_BK.where(known_BK, 0)  # the first step is never padding
    last_BN = torch.zeros_like(step_BK).scatter_reduce(1, phone_BK, aligned_BK, "amax")
    first_BN = torch.full_like(step_BK, targets_BK.shape[1]).scatter_reduce(
        1, phone_BK, step_BK.where(known_BK, targets_BK.shape[1]), "amin"
    )
    return targets_BK.gather(1, last_BN), first_BN, last_BN, phone_BK


def add_xent(model: AcousticModel) -> None:
    """Adds the second output layer, with random weights."""
    model.xent = nn.Linear(model.output.in_features, model.output.out_features)
    nn.init.xavier_uniform_(model.xent.weight)
    nn.init.zeros_(model.xent.bias)
