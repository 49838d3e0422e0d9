"""Output layer and cross-entropy in one: loss, correct frames and all gradients, a part of the frames at a time.

With 32,000 pdfs the logits of a batch of 2,560 chunks are 7 GB. Here only those of one part exist at a time. A part is
large enough for fast matrix products. On a CPU its softmax is computed a few frames at a time, in the caches. For a GPU
it is compiled into one kernel. Gradients are computed with the loss, so logits are neither kept nor computed twice.

Shapes: B chunks, T frames, K outputs of the model, F features, N = B x T frames, H inputs of the output layer, P pdfs.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.egs.loader import IGNORE
from asr_am.models.acoustic import AcousticModel, subsample

log = logging.getLogger(__name__)

CPU_PART, GPU_PART = 2**24, 2**28  # logits of a part: 64 MB and 1 GB in float32
CACHED = 2**19  # logits that a CPU's caches hold
COMPILED = 2**24  # logits of a batch from which the seconds of compiling are worth it


def batch_loss(
    model: AcousticModel, x_BTF: Tensor, lengths_B: Tensor | None, targets_BT: Tensor,
    dtype: torch.dtype = torch.float32, smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the loss of a model on some chunks, as `frame_loss` does.

    A model with an output for several frames is trained with the target of the middle one. The output counts for all of
    them, so that figures of all models compare.

    Args:
        model: the network.
        x_BTF: features.
        lengths_B: frames of each chunk, None: all T.
        targets_BT: pdf of each frame, IGNORE in padding.
        dtype: of the matrix products, float32 or bfloat16. Weights and softmax are float32.
        smoothing: label smoothing.
    """
    h_BKH = model.hidden(x_BTF, lengths_B, dtype)
    if model.subsampling == 1:
        return frame_loss(h_BKH, model.output, targets_BT, smoothing)
    targets_BK, frames_BK = output_targets(model, targets_BT, lengths_B)
    return frame_loss(h_BKH, model.output, targets_BK, smoothing, frames_BK)


def output_targets(model: AcousticModel, targets_BT: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the target of each output of a model, that of its middle frame, and its number of frames, [B, K] each.

    Args:
        model: the network.
        targets_BT: pdf of each frame, IGNORE in padding.
        lengths_B: frames of each chunk, None: all T.
    """
    targets_BK, _ = subsample(targets_BT, lengths_B, model.subsampling)
    begin_K = torch.arange(0, targets_BT.shape[1], model.subsampling, device=targets_BT.device)
    frames_BK = (targets_BT != IGNORE).sum(1, keepdim=True) - begin_K
    return targets_BK, frames_BK.clamp(0, model.subsampling)


def frame_loss(
    h_BTH: Tensor, output: nn.Linear, targets_BT: Tensor, smoothing: float = 0.0, weights_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy and the number of correct frames, both summed over all frames but padding.

    Args:
        h_BTH: inputs of the output layer. Its matrix products have their dtype.
        output: the layer.
        targets_BT: pdf of each frame, IGNORE in padding.
        smoothing: label smoothing.
        weights_BT: how many frames each counts for. None: one, and none in padding.

    Returns:
        Loss in nats, a scalar with a gradient, and the number of frames whose best pdf is the target.
    """
    if weights_BT is None:
        weights_BT = targets_BT != IGNORE
    loss, correct = _FrameLoss.apply(
        h_BTH.flatten(0, 1), output.weight, output.bias, targets_BT.flatten(), weights_BT.flatten(), smoothing,
        torch.is_grad_enabled(),
    )  # fmt: skip
    return loss, correct


class _FrameLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_NH: Tensor, W_PH: Tensor, b_P: Tensor, y_N: Tensor, weight_N: Tensor, smoothing: float,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        W, b = W_PH.to(h_NH.dtype), b_P.to(h_NH.dtype)
        loss, correct = h_NH.new_zeros((), dtype=torch.float32), h_NH.new_zeros((), dtype=torch.float32)
        on_cpu = h_NH.device.type == "cpu"
        frames = max((CPU_PART if on_cpu else GPU_PART) // len(W), 1)
        softmax = _softmax if on_cpu or len(h_NH) * len(W) < COMPILED else _compiled_softmax()
        if needs_gradient:
            dh_NH, dW_PH, db_P = torch.empty_like(h_NH), torch.zeros_like(W_PH), torch.zeros_like(b_P)
            ctx.save_for_backward(dh_NH, dW_PH, db_P)
        for first in range(0, len(h_NH), frames):
            h, y, weight = (x[first : first + frames] for x in (h_NH, y_N, weight_N))
            z = functional.linear(h, W, b)
            rows = max(CACHED // len(W), 1) if on_cpu else len(z)
            for part in zip(z.split(rows), y.split(rows), weight.split(rows), strict=True):
                loss_rows, correct_rows = softmax(*part, smoothing, needs_gradient)
                loss += loss_rows
                correct += correct_rows
            if needs_gradient:  # z is the gradient of the logits now
                torch.mm(z, W, out=dh_NH[first : first + frames])
                dW_PH += z.mT @ h
                db_P += z.sum(0, dtype=torch.float32)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dh_NH, dW_PH, db_P = ctx.saved_tensors
        return dh_NH * dloss, dW_PH * dloss, db_P * dloss, None, None, None, None


def _softmax(
    z_NP: Tensor, y_N: Tensor, weight_N: Tensor, smoothing: float, needs_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns summed loss and correct frames of some logits, and replaces these by their gradient if it is needed."""
    logits_NP = z_NP.float()
    best_N = _argmax(logits_NP)
    target_N1 = y_N.clamp_min(0)[:, None]
    p_NP = logits_NP.softmax(1)
    # The best pdf's probability is at least 1 / P, so its logarithm is exact enough. That of the target may be 0.
    normaliser_N1 = logits_NP.gather(1, best_N[:, None]) - p_NP.gather(1, best_N[:, None]).log()
    wanted_N1 = logits_NP.gather(1, target_N1)
    if smoothing:
        wanted_N1 = (1 - smoothing) * wanted_N1 + smoothing * logits_NP.mean(1, keepdim=True)
    if needs_gradient:
        p_NP.scatter_add_(1, target_N1, torch.full_like(wanted_N1, smoothing - 1))
        if smoothing:
            p_NP -= smoothing / p_NP.shape[1]
        p_NP *= weight_N[:, None]
        z_NP.copy_(p_NP)
    return ((normaliser_N1 - wanted_N1)[:, 0] * weight_N).sum(), ((best_N == y_N) * weight_N).sum()


def _softmax_in_one(
    z_NP: Tensor, y_N: Tensor, weight_N: Tensor, smoothing: float, needs_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Does what `_softmax` does, by operations that become one kernel of a GPU."""
    logits_NP = z_NP.float()
    best_N1, best_pdf_N = logits_NP.amax(1, keepdim=True), logits_NP.argmax(1)
    target_NP = torch.arange(z_NP.shape[1], device=z_NP.device) == y_N[:, None]
    odds_NP = (logits_NP - best_N1).exp()
    sum_N1 = odds_NP.sum(1, keepdim=True)
    wanted_N = torch.where(target_NP, logits_NP, 0.0).sum(1)
    if smoothing:
        wanted_N = (1 - smoothing) * wanted_N + smoothing * logits_NP.mean(1)
    if needs_gradient:
        wanted_NP = (1 - smoothing) * target_NP + smoothing / z_NP.shape[1]
        z_NP.copy_((odds_NP / sum_N1 - wanted_NP) * weight_N[:, None])
    loss_N = sum_N1.log()[:, 0] + best_N1[:, 0] - wanted_N
    return (loss_N * weight_N).sum(), ((best_pdf_N == y_N) * weight_N).sum()


class _CompiledSoftmax:
    """`_softmax_in_one`, compiled for any number of frames, or `_softmax` where torch cannot compile."""

    def __init__(self) -> None:
        # one thread: processes that compile would each load torch
        self._compiled = torch.compile(_softmax_in_one, options={"compile_threads": 1})
        self._works = True

    def __call__(
        self, z_NP: Tensor, y_N: Tensor, weight_N: Tensor, smoothing: float, needs_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        if self._works:
            for tensor in (z_NP, y_N, weight_N):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            try:
                result: tuple[Tensor, Tensor] = self._compiled(z_NP, y_N, weight_N, smoothing, needs_gradient)
                return result
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
                self._works = False
                reason = str(error).strip().split("\n")[0]
                log.warning("torch.compile fails (%s): output layer and loss take twice as long on this GPU", reason)
        return _softmax(z_NP, y_N, weight_N, smoothing, needs_gradient)


_compiled_softmax = cache(_CompiledSoftmax)


def _argmax(x_NP: Tensor) -> Tensor:
    """NumPy's argmax is four times as fast as torch's on a CPU."""
    return torch.from_numpy(x_NP.numpy().argmax(1)) if x_NP.device.type == "cpu" else x_NP.argmax(1)
