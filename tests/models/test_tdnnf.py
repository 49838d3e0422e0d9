"""TDNN-F beside the paper's equations, computed frame by frame."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from asr_am.models.tdnnf import Factorised, Tdnnf, TdnnfOptions, semi_orthogonal

SIZES = {"near_layers": 1, "far_layers": 2, "width": 12, "bottleneck": 4, "projection": 5}


def make(**options: object) -> Tdnnf:
    torch.manual_seed(0)
    model = Tdnnf(TdnnfOptions(**(SIZES | options)), inputs=6, outputs=11)  # type: ignore[arg-type]
    model.set_normalisation(torch.arange(6.0), torch.arange(1.0, 7.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def updated(M: Tensor, times: int = 200) -> Tensor:
    """Equations (1) to (4) of Povey et al. (Interspeech 2018), as they stand."""
    for _ in range(times):
        P = M @ M.T
        squared_scale = torch.trace(P @ P.T) / torch.trace(P)
        M = M - (P - squared_scale * torch.eye(len(M), dtype=M.dtype)) @ M / (2 * squared_scale)
    return M


def normal(h: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    return (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt() * norm.weight + norm.bias


def factorised(layer: Factorised, h_TH: list[Tensor], stride: int) -> list[Tensor]:
    nothing, M = torch.zeros_like(h_TH[0]), updated(layer.linear.weight, 5)
    A, b = layer.affine.weight, layer.affine.bias
    if stride == 0:
        z_TN = [M @ h for h in h_TH]
        y_TH = [A @ z + b for z in z_TN]
    else:
        z_TN = [M @ torch.cat([h_TH[t - stride] if t >= stride else nothing, h]) for t, h in enumerate(h_TH)]
        after = [*z_TN[stride:], *[torch.zeros_like(z_TN[0])] * stride]
        y_TH = [A @ torch.cat([z, later]) + b for z, later in zip(z_TN, after, strict=False)]
    return [0.66 * h + normal(y.relu(), layer.norm) for h, y in zip(h_TH, y_TH, strict=True)]


def reference(model: Tdnnf, x_TF: Tensor, subsampling: int) -> Tensor:
    """Logits of one utterance."""
    x_TF = (x_TF - torch.arange(6.0)) / torch.arange(1.0, 7.0)
    around = torch.cat([torch.zeros(1, 6), x_TF, torch.zeros(1, 6)])
    h_TH = [
        normal((model.first.weight @ around[t : t + 3].flatten() + model.first.bias).relu(), model.norm)
        for t in range(len(x_TF))
    ]
    h_TH = factorised(model.near[0], h_TH, 1)  # type: ignore[arg-type]
    if subsampling == 3:
        h_TH = [h_TH[min(t + 1, len(h_TH) - 1)] for t in range(0, len(h_TH), 3)]
    h_TH = factorised(model.middle, h_TH, 0)
    for layer in model.far:
        h_TH = factorised(layer, h_TH, 3 // subsampling)  # type: ignore[arg-type]
    last = model.prefinal
    logits = []
    for h in h_TH:
        wide = (last.expand.weight @ (updated(last.reduce.weight, 5) @ h) + last.expand.bias).relu()
        narrow = updated(last.linear.weight, 5) @ normal(wide, last.wide_norm)
        logits.append(model.output.weight @ normal(narrow, last.norm) + model.output.bias)
    return torch.stack(logits)


def test_logits_are_those_of_the_equations_at_both_rates() -> None:
    for subsampling in (1, 3):
        model = make(subsampling=subsampling)
        for frames in (1, 2, 3, 14, 15, 16):
            x_TF = torch.randn(frames, 6)
            expected = reference(deepcopy(model).double(), x_TF.double(), subsampling)
            torch.testing.assert_close(model(x_TF[None])[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_the_matrix_is_semi_orthogonal_and_close_to_the_weights() -> None:
    """Against the paper's update, repeated until nothing changes, for singular values from .3 to 1.7."""
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, 4, dtype=torch.float64))[0] for n in (4, 9))
    M = 2 * U @ torch.diag(torch.tensor([0.3, 0.7, 1.0, 1.7], dtype=torch.float64)) @ V.T
    W = semi_orthogonal(M)
    P = W @ W.T
    torch.testing.assert_close(P / P[0, 0], torch.eye(4, dtype=torch.float64), atol=0.05, rtol=0)
    torch.testing.assert_close(W / W.norm(), updated(M) / updated(M).norm(), atol=0.02, rtol=0)
    torch.testing.assert_close(W / W.norm(), U @ V.T / 2, atol=0.02, rtol=0)
    torch.testing.assert_close(semi_orthogonal(M.T), W.T)


def test_a_mean_of_models_is_semi_orthogonal() -> None:
    """As strategies average weights. The mean of two semi-orthogonal matrices is none."""
    a, b = (torch.nn.init.orthogonal_(torch.empty(4, 24), generator=torch.Generator().manual_seed(k)) for k in (1, 2))
    for M, constrained in (((a + b) / 2, False), (semi_orthogonal((a + b) / 2), True)):
        P = M @ M.T
        assert torch.allclose(P, P[0, 0] * torch.eye(4), atol=0.02) == constrained


def test_dropout_is_the_same_in_all_frames() -> None:
    layer = Factorised(12, 4, 0.3, stride=0).train()
    h_BTH = torch.randn(2, 1, 12).expand(2, 5, 12)
    y_BTH = layer(h_BTH, None)
    torch.testing.assert_close(y_BTH, y_BTH[:, :1].expand_as(y_BTH))
    assert not torch.allclose(y_BTH, layer(h_BTH, None))
