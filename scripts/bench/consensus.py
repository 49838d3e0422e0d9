"""Plots consensus distance against the spectral gap for the partners of ADPSGD: ring, random and exponential.

    python scripts/bench/consensus.py [--learners 8 16 32] [--steps 60] [--out scripts/bench/consensus.svg]

Learners of a virtual cluster take equally long steps with gradients of random noise, so that their updates drive them
apart and gossip brings them together. The consensus distance is the root mean square over learners and over the second
half of the steps of the distance to their mean, in units of one update. The spectral gap is 1 minus the second largest
eigenvalue of the mean of the mixing matrices M_t over steps. All M_t are projections, so this eigenvalue bounds the
factor by which one averaging shrinks the squared distance in the mean over M_t (Boyd et al., 2006).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from matplotlib import rc_context
from torch import Tensor, nn

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.flat_params import BucketHook, FlatParams
from asr_am.distributed.leases import Leases, Segment, StepResult
from asr_am.distributed.optimizer import Optimizer, OptimizerOptions
from asr_am.distributed.simulator import SimCluster, SimTeam
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.topology import Partners, receivers
from asr_am.report.plot_style import Style, new_figure, tidy

WEIGHTS = 64
HARDWARE = partial(
    Cluster, "bench", device="cpu", devices_per_host=1, nic_bandwidth=1e9, nic_latency=0.0, host_bandwidth=1e9,
    host_latency=0.0, all_reduce_efficiency=1.0, overlap_speed=1.0, update_bandwidth=1e9, averaging_bandwidth=1e9,
)  # fmt: skip


def mixing_matrix(partners: Partners, size: int, step: int) -> Tensor:
    """Returns M_t [n, n] of learners whose updates happen at the same time."""
    M = torch.eye(size, dtype=torch.float64)
    for i in range(0, size, 2):
        j = next(receivers(partners, i, step, size, 0))
        M[i, i] = M[i, j] = M[j, i] = M[j, j] = 0.5
    return M


def spectral_gap(partners: Partners, size: int, steps: int) -> float:
    mean = torch.stack([mixing_matrix(partners, size, step) for step in range(steps)]).mean(dim=0)
    return 1 - float(torch.linalg.eigvalsh(mean)[-2])


def consensus_distance(partners: Partners, size: int, steps: int) -> float:
    """Trains on noise by ADPSGD, and returns the consensus distance in units of one update."""
    segment = Segment(0, 0, size * steps, size * steps, (1,) * (size * steps), 0, size)
    seen: list[list[Tensor]] = [[] for _ in range(size)]  # weights after each step, by learner

    def run_learner(team: SimTeam) -> None:
        params = FlatParams(nn.Linear(WEIGHTS, 1, bias=False))
        params.w.zero_()
        optimizer = Optimizer(params, OptimizerOptions(momentum=0.0))
        optimizer.lr = 1.0
        strategy = Adpsgd(params, optimizer, team, partners=partners)
        leases = team.leases(segment, strategy.synchronous)
        gradient = team.timed(partial(noise, leases, params))
        while (result := strategy.step(gradient)) is not None:
            leases.complete(result)
            seen[team.rank].append(params.w.clone())
        strategy.drain()

    workload = Workload("bench", seconds_per_batch={"cpu": 1.0})
    SimCluster(HARDWARE(hosts=size), workload, size, seed=1).run(run_learner)
    w_STN = torch.stack([torch.stack(own[steps // 2 : steps - 1]) for own in seen])  # learner, step, weight
    return float((w_STN - w_STN.mean(dim=0)).square().sum(dim=2).mean().sqrt())


def noise(leases: Leases, params: FlatParams, on_bucket: BucketHook | None) -> StepResult | None:
    """A gradient of random direction and length 1 on average, of a seed by batch."""
    lease = leases.lease()
    if lease is None or lease.batch is None:
        return None
    random = torch.Generator().manual_seed(lease.batch)
    params.g.copy_(torch.randn(WEIGHTS, generator=random) / WEIGHTS**0.5)
    return StepResult(lease, 1.0, 1, 1.0, torch.zeros(()), torch.zeros(()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("consensus.svg"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figure = new_figure(6, 4)
    axes = figure.add_subplot()
    tidy(axes, "both")
    print("partners     learners  spectral gap  consensus distance")
    for kind, partners in enumerate(get_args(Partners)):
        gaps = [spectral_gap(partners, size, 240) for size in arguments.learners]
        distances = [consensus_distance(partners, size, arguments.steps) for size in arguments.learners]
        for size, gap, distance in zip(arguments.learners, gaps, distances, strict=True):
            print(f"{partners:12} {size:8} {gap:13.3f} {distance:19.3f}", flush=True)
            axes.annotate(str(size), (gap, distance), xytext=(5, 5), textcoords="offset points")
        style = Style.of(kind)
        axes.plot(gaps, distances, style.line, color=style.colour, marker=style.marker, label=partners)
    axes.set_xlabel("spectral gap of the mean mixing matrix")
    axes.set_ylabel("consensus distance / one update")
    axes.legend(frameon=False, title="partners of ADPSGD")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "consensus"}):
        figure.savefig(arguments.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
