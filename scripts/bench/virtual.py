"""Measures the overhead of the virtual cluster: `sync` on 16 virtual learners against the same sums in a loop.

    python scripts/bench/virtual.py [--learners N] [--rounds N] [--repeats N] [--batch CHUNKS]

Both compute the gradients of the same models on the same batches, average them in rank order and update every model.
They take turns of `rounds` rounds. Prints medians. The weights must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import GradientFn, Leases, Segment, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.simulator import SimCluster, SimTeam
from asr_am.distributed.strategies.sync import Sync
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.train.frame_loss import batch_loss

CHUNK, INPUTS, OUTPUTS = 21, 120, 1000
HARDWARE = Cluster(
    name="bench", hosts=1, devices_per_host=1024, device="cpu", nic_bandwidth=1e9, nic_latency=1e-4,
    host_bandwidth=1e9, host_latency=1e-5, all_reduce_efficiency=1.0, overlap_speed=1.0,
    update_bandwidth=1e9, averaging_bandwidth=1e9,
)  # fmt: skip


class Learner:
    """A model and its optimizer, equal in all learners."""

    def __init__(self, chunks: int) -> None:
        torch.manual_seed(0)
        self.model = Blstm(BlstmOptions(2, 128, 256), INPUTS, OUTPUTS)
        self.params = FlatParams(self.model)
        self.optimizer = Optimizer(self.params, OptimizerOptions())
        self.optimizer.lr = 0.01
        self.chunks = chunks

    def backward(self, batch: int, on_bucket: BucketHook | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        x_BTF = torch.randn(self.chunks, CHUNK, INPUTS, generator=generator)
        targets_BT = torch.randint(0, OUTPUTS, (self.chunks, CHUNK), generator=generator)
        self.params.g.zero_()
        loss = batch_loss(self.model, x_BTF, None, targets_BT, torch.bfloat16)[0] / targets_BT.numel()
        with self.params.notify_buckets(on_bucket):
            loss.backward()
        return loss.detach()

    def gradient(self, leases: Leases) -> GradientFn:
        def closure(on_bucket: BucketHook | None) -> StepResult | None:
            lease = leases.lease()
            if lease is None or lease.batch is None:
                return None
            loss = self.backward(lease.batch, on_bucket)
            return StepResult(lease, lease.loss_denominator, self.chunks, self.optimizer.lr, loss, torch.zeros(()))

        return closure


def run_virtual(learners: int, rounds: int, chunks: int) -> Tensor:
    """Returns the weights after `rounds` rounds on the virtual cluster."""
    total = learners * rounds
    segment = Segment(0, 0, total, total, (chunks * CHUNK,) * total, updates_before=0, learners=learners)

    def run_learner(team: SimTeam) -> Tensor:
        learner = everyone[team.rank]
        strategy = Sync(learner.params, learner.optimizer, team)
        gradient = team.timed(learner.gradient(team.leases(segment, synchronous=True)))
        while strategy.step(gradient) is not None:
            pass
        return learner.params.w

    everyone = [Learner(chunks) for _ in range(learners)]
    begin = time.perf_counter()
    workload = Workload("bench", frames_per_second={"cpu": 1e4})
    weights = SimCluster(HARDWARE, workload, learners, seed=1).run(run_learner)[0]
    seconds["virtual"].append(time.perf_counter() - begin)
    return weights


def run_loop(learners: int, rounds: int, chunks: int) -> Tensor:
    """Returns the weights after the same arithmetic in a plain loop."""
    everyone = [Learner(chunks) for _ in range(learners)]
    begin = time.perf_counter()
    for n in range(rounds):
        for rank, learner in enumerate(everyone):
            learner.backward(n * learners + rank)
        mean = everyone[0].params.g.clone()
        for learner in everyone[1:]:
            mean += learner.params.g
        mean /= learners
        for learner in everyone:
            learner.params.g.copy_(mean)
            learner.optimizer.step()
    seconds["loop"].append(time.perf_counter() - begin)
    return everyone[0].params.w


seconds: dict[str, list[float]] = {"virtual": [], "loop": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16, help="chunks of a learner's batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for _ in range(arguments.repeats):
        virtual = run_virtual(arguments.learners, arguments.rounds, arguments.batch)
        assert torch.equal(virtual, run_loop(arguments.learners, arguments.rounds, arguments.batch))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:8} {value / arguments.rounds * 1e3:8.1f} ms a round of {arguments.learners} learners")
    print(f"ratio {medians['virtual'] / medians['loop']:.3f}")


if __name__ == "__main__":
    main()
