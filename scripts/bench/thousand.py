"""Measures the virtual cluster with up to 1,024 learners: overhead over the plain arithmetic, and memory per learner.

    python scripts/bench/thousand.py [--learners 1024] [--steps 2] [--chunks 16] [--rounds 3] [--strategies sync ...]

Trains a small bi-LSTM for an epoch of `steps` steps per learner by `train_model`, as a user would. The plain
arithmetic is a loop over the same models with the same gradients, updates, averagings and copies. Times are CPU seconds
of one process, in which both run in turn: the least of the rounds, as other jobs on the machine only add to it. Memory
is what the process needs at its peak beyond its libraries, in a run of one step of one chunk, divided by the number of
learners.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.flat_params import FlatParams
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.simulator import SimCluster
from asr_am.distributed.simulator.collectives import mean_in_order
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.diloco import Diloco
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.psp import Psp
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategy import Strategy
from asr_am.distributed.team import Team
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.train.any_model import train_model
from asr_am.train.frame_loss import batch_loss

CHUNK, INPUTS, OUTPUTS = 21, 40, 200
LR = 0.1
MEMORY_AT = (64, 1024)
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "sync": Sync, "dpsgd": Dpsgd, "adpsgd": Adpsgd, "psp": partial(Psp, servers=8),
    "diloco": partial(Diloco, block_size=2),
}  # fmt: skip
Batch = tuple[Tensor, Tensor]


def hardware(learners: int) -> Cluster:
    return Cluster(
        name="bench", hosts=-(-learners // 8), devices_per_host=8, device="cpu", nic_bandwidth=1e9, nic_latency=1e-4,
        host_bandwidth=4e9, host_latency=1e-5, all_reduce_efficiency=1.0, overlap_speed=1.0, update_bandwidth=1e10,
        averaging_bandwidth=1e10,
    )  # fmt: skip


def new_model() -> Blstm:
    torch.manual_seed(0)
    return Blstm(BlstmOptions(1, 64, 64), INPUTS, OUTPUTS)


class Batches(Sequence[Batch]):
    """Batches that are made when they are needed."""

    def __init__(self, count: int, chunks: int) -> None:
        self._count, self.chunks = count, chunks

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Batch:  # type: ignore[override]
        if number >= self._count:
            raise IndexError
        random = torch.Generator().manual_seed(number)
        x_BTF = torch.randn(self.chunks, CHUNK, INPUTS, generator=random)
        return x_BTF, torch.randint(0, OUTPUTS, (self.chunks, CHUNK), generator=random)


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    assert isinstance(model, Blstm)
    x_BTF, targets_BT = batch
    return batch_loss(model, x_BTF, None, targets_BT, torch.float32)[0], targets_BT.numel()


def run_virtual(name: str, learners: int, batches: Batches) -> None:
    """Trains an epoch on a virtual cluster."""

    def learner(team: Team) -> None:
        frames = [CHUNK * batches.chunks] * len(batches)
        train_model(new_model(), batches, loss, STRATEGIES[name], team, lr=LR, sizes=frames)

    workload = Workload("bench", seconds_per_batch={"cpu": 0.1})
    SimCluster(hardware(learners), workload, learners, seed=1).run(learner)


def run_plain(name: str, learners: int, batches: Batches) -> None:
    """Does the same arithmetic in a loop."""
    everyone = [PlainLearner() for _ in range(learners)]
    x = [learner.params.w.clone() for learner in everyone] if name == "adpsgd" else []
    for first in range(0, len(batches), learners):
        for rank, learner in enumerate(everyone):
            learner.backward(batches[first + rank])
        if name in ("sync", "psp"):
            mean = mean_in_order([learner.params.g for learner in everyone])
        if name == "psp":  # the servers update, and all learners copy the weights
            everyone[0].params.g.copy_(mean)
            everyone[0].optimizer.step()
            for learner in everyone[1:]:
                learner.params.w.copy_(everyone[0].params.w)
            continue
        for rank, learner in enumerate(everyone):
            if name == "sync":
                learner.params.g.copy_(mean)
            if name == "adpsgd":  # pull and push
                learner.params.w.copy_(x[rank])
            learner.optimizer.step()
            if name == "adpsgd":
                x[rank].copy_(learner.params.w)
        if name in ("dpsgd", "adpsgd"):
            average_pairs(x or [learner.params.w for learner in everyone])
    if name == "diloco":  # one block, at the end
        mean = mean_in_order([learner.params.w for learner in everyone])
        for learner in everyone:
            outer_gradient = learner.params.w - mean
            learner.params.w.copy_(mean.add(outer_gradient, alpha=0.3).sub_(outer_gradient, alpha=0.63))


class PlainLearner:
    """A model and its optimizer."""

    def __init__(self) -> None:
        self.model = new_model()
        self.params = FlatParams(self.model)
        self.optimizer = Optimizer(self.params, OptimizerOptions())
        self.optimizer.lr = LR

    def backward(self, batch: Batch) -> None:
        self.params.g.zero_()
        total, count = loss(self.model, batch)
        (total / count).backward()


def average_pairs(w: Sequence[Tensor]) -> None:
    for one, other in zip(w[::2], w[1::2], strict=True):
        mean = (one + other) / 2
        one.copy_(mean)
        other.copy_(mean)


def cpu_seconds(function: Callable[[], None]) -> float:
    gc.collect()
    begin = time.process_time()
    function()
    return time.process_time() - begin


def resident_bytes() -> int:
    """Returns the memory that this process needs now, without what earlier runs have freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def measure(name: str, learners: int, steps: int, chunks: int, rounds: int) -> dict[str, float]:
    """Returns the CPU seconds of both. Without rounds, the bytes of memory per learner of a virtual run."""
    torch.set_num_threads(1)
    warm_up = Batches(2, chunks)
    run_plain(name, 2, warm_up)
    run_virtual(name, 16, Batches(16, chunks))
    before = resident_bytes()
    batches = Batches(learners * steps, chunks)
    if not rounds:
        run_virtual(name, learners, batches)
        return {"bytes": (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / learners}
    both = {"virtual": run_virtual, "plain": run_plain}
    seconds = [
        {key: cpu_seconds(partial(run, name, learners, batches)) for key, run in both.items()} for _ in range(rounds)
    ]
    return {key: min(one[key] for one in seconds) for key in both}


def in_process(*arguments: object) -> dict[str, float]:
    """Calls `measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2, help="of each learner")
    parser.add_argument("--chunks", type=int, default=16, help="of a batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    num_weights = sum(parameter.numel() for parameter in new_model().parameters())
    print(f"model of {num_weights * 4 / 1e6:.2f} MB, {arguments.steps} steps of {arguments.chunks} chunks per learner")
    at = " ".join(f"{f'at {count}':>8}" for count in MEMORY_AT)
    print(f"{arguments.learners} learners  ms/step virtual    plain  ratio   MB per learner {at}", flush=True)
    for name in arguments.strategies:
        found = in_process(name, arguments.learners, arguments.steps, arguments.chunks, arguments.rounds)
        ms = {key: 1e3 * seconds / (arguments.learners * arguments.steps) for key, seconds in found.items()}
        memory = [in_process(name, count, 1, 1, 0)["bytes"] / 1e6 for count in MEMORY_AT]
        columns = " ".join(f"{megabytes:8.2f}" for megabytes in memory)
        ratio = found["virtual"] / found["plain"]
        print(f"{name:13} {ms['virtual']:16.2f} {ms['plain']:8.2f} {ratio:6.2f} {'':16} {columns}", flush=True)


if __name__ == "__main__":
    main()
