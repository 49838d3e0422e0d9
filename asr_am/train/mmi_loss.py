"""Lattice-free MMI: the log posterior of the alignment among all paths of a denominator graph.

Povey et al., "Purely sequence-trained neural networks for ASR based on lattice-free MMI" (Interspeech 2016), as a
second training after cross-entropy: the frame rate, the pdfs and the priors stay, so scores are used as before. The
numerator is the one path of the alignment. An output of the model that is for several frames is the score of each, as
in decoding. The gradient with respect to the log posterior of pdf p in frame t is

    acoustic_scale x (is p the aligned pdf? - probability that a path through the graph has p in frame t).

The sums over paths are products with a sparse matrix, in float32, scaled in each frame. They run on the model's device.

Shapes: B chunks, T frames, K outputs of the model, F features, P pdfs, S states of the graph.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.nn import functional

from asr_am.egs.loader import IGNORE
from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph
from asr_am.models.acoustic import AcousticModel

MEMORY = 2**28  # bytes of the forward probabilities that are kept for a backward pass


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
        states = np.arange(len(graph.pdf_S))
        of_pdf = sparse.coo_array((np.ones(len(states)), (graph.pdf_S, states)), (graph.num_pdfs, len(states)))
        self._next = _matrix(sparse.csr_array(graph.arcs_SS.T), device)
        self._previous = _matrix(graph.arcs_SS, device)
        self._of_pdf = _matrix(sparse.csr_array(of_pdf), device)
        self._pdf_S = torch.from_numpy(graph.pdf_S.astype(np.int64)).to(device)
        self._start_S = torch.from_numpy(graph.start_S).to(device)
        self._log_priors_P = torch.from_numpy(log_priors_P).to(device)
        self._options = options
        self._memory: dict[str, Tensor] = {}

    def __call__(
        self, model: AcousticModel, x_BTF: Tensor, lengths_B: Tensor | None, targets_BT: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the loss, summed over frames, and the number of frames whose best pdf is the aligned one.

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
        all_paths = sum(_LogSum.apply(part, self) for part in scores_BTP.split(self._chunks_at_once(x_BTF.shape[1])))
        cross_entropy = -(posteriors_BTP.gather(2, target_BT1) * known_BT1).sum()
        correct = (logits_BTP.argmax(2) == targets_BT).sum().float()
        return all_paths - path + self._options.ce_weight * cross_entropy, correct

    def _chunks_at_once(self, num_frames: int) -> int:
        return max(1, MEMORY // (4 * num_frames * len(self._pdf_S)))

    def sum_paths(self, scores_BTP: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log of the sum over all paths, summed over chunks, and the probability of each pdf [B, T, P]."""
        chunks, frames, pdfs = scores_BTP.shape
        largest_BT = scores_BTP.amax(2)
        emission_TPB = self._reused("emission", frames, pdfs, chunks)
        torch.exp((scores_BTP - largest_BT[..., None]).permute(1, 2, 0), out=emission_TPB)
        total = largest_BT.sum()
        alpha_TSB = self._reused("alpha", frames + 1, len(self._pdf_S), chunks)  # entry t is before frame t
        beta_SB, product_SB = (self._reused(name, *alpha_TSB.shape[1:]) for name in ("beta", "product"))
        alpha_TSB[0] = self._start_S[:, None]
        for t, emission_PB in enumerate(emission_TPB):
            alpha_SB = torch.mm(self._next, alpha_TSB[t], out=alpha_TSB[t + 1])
            alpha_SB *= torch.index_select(emission_PB, 0, self._pdf_S, out=product_SB)
            sum_B = alpha_SB.sum(0)
            alpha_SB /= sum_B
            total += sum_B.log().sum()
        probability_TPB = torch.empty_like(emission_TPB)
        beta_SB.fill_(1.0)
        for t in reversed(range(frames)):
            torch.mul(alpha_TSB[t + 1], beta_SB, out=product_SB)
            torch.mm(self._of_pdf, product_SB, out=probability_TPB[t])
            torch.index_select(emission_TPB[t], 0, self._pdf_S, out=product_SB)
            torch.mm(self._previous, product_SB.mul_(beta_SB), out=beta_SB)
            beta_SB /= beta_SB.amax(0)
        probability_TPB /= probability_TPB.sum(1, keepdim=True)
        return total, probability_TPB.permute(2, 0, 1)

    def _reused(self, name: str, *shape: int) -> Tensor:
        """Returns memory of an earlier call. New memory from the system for each batch takes longer than the sums."""
        kept = self._memory.get(name)
        if kept is None or kept.shape != shape:
            kept = self._memory[name] = torch.empty(shape, device=self._pdf_S.device)
        return kept


class _LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_BTP: Tensor, loss: MmiLoss) -> Tensor:
        total, probability_BTP = loss.sum_paths(scores_BTP)
        ctx.save_for_backward(probability_BTP)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (probability_BTP,) = ctx.saved_tensors
        return gradient * probability_BTP, None


def _matrix(x: sparse.csr_array, device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            torch.from_numpy(x.indptr.astype(np.int64)), torch.from_numpy(x.indices.astype(np.int64)),
            torch.from_numpy(x.data.astype(np.float32)), x.shape, check_invariants=True,
        ).to(device)  # fmt: skip
