"""Sums over all paths of a denominator graph, as a function of the scores of pdfs, with its gradient.

They are products with a sparse matrix, in float32, scaled in each frame. They run on the model's device.

Between two frames a path may also leak: with a small probability it goes on from a state that has nothing to do with
the one before (Povey et al., Interspeech 2016, section 2.6). The chain is then

    A' = (I + leaky x 1 start^T) A / (1 + leaky)

Shapes: B chunks, T frames, P pdfs, S states of the graph.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.nn import functional

from asr_am.hmm.denominator import DenominatorGraph

LOWEST = -60.0  # score below the best of a frame that is told from lower ones: all states would get 0 in float32
COLUMNS = 8  # that products take at once: 24 chunks take less time than 21
MEMORY = 2**28  # bytes of the forward probabilities that are kept for a backward pass


class PathSums:
    """Sums over the paths of one graph.

    Args:
        graph: the graph.
        device: where to compute.
        leaky: probability of a leak, relative to the graph's arcs.
    """

    def __init__(self, graph: DenominatorGraph, device: torch.device, leaky: float = 0.0) -> None:
        states = np.arange(len(graph.pdf_S))
        of_pdf = sparse.coo_array((np.ones(len(states)), (graph.pdf_S, states)), (graph.num_pdfs, len(states)))
        arcs_SS = graph.arcs_SS / (1 + leaky)
        self._next = _matrix(sparse.csr_array(arcs_SS.T), device)
        self._previous = _matrix(arcs_SS, device)
        self._of_pdf = _matrix(sparse.csr_array(of_pdf), device)
        self._pdf_S = torch.from_numpy(graph.pdf_S.astype(np.int64)).to(device)
        self._start_S = torch.from_numpy(graph.start_S).to(device)
        self._leaky = leaky
        self._memory: dict[str, Tensor] = {}

    def log_sum(self, scores_BTP: Tensor) -> Tensor:
        """Returns the log of the sum over all paths, summed over chunks, a scalar with a gradient."""
        at_once = max(1, MEMORY // (4 * scores_BTP.shape[1] * len(self._pdf_S)))
        return torch.stack([_LogSum.apply(part, self) for part in scores_BTP.split(at_once)]).sum()

    def sum_paths(self, scores_BTP: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log of the sum over all paths, summed over chunks, and the probability of each pdf [B, T, P]."""
        known = len(scores_BTP)
        scores_BTP = functional.pad(scores_BTP, (0, 0, 0, 0, 0, -known % COLUMNS))
        chunks, frames, pdfs = scores_BTP.shape
        largest_BT = scores_BTP.amax(2)
        emission_TPB = self._reused("emission", frames, pdfs, chunks)
        below_BTP = (scores_BTP - largest_BT[..., None]).clamp_min_(LOWEST)
        torch.exp(below_BTP.permute(1, 2, 0), out=emission_TPB)
        total = largest_BT.sum()
        alpha_TSB = self._reused("alpha", frames + 1, len(self._pdf_S), chunks)  # entry t is before frame t
        beta_SB, product_SB = (self._reused(name, *alpha_TSB.shape[1:]) for name in ("beta", "product"))
        alpha_TSB[0] = self._start_S[:, None]
        for t, emission_PB in enumerate(emission_TPB):
            before_SB = alpha_TSB[t]  # of sum 1
            if self._leaky:
                before_SB = torch.add(before_SB, self._start_S[:, None], alpha=self._leaky, out=product_SB)
            alpha_SB = _product(self._next, before_SB, out=alpha_TSB[t + 1])
            alpha_SB *= torch.index_select(emission_PB, 0, self._pdf_S, out=product_SB)
            sum_B = alpha_SB.sum(0)
            alpha_SB /= sum_B
            total += sum_B[:known].log().sum()
        probability_TPB = torch.empty_like(emission_TPB)
        beta_SB.fill_(1.0)
        for t in reversed(range(frames)):
            torch.mul(alpha_TSB[t + 1], beta_SB, out=product_SB)
            _product(self._of_pdf, product_SB, out=probability_TPB[t])
            torch.index_select(emission_TPB[t], 0, self._pdf_S, out=product_SB)
            _product(self._previous, product_SB.mul_(beta_SB), out=beta_SB)
            if self._leaky:
                beta_SB.add_(torch.mv(beta_SB.T, self._start_S), alpha=self._leaky)
            beta_SB /= beta_SB.mean(0)  # a maximum over the first axis takes torch ten times as long
        probability_TPB /= probability_TPB.sum(1, keepdim=True)
        return total, probability_TPB.permute(2, 0, 1)[:known]

    def _reused(self, name: str, *shape: int) -> Tensor:
        """Returns memory of an earlier call. New memory from the system for each batch takes longer than the sums.

        A GPU's memory does not come from the system for each batch, and a CUDA graph must not lose it.
        """
        if self._pdf_S.is_cuda:
            return torch.empty(shape, device=self._pdf_S.device)
        kept = self._memory.get(name)
        if kept is None or kept.shape != shape:
            kept = self._memory[name] = torch.empty(shape, device=self._pdf_S.device)
        return kept


class _LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_BTP: Tensor, paths: PathSums) -> Tensor:
        total, probability_BTP = paths.sum_paths(scores_BTP)
        ctx.save_for_backward(probability_BTP)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (probability_BTP,) = ctx.saved_tensors
        return gradient * probability_BTP, None


def _product(matrix: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return out.addmm_(matrix, x, beta=0)  # torch.mm(out=...) makes a new result and copies it: four times as slow


def _matrix(x: sparse.csr_array, device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            torch.from_numpy(x.indptr.astype(np.int32)), torch.from_numpy(x.indices.astype(np.int32)),
            torch.from_numpy(x.data.astype(np.float32)), x.shape, check_invariants=True,
        ).to(device)  # fmt: skip
