"""Section `kernels`: each computation on the device against the same in float64 on the CPU."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import functional

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.strategies.threshold_codec import decode, encode
from asr_am.egs.loader import IGNORE
from asr_am.models.acoustic import AcousticModel
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.models.conformer import Conformer, ConformerOptions
from asr_am.models.lstm import Lstm, LstmOptions
from asr_am.models.tdnnf import Tdnnf, TdnnfOptions
from asr_am.train.chain_loss import add_xent
from asr_am.train.frame_loss import batch_loss, frame_loss
from scripts.gpu_check.check import Check
from scripts.gpu_check.examples import make_loss, random_graph

LIMIT = {torch.float32: 3e-3, torch.bfloat16: 3e-2}  # relative to the norm. TF32 has ten bits, bfloat16 seven


def section(check: Check) -> None:
    torch.manual_seed(0)
    layers, cells, frames, batch = (2, 16, 9, 12) if check.small else (3, 256, 21, 64)
    models: dict[str, AcousticModel] = {
        "LSTM": Blstm(BlstmOptions(layers, cells, cells), 40, 500),
        "look-ahead LSTM": Lstm(LstmOptions(layers, cells, 3), 40, 500),
        "Conformer": Conformer(ConformerOptions(layers, cells, feed_forward=2 * cells), 40, 500),
    }
    for name, model in models.items():
        for dtype in LIMIT:
            network(check, name, model, dtype, frames, batch)
    # not in bfloat16, in which the input of a ReLU may have another sign, and so the gradient another direction
    tdnnf = Tdnnf(TdnnfOptions(layers, layers, cells, cells // 4, cells), 40, 500)
    network(check, "TDNN-F", tdnnf, torch.float32, frames, batch)
    for dtype in LIMIT:
        output_layer(check, dtype)
    for name in ("MMI", "chain", "CTC"):
        sequence_loss(check, name)
    for kind in ("sgd", "nesterov", "adam"):
        optimizer(check, kind)
    compression(check)


def error(found: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference, relative to that of the exact value."""
    found = found.detach().cpu().double()
    return float(torch.linalg.vector_norm(found - exact) / torch.linalg.vector_norm(exact))


def network(check: Check, name: str, model: AcousticModel, dtype: torch.dtype, frames: int, batch: int) -> None:
    """Compares loss and gradient of padded chunks."""
    x_BTF, y_BT = torch.randn(batch, frames, 40), torch.randint(0, 500, (batch, frames))
    lengths_B = torch.randint(1, frames + 1, (batch,))
    lengths_B[0] = frames
    y_BT[torch.arange(frames) >= lengths_B[:, None]] = IGNORE
    results = []
    for device, kind in ((check.device, dtype), ("cpu", torch.float64)):
        own = deepcopy(model).to(device, torch.float64 if kind == torch.float64 else torch.float32)
        params = FlatParams(own)
        x, y = x_BTF.to(device, params.w.dtype), y_BT.to(device)
        if kind == torch.float64:
            logits = own.output(own.hidden(x, lengths_B, kind)).flatten(0, 1)
            loss = functional.cross_entropy(logits, y.flatten(), ignore_index=IGNORE, reduction="sum")
        else:
            loss, _ = batch_loss(own, x, lengths_B, y, kind)
        loss.backward()
        results.append((loss, params.g))
    (loss, g), (exact, exact_g) = results
    found = max(error(loss, exact), error(g, exact_g.detach()))
    check.row(
        f"{name}, {dtype}"[:34].replace("torch.", ""), found < LIMIT[dtype], f"relative error {found:.1e}", error=found
    )


def sequence_loss(check: Check, name: str) -> None:
    """Compares loss and gradient of a loss over paths with those on the CPU in float32."""
    pdfs, frames, batch = (20, 12, 4) if check.small else (600, 150, 32)
    graph = random_graph(pdfs, 5 * pdfs)
    tdnnf = TdnnfOptions(2, 1, 64, 16, 64, subsampling=1 if name == "MMI" else 3)
    model = tdnnf.make(40, pdfs)
    if name != "MMI":
        add_xent(model)
    x_BTF = torch.randn(batch, frames, 40)
    y_BT = torch.randint(0, pdfs, (batch, frames // 3)).repeat_interleave(3, 1)
    lengths_B = torch.randint(frames // 2, frames + 1, (batch,))
    lengths_B[0] = frames
    y_BT[torch.arange(frames) >= lengths_B[:, None]] = IGNORE
    results = []
    for device in (check.device, "cpu"):
        own, compute = deepcopy(model).to(device), make_loss(name, graph, device)
        params = FlatParams(own)
        loss, _ = compute(own, x_BTF.to(device), lengths_B, y_BT.to(device), torch.float32)
        loss.backward()
        results.append((loss, params.g))
        if device == check.device:
            again = params.g.clone()
            params.g.zero_()
            compute(own, x_BTF.to(device), lengths_B, y_BT.to(device), torch.float32)[0].backward()
            same = torch.equal(params.g, again)
    (loss, g), (exact, exact_g) = results
    found = max(error(loss, exact.detach().double()), error(g, exact_g.detach().double()))
    check.row(f"{name} loss, float32", found < LIMIT[torch.float32], f"relative error {found:.1e}", error=found)
    check.row(f"{name} loss, repeated", same, "same bits" if same else "other bits")


def output_layer(check: Check, dtype: torch.dtype) -> None:
    """Compares the loss of many outputs, computed in several parts on a GPU."""
    frames, outputs = (60, 500) if check.small else (20_000, 32_000)
    layer = torch.nn.Linear(32, outputs)
    h, y = torch.randn(1, frames, 32), torch.randint(0, outputs, (1, frames))
    y[0, ::7] = IGNORE
    own = deepcopy(layer).to(check.device)
    h_own = h.to(check.device, dtype, copy=True).requires_grad_()
    loss, correct = frame_loss(h_own, own, y.to(check.device))
    loss.backward()
    exact = deepcopy(layer).to(check.device, torch.float64)  # 5 GB of logits: not on the CPU
    h_exact = h.to(check.device, torch.float64, copy=True).requires_grad_()
    logits = exact(h_exact).flatten(0, 1)
    exact_loss = functional.cross_entropy(logits, y.flatten().to(check.device), ignore_index=IGNORE, reduction="sum")
    exact_loss.backward()
    pairs = [(loss, exact_loss), (h_own.grad, h_exact.grad), (own.weight.grad, exact.weight.grad)]
    found = max(error(a, b.detach().cpu().double()) for a, b in pairs)  # type: ignore[union-attr,arg-type]
    right = int((logits.argmax(1) == y.flatten().to(check.device)).sum())
    close = abs(float(correct) - right) <= 0.01 * frames
    name = f"loss of {outputs:,} outputs, {dtype}".replace("torch.", "")
    check.row(name, found < LIMIT[dtype] and close, f"relative error {found:.1e}", error=found)


def optimizer(check: Check, kind: str) -> None:
    """Compares five clipped steps."""
    size = 1000 if check.small else 1_000_000
    w, gradients = torch.randn(size), [torch.randn(size) for _ in range(5)]
    results = []
    for device, dtype in ((check.device, torch.float32), ("cpu", torch.float64)):
        layer = torch.nn.Linear(size, 1, bias=False).to(device, dtype)
        params = FlatParams(layer)
        params.w.copy_(w)
        rule = Optimizer(params, OptimizerOptions(kind, 0.9, 0.01, clip_norm=5.0))  # type: ignore[arg-type]
        rule.lr = 0.1
        for gradient in gradients:
            params.g.copy_(gradient)
            rule.step()
        results.append(params.w.detach())
    found = error(results[0], results[1])
    check.row(f"optimizer {kind}", found < 1e-5, f"relative error {found:.1e}", error=found)


def compression(check: Check) -> None:
    """Compares words and residuals of gradient compression, bit by bit."""
    size = 1000 if check.small else 4_000_000
    gradient, start = torch.randn(size), torch.randn(size)
    words, residuals, sums = [], [], []
    for device in (check.device, "cpu"):
        residual, into = start.to(device, copy=True), torch.zeros(size, device=device)
        packed = encode(residual, 2.0, gradient.to(device, copy=True))
        decode(torch.cat([packed, packed]), into, 0.25)
        words.append(packed.cpu())
        residuals.append(residual.cpu())
        sums.append(into.cpu())
    same = all(torch.equal(*pair) for pair in (words, residuals, sums))
    check.row("GTC: words, residuals, sums", same, "same bits" if same else "other bits", words=len(words[0]))
