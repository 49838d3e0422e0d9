"""Lattice-free MMI from random weights, at a fraction of the frame rate: chain models (Povey et al., Interspeech 2016).

The model's outputs are scores of pdfs without a softmax and without priors, and are used as they are in decoding. The
loss of a chunk is

    log sum over the paths of the denominator graph - log sum over the paths of the numerator
        + l2 / 2 x sum of the squared outputs + xent x cross-entropy of a second output layer

The numerator has the chunk's phones in their order. Each begins and ends up to `tolerance` steps earlier or later than
in the alignment. Stays and exits have the probabilities of the denominator, where durations are then as probable. The
second output layer, on the same hidden layer, is trained with the alignment. The finished model does not have it.

Shapes: B chunks, T frames, K outputs, F features, P pdfs (of first steps by leaf, then of later ones), N phones of a
chunk, at most K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.acoustic import AcousticModel, subsample
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
    leaky: float = 0.1
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
        graph: the denominator, with the states of `asr_am.hmm.train_chain`.
        options: weights.
        device: of the model.
    """

    def __init__(self, graph: DenominatorGraph, options: ChainOptions, device: torch.device) -> None:
        self.paths = PathSums(graph, device, options.leaky)
        self._options = options
        self._leaves = graph.num_pdfs // 2
        later_S = graph.pdf_S >= self._leaves
        leaf_S, stay_S = graph.pdf_S[later_S] - self._leaves, graph.arcs_SS.diagonal()[later_S]
        count_P = np.bincount(leaf_S, minlength=self._leaves)
        loop_P = np.clip(np.bincount(leaf_S, stay_S, self._leaves) / np.maximum(count_P, 1), 0.01, 0.99)
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
        outputs = output_phones(model, targets_BT, lengths_B, self._leaves)
        frames_BK, leaf_BK, phone_BK = outputs.frames_BK, outputs.leaf_BK, outputs.phone_BK
        known_BK = frames_BK > 0
        W, b = model.output.weight.to(h_BKH.dtype), model.output.bias.to(h_BKH.dtype)
        scores_BKP = functional.linear(h_BKH, W, b).float() * known_BK[..., None]
        mmi = self.paths.log_sum(scores_BKP) - self.numerator(scores_BKP, leaf_BK, phone_BK, known_BK)
        mmi = mmi + self._options.l2 / 2 * scores_BKP.square().sum()
        xent, correct = frame_loss(h_BKH, model.xent, outputs.pdf_BK, weights_BT=frames_BK)
        return model.subsampling * mmi + self._options.xent * xent, correct

    def numerator(self, scores_BKP: Tensor, leaf_BK: Tensor, phone_BK: Tensor, known_BK: Tensor) -> Tensor:
        """Returns the log of the sum over the paths of the numerators, summed over chunks.

        The first phone of a chunk may have begun before it.

        Args:
            scores_BKP: outputs.
            leaf_BK: leaf of the aligned phone of each output.
            phone_BK: its number, from 0.
            known_BK: False in padding.
        """
        size, tolerance = leaf_BK.shape[1], self._options.tolerance
        step_K = torch.arange(size, device=leaf_BK.device)
        step_BK = step_K.expand_as(leaf_BK)
        last_BN = torch.zeros_like(step_BK).scatter_reduce(1, phone_BK, step_BK.where(known_BK, 0), "amax")
        first_BN = torch.full_like(step_BK, size).scatter_reduce(1, phone_BK, step_BK.where(known_BK, size), "amin")
        leaf_BN = leaf_BK.gather(1, last_BN)
        inside_BKN = (step_K[:, None] >= first_BN[:, None] - tolerance) & (
            step_K[:, None] <= last_BN[:, None] + tolerance
        )
        pdf_BKN = leaf_BN[:, None].expand(-1, size, -1)
        first_BKN = scores_BKP.gather(2, pdf_BKN).masked_fill(~inside_BKN, NEVER)
        later_BKN = scores_BKP.gather(2, pdf_BKN + self._leaves).masked_fill(~inside_BKN, NEVER)
        loop_BN, next_BN = self._loop_P[leaf_BN], self._next_P[leaf_BN]
        start_BN = torch.logaddexp(next_BN + first_BKN[:, 0], loop_BN + later_BKN[:, 0])
        alpha_BN = functional.pad(start_BN[:, :1], (0, size - 1), value=NEVER)
        for k in range(1, size):
            entered_BN = functional.pad((alpha_BN + next_BN)[:, :-1], (1, 0), value=NEVER) + first_BKN[:, k]
            following_BN = torch.logaddexp(alpha_BN + loop_BN + later_BKN[:, k], entered_BN)
            alpha_BN = torch.where(known_BK[:, k, None], following_BN, alpha_BN)
        return alpha_BN.gather(1, phone_BK[:, -1:]).sum()


class OutputPhones(NamedTuple):
    """The alignment of a batch by outputs of the model, [B, K] each.

    Attributes:
        frames_BK: frames that an output stands for, 0 in padding.
        leaf_BK: leaf of its phone.
        phone_BK: number of its phone in the chunk, from 0. Padding belongs to the last phone.
        pdf_BK: its pdf: that of the leaf's first step for the first output of a phone, else that of later ones.
    """

    frames_BK: Tensor
    leaf_BK: Tensor
    phone_BK: Tensor
    pdf_BK: Tensor


def output_phones(model: AcousticModel, targets_BT: Tensor, lengths_B: Tensor | None, leaves: int) -> OutputPhones:
    """Returns the phones of the outputs of a model. The first phone of a chunk may have begun before it.

    Args:
        model: the network.
        targets_BT: pdf of each frame, IGNORE in padding. Those below `leaves` are of first steps.
        lengths_B: frames of each chunk, None: all T.
        leaves: number of leaves.
    """
    targets_BK, frames_BK = output_targets(model, targets_BT, lengths_B)
    known_BK, leaf_BK = frames_BK > 0, targets_BK % leaves
    begun_BT = ((targets_BT >= 0) & (targets_BT < leaves)).long().cumsum(1)  # 0 for a phone that began before
    begun_BK, _ = subsample(begun_BT, lengths_B, model.subsampling)
    changes_BK = (begun_BK[:, 1:] != begun_BK[:, :-1]) & known_BK[:, 1:]
    begins_BK = torch.cat([begun_BK[:, :1] > 0, changes_BK], dim=1)
    phone_BK = functional.pad(changes_BK.long().cumsum(1), (1, 0))
    return OutputPhones(frames_BK, leaf_BK, phone_BK, leaf_BK.where(begins_BK, leaf_BK + leaves))


def add_xent(model: AcousticModel) -> None:
    """Adds the second output layer, with random weights."""
    model.xent = nn.Linear(model.output.in_features, model.output.out_features)
    nn.init.xavier_uniform_(model.xent.weight)
    nn.init.zeros_(model.xent.bias)
