"""A bidirectional LSTM layer that is faster on a CPU than `nn.LSTM` on packed sequences.

Three implementations share the parameter names and shapes of `nn.LSTM`. scripts/bench/train.py compares them.

    GPU              cuDNN, without packing, which would wait for the GPU a dozen times a layer. A column of the input
                     closes the input gates in padding, so that the backward direction reaches a sequence's last frame
                     with a state of 0.
    CPU, float32     oneDNN, without packing. Each sequence is reversed within its own length, so that padding comes
                     last in both directions.
    CPU, otherwise   Batched matrix products over both directions, with the backward pass written out. The input
                     projection of all steps is one product, and so are the gradients of all weights.

Shapes: T frames, B sequences, I inputs, H cells of one direction, G = 4 H gates (input, forget, cell, output), C added
columns, D = 2 directions. Tensors with D are in the order of computation: direction 1 goes from the last frame to the
first, so its step s is frame T - 1 - s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten
CLOSED = -1e4  # input of a gate whose sigmoid is 0
WIDTH = 64  # inputs on a GPU are a multiple: on an H200 a layer of 260 takes a fifth longer than one of 320


class BiLSTM(nn.LSTM):
    """Bidirectional layer that maps x_TBI and lengths_B to y_TB(2H). Frames past a sequence's length are ignored."""

    def __init__(self, inputs: int, cells: int) -> None:
        super().__init__(inputs, cells, bidirectional=True)

    def reset_parameters(self) -> None:
        reset_lstm(self)

    def forward(  # type: ignore[override]
        self, x_TBI: Tensor, lengths_B: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns outputs of `dtype`, in which the layer computes. None: that of the inputs."""
        dtype = dtype or x_TBI.dtype
        if x_TBI.device.type != "cpu":
            return cudnn_lstm(x_TBI, self.all_weights, dtype, self.training, lengths_B)
        if dtype == torch.float32:
            return self._onednn(x_TBI, lengths_B)
        forward, backward = (dict(zip("WUbc", weights, strict=True)) for weights in self.all_weights)
        W_DGI, U_DGH = (torch.stack([forward[name], backward[name]]).to(dtype) for name in "WU")
        b_DG = torch.stack([forward["b"] + forward["c"], backward["b"] + backward["c"]]).to(dtype)
        return _BiLSTM.apply(x_TBI.to(dtype), W_DGI, U_DGH, b_DG, _padding_mask(lengths_B, len(x_TBI), dtype))

    def _onednn(self, x_TBI: Tensor, lengths_B: Tensor | None) -> Tensor:
        reversed_TB = _reversed_frames(lengths_B, *x_TBI.shape[:2])
        y_TBH, z_TBH = (
            run_lstm(h_TBI, weights, torch.float32, self.training)
            for h_TBI, weights in zip((x_TBI, _reorder(x_TBI, reversed_TB)), self.all_weights, strict=True)
        )
        return torch.cat([y_TBH, _reorder(z_TBH, reversed_TB)], dim=2)


def cudnn_lstm(
    x_TBI: Tensor, all_weights: Sequence[Sequence[Tensor]], dtype: torch.dtype, training: bool,
    lengths_B: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the outputs of an LSTM layer as a GPU should compute them.

    Args:
        x_TBI: inputs.
        all_weights: as of `nn.LSTM`, for one or both directions.
        dtype: of the computation.
        training: whether a backward pass follows.
        lengths_B: frames of each sequence, None: all T.
    """
    frames, batch, inputs = x_TBI.shape
    # lengths on the GPU are those of a CUDA graph, which cannot ask
    padded = lengths_B is not None and (lengths_B.device.type != "cpu" or int(lengths_B.min()) < frames)
    columns = padded + -(inputs + padded) % WIDTH
    columns_TBC = x_TBI.new_zeros(frames, batch, columns, dtype=dtype)
    if padded:
        assert lengths_B is not None
        frame_T1 = torch.arange(frames, device=x_TBI.device)[:, None]
        columns_TBC[..., 0] = frame_T1 >= lengths_B.to(x_TBI.device, non_blocking=True)
    weights = []
    for W_GI, *others in all_weights:
        close_GC = W_GI.new_zeros(len(W_GI), columns)
        close_GC[: len(W_GI) // 4, :1] = CLOSED
        weights.append([torch.cat([W_GI, close_GC], dim=1), *others])
    return run_lstm(torch.cat([x_TBI.to(dtype), columns_TBC], dim=2), _in_one(weights, dtype), dtype, training)


def _in_one(weights: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Returns the weights of each direction as parts of one tensor, in the order of cuDNN, which would copy others.

    It has the matrices of both directions first, and then the biases.
    """
    ordered = [w for direction in weights for w in direction[:2]] + [w for direction in weights for w in direction[2:]]
    flat = torch.cat([w.reshape(-1) for w in ordered]).to(dtype)
    parts = flat.split([w.numel() for w in ordered])
    views = [part.view_as(w) for part, w in zip(parts, ordered, strict=True)]
    half = len(views) // 2
    return [w for k in range(0, half, 2) for first in (k, half + k) for w in views[first : first + 2]]


def run_lstm(x_TBI: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, training: bool) -> Tensor:
    """Returns the outputs of torch's LSTM of one layer that starts from a state of 0.

    Not by autocast: on a GPU that computes an LSTM in float16 whatever dtype it is set to. Most gradients are subnormal
    there unless the loss is scaled. cuDNN computes in bfloat16 from version 9.13 on.

    Args:
        x_TBI: inputs.
        weights: input weights, recurrent weights and two biases, for each direction.
        dtype: of the computation.
        training: whether a backward pass follows.
    """
    directions = len(weights) // 4
    zeros_DBH = x_TBI.new_zeros(directions, x_TBI.shape[1], weights[1].shape[1], dtype=dtype)
    return torch.lstm(
        x_TBI.to(dtype), (zeros_DBH, zeros_DBH), [w.to(dtype) for w in weights], True, 1, 0.0, training,
        directions == 2, False,
    )[0]  # fmt: skip


def reset_lstm(lstm: nn.LSTM) -> None:
    """Initialises input weights Glorot-uniform, recurrent ones orthogonal, biases 0, that of the forget gate 1."""
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight_ih"):
            for gate in parameter.data.chunk(4):
                nn.init.xavier_uniform_(gate)
        elif name.startswith("weight_hh"):
            for gate in parameter.data.chunk(4):
                nn.init.orthogonal_(gate)
        else:
            nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):
                nn.init.ones_(parameter.data.chunk(4)[1])


def _reversed_frames(lengths_B: Tensor | None, frames: int, batch: int) -> Tensor:
    """Returns frame indices [T, B] that reverse each sequence and leave its padding in place."""
    frame_T1 = torch.arange(frames)[:, None]
    lengths_B = torch.full((batch,), frames) if lengths_B is None else lengths_B
    return torch.where(frame_T1 < lengths_B, lengths_B - 1 - frame_T1, frame_T1)


def _reorder(x_TBI: Tensor, frame_TB: Tensor) -> Tensor:
    return x_TBI.gather(0, frame_TB[..., None].expand_as(x_TBI))


def _padding_mask(lengths_B: Tensor | None, frames: int, dtype: torch.dtype) -> Tensor | None:
    """Returns a mask [S, B, 1] of the first S steps of the backward direction: 1 for a frame, 0 for padding."""
    if lengths_B is None or not len(lengths_B) or (shortest := int(lengths_B.min())) >= frames:
        return None
    frame_S = torch.arange(frames - 1, shortest - 1, -1)
    return (frame_S[:, None] < lengths_B[None]).to(dtype)[..., None]


class _BiLSTM(torch.autograd.Function):
    """LSTM (Hochreiter and Schmidhuber) with a forget gate, both directions at once."""

    @staticmethod
    def forward(ctx: Any, x_TBI: Tensor, W_DGI: Tensor, U_DGH: Tensor, b_DG: Tensor, keep_SB1: Tensor | None) -> Tensor:
        frames, batch, inputs = x_TBI.shape
        cells = U_DGH.shape[2]
        x_DTBI = torch.stack([x_TBI, x_TBI.flip(0)])
        gates_DTBG = torch.baddbmm(b_DG[:, None], x_DTBI.view(2, -1, inputs), W_DGI.mT).view(2, frames, batch, -1)
        h_DTBH = x_TBI.new_zeros(2, frames + 1, batch, cells)  # entry s is the state before step s
        c_DTBH = torch.zeros_like(h_DTBH)
        tanh_DTBH = torch.empty_like(h_DTBH[:, 1:])
        for s in range(frames):
            gates_DBG = gates_DTBG[:, s]
            if s:
                gates_DBG.baddbmm_(h_DTBH[:, s], U_DGH.mT)
            i, f, g, o = gates_DBG.split(cells, 2)
            gates_DBG[..., : 2 * cells].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            c, t, h = c_DTBH[:, s + 1], tanh_DTBH[:, s], h_DTBH[:, s + 1]
            torch.mul(f, c_DTBH[:, s], out=c).addcmul_(i, g)
            if keep_SB1 is not None and s < len(keep_SB1):
                c[1].mul_(keep_SB1[s])
            torch.tanh(c, out=t)
            torch.mul(o, t, out=h)
        ctx.save_for_backward(x_DTBI, W_DGI, U_DGH, gates_DTBG, h_DTBH, c_DTBH, tanh_DTBH, keep_SB1)
        return torch.cat([h_DTBH[0, 1:], h_DTBH[1, 1:].flip(0)], dim=2)

    @staticmethod
    def backward(ctx: Any, dy_TBK: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_DTBI, W_DGI, U_DGH, gates_DTBG, h_DTBH, c_DTBH, tanh_DTBH, keep_SB1 = ctx.saved_tensors
        frames, batch, cells = tanh_DTBH.shape[1:]
        da_DTBG = torch.empty_like(gates_DTBG)  # gradient at the gates, before their non-linearities
        dy_DTBH = torch.stack([dy_TBK[..., :cells], dy_TBK[..., cells:].flip(0)])
        dh, dc = dy_DTBH[:, frames - 1], torch.zeros_like(h_DTBH[:, 0])
        product = torch.empty_like(dc)
        for s in range(frames - 1, -1, -1):
            i, f, g, o = gates_DTBG[:, s].split(cells, 2)
            da = da_DTBG[:, s]
            di, df, dg, do = da.split(cells, 2)
            t = tanh_DTBH[:, s]
            torch.mul(dh, o, out=product)
            dc.add_(aten.tanh_backward(product, t))
            if keep_SB1 is not None and s < len(keep_SB1):
                dc[1].mul_(keep_SB1[s])
            aten.sigmoid_backward(torch.mul(dh, t, out=product), o, grad_input=do)
            aten.sigmoid_backward(torch.mul(dc, g, out=product), i, grad_input=di)
            aten.tanh_backward(torch.mul(dc, i, out=product), g, grad_input=dg)
            aten.sigmoid_backward(torch.mul(dc, c_DTBH[:, s], out=product), f, grad_input=df)
            dc.mul_(f)
            if s:
                dh = torch.baddbmm(dy_DTBH[:, s - 1], da, U_DGH)
        return *_weight_gradients(da_DTBG.view(2, frames * batch, -1), x_DTBI, W_DGI, h_DTBH[:, :-1]), None


def _weight_gradients(da_DNG: Tensor, x_DTBI: Tensor, W_DGI: Tensor, h_DTBH: Tensor) -> tuple[Tensor, ...]:
    """Returns gradients of input, W, U and b, given that of the gates over all N = T x B steps."""
    dx_DTBI = torch.bmm(da_DNG, W_DGI).view_as(x_DTBI)
    dW_DGI = torch.bmm(da_DNG.mT, x_DTBI.flatten(1, 2))
    dU_DGH = torch.bmm(da_DNG.mT, h_DTBH.flatten(1, 2))
    return dx_DTBI[0] + dx_DTBI[1].flip(0), dW_DGI, dU_DGH, da_DNG.sum(1)
