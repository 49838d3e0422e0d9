"""Compares training speed of our model with the plain PyTorch one: frames/s, ratio, share of the GEMM rate.

    python scripts/bench/train.py [--threads N] [--steps N] [--size small|medium|swb2000 ...] [--dtype ...]

A step is forward, cross-entropy, number of correct frames, backward and momentum SGD on a batch of random 21-frame
chunks, one in twelve of which is padded. "plain" is nn.LSTM (packed, to leave padding out) + two linear layers +
cross_entropy + argmax. "plain, no padding" does the same on full chunks without packing. "ours, loss apart" has our
LSTM, and computes all logits before the loss. All variants take turns. Prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.train.frame_loss import CACHED, batch_loss

CHUNK = 21
SIZES = {  # layers, cells, inputs, outputs, chunks of a batch
    "small": (2, 128, 120, 1000, 256),
    "medium": (3, 256, 120, 2000, 256),
    "swb2000": (6, 512, 260, 32000, 128),
}


class Plain(nn.Module):
    """The same model made of nn.LSTM."""

    def __init__(self, layers: int, cells: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, cells, layers, bidirectional=True, batch_first=True)
        self.projection, self.output = nn.Linear(2 * cells, 256), nn.Linear(256, outputs)

    def forward(self, x_BTF: Tensor, lengths_B: Tensor | None) -> Tensor:
        if lengths_B is None:
            return self.output(self.projection(self.lstm(x_BTF)[0]))
        packed = pack_padded_sequence(x_BTF, lengths_B, batch_first=True, enforce_sorted=False)
        h_BTH = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=CHUNK)[0]
        return self.output(self.projection(h_BTH))


Loss = Callable[[nn.Module, Tensor, Tensor | None, Tensor, torch.dtype], tuple[Tensor, Tensor]]


def loss_of_logits(
    model: nn.Module, x_BTF: Tensor, lengths_B: Tensor | None, targets_BT: Tensor, dtype: torch.dtype,
    logits: int = 2**40,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns loss and number of correct frames, with `logits` logits at a time in the loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits_NP = model(x_BTF, lengths_B).flatten(0, 1)
    y_N, frames = targets_BT.flatten(), max(logits // logits_NP.shape[1], 1)
    losses = [
        functional.cross_entropy(z_NP.float(), part_N, reduction="sum")
        for z_NP, part_N in zip(logits_NP.split(frames), y_N.split(frames), strict=True)
    ]
    return torch.stack(losses).sum(), (logits_NP.detach().argmax(1) == y_N).sum()


def steps_of(
    model: nn.Module, loss: Loss, x_BTF: Tensor, targets_BT: Tensor, lengths_B: Tensor | None, dtype: torch.dtype
) -> Callable[[], None]:
    params = FlatParams(model)
    optimizer = Optimizer(params, OptimizerOptions())
    optimizer.lr = 0.01
    frames = int((targets_BT >= 0).sum())

    def step() -> None:
        params.g.zero_()
        loss_sum, _ = loss(model, x_BTF, lengths_B, targets_BT, dtype)
        (loss_sum / frames).backward()
        optimizer.step()

    return step


def gemm_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """Returns floating-point operations per second of a large matrix product."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def operations_per_frame(layers: int, cells: int, inputs: int, outputs: int) -> float:
    """Returns the operations of forward and backward (three products of the same size) per frame."""
    widths = [inputs] + [2 * cells] * (layers - 1)
    weights = sum(2 * 4 * cells * (width + cells) for width in widths) + 2 * cells * 256 + 256 * outputs
    return 6.0 * weights


def measure(size: str, steps: int, dtype: str) -> None:
    layers, cells, inputs, outputs, batch = SIZES[size]
    torch.manual_seed(0)
    x_BTF = torch.randn(batch, CHUNK, inputs)
    lengths_B = torch.full((batch,), CHUNK)
    lengths_B[: batch // 12] = torch.randint(1, CHUNK, (batch // 12,))
    full_BT = torch.randint(0, outputs, (batch, CHUNK))
    targets_BT = full_BT.masked_fill(torch.arange(CHUNK) >= lengths_B[:, None], -100)
    shape = (layers, cells, inputs, outputs)
    kind, options = getattr(torch, dtype), BlstmOptions(layers, cells, 256)
    ours, apart = Blstm(options, inputs, outputs), Blstm(options, inputs, outputs)
    parts: Loss = partial(loss_of_logits, logits=CACHED)
    variants = {
        "ours": steps_of(ours, batch_loss, x_BTF, targets_BT, lengths_B, kind),  # type: ignore[arg-type]
        "ours, loss apart": steps_of(apart, parts, x_BTF, targets_BT, lengths_B, kind),
        "plain": steps_of(Plain(*shape), loss_of_logits, x_BTF, targets_BT, lengths_B, kind),
        "plain, no padding": steps_of(Plain(*shape), loss_of_logits, x_BTF, full_BT, None, kind),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for trial in range(steps + 1):
        for name, step in variants.items():
            start = time.perf_counter()
            step()
            if trial:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    rate = gemm_rate(kind)
    frames = {name: int(lengths_B.sum()) if name != "plain, no padding" else batch * CHUNK for name in variants}
    speed = {name: frames[name] / statistics.median(times) for name, times in seconds.items()}
    print(f"{size} {dtype}: {layers}x{cells}, {inputs} in, {outputs} out, batch {batch}; GEMM {rate / 1e9:.0f} GFLOP/s")
    for name, value in speed.items():
        share = value * operations_per_frame(*shape) / rate
        print(f"  {name:18} {value:9,.0f} frames/s, {share:4.0%} of GEMM, ours is {speed['ours'] / value:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["small", "medium"])
    parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for size in arguments.size:
        for dtype in arguments.dtype:
            measure(size, arguments.steps, dtype)


if __name__ == "__main__":
    main()
