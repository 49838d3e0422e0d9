"""Compares a step of `sync` with torch's DistributedDataParallel: same model, batches, update, processes, group (gloo).

    python scripts/bench/sync_step.py [--learners 2] [--size small|medium] [--steps 3] [--rounds 60]

A step is forward, cross-entropy, backward overlapped with averaging of the gradients, and momentum SGD, on a batch of
random 21-frame chunks in bfloat16. In each round all variants take turns of `--steps` steps, in reverse order every
other time. All must end with the same weights. DDP is measured with its default buckets (25 MB, the first one 1 MB) and
with ours (4 MB), both with gradients as views of the buckets, which saves it a copy. Prints ms per step, then the
median over the rounds of the ratio to DDP, for the buckets with the larger ratio. Exits with 1 if it is above 1.05.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Lease, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.runtime.connect import connect
from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.team import ProcessTeam
from asr_am.distributed.strategies.sync import Sync
from asr_am.models.blstm import Blstm, BlstmOptions

CHUNK, INPUTS, RATE = 21, 120, 0.01
SIZES = {"small": (2, 128, 1000, 32), "medium": (3, 256, 2000, 32)}  # layers, cells, outputs, chunks of a batch
TARGET = 1.05

Step = Callable[[Tensor, Tensor], None]  # features [B, T, F], targets [B, T]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # for a learner: where to write its results
    options = parser.parse_args()
    if options.results is not None:
        learner(options.size, options.steps, options.rounds, options.results)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "seconds.json"
        launch([sys.executable, *sys.argv, "--results", str(results)], options.learners, synchronous=True)
        sys.exit(report(json.loads(results.read_text())) > TARGET)


def report(seconds: dict[str, list[float]]) -> float:
    """Prints medians and quartiles, and returns the ratio."""
    for name, values in seconds.items():
        low, median, high = (1e3 * quartile for quartile in statistics.quantiles(values, n=4))
        print(f"{name:12} {median:7.2f} ms a step (middle half {low:.2f} to {high:.2f})")
    ours = seconds.pop("sync")
    ratio = max(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) for theirs in seconds.values())
    print(f"ratio {ratio:.3f} (target: at most {TARGET})")
    return ratio


def learner(size: str, steps: int, rounds: int, results: Path) -> None:
    torch.set_num_threads(1)
    team = connect()
    layers, cells, outputs, chunks = SIZES[size]
    torch.manual_seed(team.rank)
    x_BTF, targets_BT = torch.randn(chunks, CHUNK, INPUTS), torch.randint(0, outputs, (chunks, CHUNK))
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(Blstm(BlstmOptions(layers, cells, 256), INPUTS, outputs))
    variants = {"sync": sync(models[0], team), "DDP 25 MB": ddp(models[1], None), "DDP 4 MB": ddp(models[2], 4)}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for trial in range(1 + rounds):
        for name in sorted(variants, reverse=bool(trial % 2)):
            step = variants[name]
            team.gather(torch.zeros(0))
            begin = time.perf_counter()
            for _ in range(steps):
                step(x_BTF, targets_BT)
            if trial:  # the first round warms up
                seconds[name].append((time.perf_counter() - begin) / steps)
    check_equal(models)
    if team.rank == 0:
        results.write_text(json.dumps(seconds), encoding="utf-8")
    team.close()


def sync(model: nn.Module, team: ProcessTeam) -> Step:
    params = FlatParams(model)
    optimizer = Optimizer(params, OptimizerOptions())
    optimizer.lr = RATE
    strategy = Sync(params, optimizer, team)

    def step(x_BTF: Tensor, targets_BT: Tensor) -> None:
        def gradient(on_bucket: BucketHook | None) -> StepResult:
            params.g.zero_()
            loss = loss_of(model, x_BTF, targets_BT)
            with params.notify_buckets(on_bucket):
                loss.backward()
            return StepResult(
                Lease(0, 0.0, 0.0, targets_BT.numel()), 1.0, len(x_BTF), RATE, loss.detach(), torch.zeros(())
            )

        strategy.step(gradient)

    return step


def ddp(model: nn.Module, bucket_megabytes: float | None) -> Step:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_megabytes, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), RATE, momentum=OptimizerOptions.momentum)

    def step(x_BTF: Tensor, targets_BT: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(wrapped, x_BTF, targets_BT).backward()
        optimizer.step()

    return step


def loss_of(model: nn.Module, x_BTF: Tensor, targets_BT: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits_BTP = model(x_BTF, None)
    return functional.cross_entropy(logits_BTP.flatten(0, 1).float(), targets_BT.flatten())


def check_equal(models: Sequence[nn.Module]) -> None:
    """Raises RuntimeError unless all variants have the same weights up to rounding."""
    ours, *others = (torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in models)
    for other in others:
        if not torch.allclose(ours, other, rtol=1e-3, atol=1e-4):
            raise RuntimeError(f"sync and DDP have different weights, by up to {(ours - other).abs().max():.2g}")


if __name__ == "__main__":
    main()
