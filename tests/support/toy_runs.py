"""Training runs of a small network on small examples, alone, on a virtual cluster and as processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asr_am.distributed.cluster_config import Cluster, Faults, Workload
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.sync import Sync
from asr_am.models.blstm import BlstmOptions
from asr_am.train.run_setup import StrategyFactory
from asr_am.train.schedule import Anneal
from asr_am.train.simulate import train_virtually
from asr_am.train.tracking import NoTracker
from asr_am.train.train_options import TrainOptions

OPTIONS = TrainOptions(
    epochs=2, batch_size=8, model=BlstmOptions(1, 8, 6), schedule=Anneal(base=0.1), random_offset=True, threads=1,
    report_every=3, checkpoint_every=4, device="cpu",
)  # fmt: skip
WORKLOAD = Workload("test", seconds_per_batch={"cpu": 1.0})
STRATEGIES: dict[str, StrategyFactory] = {"sync": Sync, "hybrid": Hybrid, "dpsgd": Dpsgd, "adpsgd": Adpsgd}


def cluster(**faults: object) -> Cluster:
    return Cluster(
        name="test", hosts=2, devices_per_host=2, device="cpu", nic_bandwidth=1e6, nic_latency=1e-3,
        host_bandwidth=1e7, host_latency=1e-4, all_reduce_efficiency=1.0, overlap_speed=0.5,
        update_bandwidth=1e7, averaging_bandwidth=1e7, jitter=0.1, faults=Faults.build(faults),
    )  # fmt: skip


def virtually(
    egs_dir: Path, out: Path, strategy: StrategyFactory, options: TrainOptions = OPTIONS, learners: int = 4,
    **faults: object,
) -> dict[str, Any]:  # fmt: skip
    """Trains with some learners. Returns the summary."""
    train_virtually(
        egs_dir, out, options, learners=learners, cluster=cluster(**faults), workload=WORKLOAD, strategy=strategy
    )
    return json.loads((out / "summary.json").read_text())


def lease_log(out: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (out / "leases.jsonl").read_text().splitlines()]


class Ended(NoTracker):
    """Counts the calls of `finish`."""

    ends = 0

    def finish(self) -> None:
        self.ends += 1


def lines(out: Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl without the fields that depend on the clock."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "frames_per_second"} for record in records]


def final_state(out: Path) -> dict[str, Any]:
    newest = sorted((out / "checkpoints").iterdir())[-1]
    return torch.load(newest / "learner-0.pt", weights_only=True)
