"""Section `speed`: frames/s of the paper's model beside plain eager PyTorch, with phases and peak memory.

Pencil limit: a frame of the paper's model (6 x 512, 260 inputs, 32,000 outputs) takes 258 MFLOP forward and backward,
and 790 TFLOP/s are 3.06 M frames/s. IBM's fastest published system, 128 V100, needs 1.62 M.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.egs.loader import Batch
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.train.frame_loss import frame_loss
from asr_am.train.gradient import ModelState
from asr_am.train.train_options import TrainOptions
from scripts.bench.train import CHUNK, SIZES, Plain, operations_per_frame
from scripts.gpu_check.check import Check
from scripts.gpu_check.versions import seconds

LEAST, RATIO = 1.4e6, 3.0  # frames/s of the largest batch, and times plain eager TF32
BATCHES = (128, 256, 512, 1024, 2560)


@dataclass(frozen=True)
class Chunks:
    """A batch of full chunks on the device."""

    x_BTF: Tensor
    targets_BT: Tensor
    lengths_B: Tensor

    @classmethod
    def random(cls, check: Check, batch: int, inputs: int, outputs: int) -> Chunks:
        x_BTF = torch.randn(batch, CHUNK, inputs, device=check.device)
        targets_BT = torch.randint(0, outputs, (batch, CHUNK), device=check.device)
        return cls(x_BTF, targets_BT, torch.full((batch,), CHUNK))

    @property
    def frames(self) -> int:
        return self.targets_BT.numel()


def section(check: Check) -> None:
    shape = (1, 8, 12, 50) if check.small else SIZES["swb2000"][:4]
    batches = (2, 4) if check.small else BATCHES
    found = {}
    for batch in batches:
        chunks = Chunks.random(check, batch, shape[2], shape[3])
        found[batch] = rate = measure(check, our_step(check, shape, chunks, "bfloat16"), chunks)
        alone = measure(check, our_step(check, shape, chunks, "bfloat16", graph=False), chunks)
        share = rate * operations_per_frame(*shape) / 1e12
        check.row(
            f"ours, bfloat16, {batch} chunks",
            None,
            f"{rate:,.0f} frames/s, {share:.3g} TFLOP/s, by kernels {alone:,.0f}{memory(check)}",
            rate=rate,
            by_kernels=alone,
        )
    phases(check, shape, chunks)
    plain = {}
    for name in ("TF32", "float16", "bfloat16") if check.device == "cuda" else ("TF32", "bfloat16"):
        try:
            plain[name] = measure(check, plain_step(check, shape, chunks, name), chunks)
        except RuntimeError as error:
            if check.device == "cuda" or name == "TF32":
                raise
            # oneDNN has no LSTM in bfloat16 for a CPU without AVX-512
            check.row(f"plain, {name}, {batch} chunks", None, f"not on this CPU: {error}")
            continue
        check.row(
            f"plain, {name}, {batch} chunks", None, f"{plain[name]:,.0f} frames/s{memory(check)}", rate=plain[name]
        )
    torch.backends.cuda.matmul.allow_tf32 = True
    rate = measure(check, our_step(check, shape, chunks, "float32"), chunks)
    check.row(f"ours, TF32, {batch} chunks", None, f"{rate:,.0f} frames/s{memory(check)}", rate=rate)
    limits = check.device == "cuda" and not check.small
    best, ratio = found[batch], found[batch] / plain["TF32"]
    check.row("frames/s of the largest batch", best >= LEAST if limits else None, f"{best:,.0f}, needs {LEAST:,.0f}")
    check.row("ours / plain TF32", ratio >= RATIO if limits else None, f"{ratio:.2f}, needs {RATIO:g}", ratio=ratio)


Shape = tuple[int, int, int, int]  # layers, cells, inputs, outputs
Precision = Literal["float32", "bfloat16"]


def our_step(
    check: Check, shape: Shape, chunks: Chunks, precision: Precision, graph: bool = True
) -> Callable[[], None]:
    """Returns a step of training: gradient and update."""
    inputs, outputs = shape[2:]
    options = TrainOptions(model=BlstmOptions(shape[0], shape[1], 256), precision=precision, device=check.device)
    model = options.model.make(inputs, outputs).to(check.device)
    params = FlatParams(model)
    optimizer = Optimizer(params, OptimizerOptions())
    optimizer.lr = 0.01
    loader: Any = SimpleNamespace(batch_size=len(chunks.lengths_B))
    state = ModelState(model, params, optimizer, loader, options, torch.device(check.device), makes_graph=graph)
    batch = Batch(0, chunks.x_BTF, chunks.targets_BT, chunks.lengths_B, np.zeros(len(chunks.lengths_B), np.int64))

    def step() -> None:
        state.backward(batch, chunks.frames, None)
        optimizer.step()

    return step


def plain_step(check: Check, shape: Shape, chunks: Chunks, name: str) -> Callable[[], None]:
    """Returns a step of nn.LSTM, two linear layers, cross-entropy, argmax and torch's SGD under autocast."""
    torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
    model: nn.Module = Plain(*shape).to(check.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    cast = nullcontext() if name == "TF32" else torch.autocast(check.device, getattr(torch, name))
    scaler = torch.amp.GradScaler(check.device, enabled=name == "float16" and check.device == "cuda")
    targets_N = chunks.targets_BT.flatten()

    def step() -> None:
        optimizer.zero_grad()
        with cast:
            logits_NP = model(chunks.x_BTF, None).flatten(0, 1)
            loss = functional.cross_entropy(logits_NP, targets_N)
        (logits_NP.detach().argmax(1) == targets_N).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def measure(check: Check, step: Callable[[], None], chunks: Chunks) -> float:
    """Returns frames/s."""
    gc.collect()
    if check.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return chunks.frames / seconds(check, step, 2 if check.small else 10)


def memory(check: Check) -> str:
    return f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if check.device == "cuda" else ""


def phases(check: Check, shape: Shape, chunks: Chunks) -> None:
    """Measures the parts of a step in bfloat16, each without the others."""
    model = Blstm(BlstmOptions(shape[0], shape[1], 256), shape[2], shape[3]).to(check.device)
    params = FlatParams(model)
    optimizer = Optimizer(params, OptimizerOptions())
    hidden = model.hidden(chunks.x_BTF, chunks.lengths_B, torch.bfloat16)
    gradient = torch.randn_like(hidden)

    def loss() -> None:
        frame_loss(hidden.detach().requires_grad_(), model.output, chunks.targets_BT)[0].backward()

    repeats = 2 if check.small else 10
    forward = seconds(check, lambda: model.hidden(chunks.x_BTF, chunks.lengths_B, torch.bfloat16), repeats)
    both = seconds(
        check, lambda: model.hidden(chunks.x_BTF, chunks.lengths_B, torch.bfloat16).backward(gradient), repeats
    )
    parts = {"LSTM forward": forward, "backward": both - forward}
    parts |= {"output layer and loss": seconds(check, loss, repeats), "update": seconds(check, optimizer.step, repeats)}
    text = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in parts.items())
    check.row("ours, bfloat16, ms", None, text, parts=parts)
