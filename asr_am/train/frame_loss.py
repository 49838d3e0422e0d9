"""Output layer and cross-entropy in one: loss, correct frames and all gradients, a part of the frames at a time.

With 32,000 pdfs the logits of a batch of 2,560 chunks are 7 GB. Here only those of one part exist at a time. A part is
large enough for fast matrix products. On a CPU its softmax is computed a few frames at a time, in the caches. Gradients
are computed with the loss, so logits are neither kept nor computed twice.

Shapes: B chunks, T frames, F features, N = B x T frames, H inputs of the output layer, P pdfs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.egs.loader import IGNORE
from asr_am.models.acoustic import AcousticModel

CPU_PART, GPU_PART = 2**24, 2**28  # logits of a part: 64 MB and 1 GB in float32
CACHED = 2**19  # logits that a CPU's caches hold


def batch_loss(
    model: AcousticModel, x_BTF: Tensor, lengths_B: Tensor | None, targets_BT: Tensor,
    dtype: torch.dtype = torch.float32, smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the loss of a model on some chunks, as `frame_loss` does.

    Args:
        model: the network.
        x_BTF: features.
        lengths_B: frames of each chunk, None: all T.
        targets_BT: pdf of each frame, IGNORE in padding.
        dtype: of the matrix products, float32 or bfloat16. Weights and softmax are float32.
        smoothing: label smoothing.
    """
    return frame_loss(model.hidden(x_BTF, lengths_B, dtype), model.output, targets_BT, smoothing)


def frame_loss(h_BTH: Tensor, output: nn.Linear, targets_BT: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy and the number of correct frames, both summed over all frames but padding.

    Args:
        h_BTH: inputs of the output layer. Its matrix products have their dtype.
        output: the layer.
        targets_BT: pdf of each frame, IGNORE in padding.
        smoothing: label smoothing.

    Returns:
        Loss in nats, a scalar with a gradient, and the number of frames whose best pdf is the target.
    """
    loss, correct = _FrameLoss.apply(
        h_BTH.flatten(0, 1), output.weight, output.bias, targets_BT.flatten(), smoothing, torch.is_grad_enabled()
    )
    return loss, correct


class _FrameLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_NH: Tensor, W_PH: Tensor, b_P: Tensor, y_N: Tensor, smoothing: float, needs_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        W, b = W_PH.to(h_NH.dtype), b_P.to(h_NH.dtype)
        loss, correct = h_NH.new_zeros((), dtype=torch.float32), h_NH.new_zeros((), dtype=torch.float32)
        on_cpu = h_NH.device.type == "cpu"
        frames = max((CPU_PART if on_cpu else GPU_PART) // len(W), 1)
        if needs_gradient:
            dh_NH, dW_PH, db_P = torch.empty_like(h_NH), torch.zeros_like(W_PH), torch.zeros_like(b_P)
            ctx.save_for_backward(dh_NH, dW_PH, db_P)
        for first in range(0, len(h_NH), frames):
            h, y = h_NH[first : first + frames], y_N[first : first + frames]
            z = functional.linear(h, W, b)
            rows = max(CACHED // len(W), 1) if on_cpu else len(z)
            for z_rows, y_rows in zip(z.split(rows), y.split(rows), strict=True):
                loss_rows, correct_rows = _softmax(z_rows, y_rows, smoothing, needs_gradient)
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
        return dh_NH * dloss.to(dh_NH.dtype), dW_PH * dloss, db_P * dloss, None, None, None


def _softmax(z_NP: Tensor, y_N: Tensor, smoothing: float, needs_gradient: bool) -> tuple[Tensor, Tensor]:
    """Returns summed loss and correct frames of some logits, and replaces these by their gradient if it is needed."""
    logits_NP = z_NP.float()
    best_N = _argmax(logits_NP)
    known_N = y_N != IGNORE
    target_N1 = torch.where(known_N, y_N, 0)[:, None]
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
        p_NP *= known_N[:, None]
        z_NP.copy_(p_NP)
    return ((normaliser_N1 - wanted_N1)[:, 0] * known_N).sum(), (best_N == y_N).sum()


def _argmax(x_NP: Tensor) -> Tensor:
    """NumPy's argmax is four times as fast as torch's on a CPU."""
    return torch.from_numpy(x_NP.numpy().argmax(1)) if x_NP.device.type == "cpu" else x_NP.argmax(1)
