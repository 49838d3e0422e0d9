"""The clusters of Zhang et al. (ICASSP 2019) as configs, on a small share of an epoch.

Experiment papers/ibm_table3 reproduces their whole table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asr_am.distributed.cluster_config import Cluster, Faults, Workload
from asr_am.distributed.simulator.epoch_timing import EpochTime, time_epoch
from asr_am.errors import InputError
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.train_config import strategy_factory
from tests.support.configurations import cluster_config

ROUNDS = 13_393  # of an epoch, on either cluster
SHARE = 40  # rounds that are simulated
RING = 2 * 15 / 16 * 165e6  # bytes that each of 16 learners sends, at all_reduce_efficiency


WORKLOAD = Workload.build(cluster_config("workload=swb2000_lstm")["workload"])


def hardware(cluster: str, **changes: Any) -> Cluster:
    return replace(Cluster.build(cluster_config(f"cluster={cluster}")["cluster"]), **changes)


def epoch(strategy: str, on: Cluster, rounds: int = SHARE) -> EpochTime:
    form = ["strategy.form=weights"] if strategy == "sync" else []
    chosen = cluster_config(f"strategy={strategy}", *form)["strategy"]
    factory = strategy_factory(chosen)
    return time_epoch(factory, on, WORKLOAD, learners=on.devices, batches=rounds * on.devices)


@pytest.mark.parametrize(
    ("cluster", "strategy", "hours"),
    [
        ("ibm_a", "sync", 1.09), ("ibm_a", "hybrid", 1.03), ("ibm_a", "adpsgd", 0.87),
        ("ibm_b", "sync", 0.75), ("ibm_b", "hybrid", 0.71), ("ibm_b", "adpsgd", 0.83),
    ],
)  # fmt: skip
def test_published_hours_per_epoch(cluster: str, strategy: str, hours: float) -> None:
    found = epoch(strategy, hardware(cluster))
    assert found.seconds * ROUNDS / SHARE / 3600 == pytest.approx(hours, rel=0.05)
    assert sum(found.batches.values()) == SHARE * len(found.batches)


def test_half_the_bandwidth_slows_sync_as_computed() -> None:
    on = hardware("ibm_a")
    slower = replace(on, nic_bandwidth=on.nic_bandwidth / 2)
    longer = SHARE * RING / (on.all_reduce_efficiency * on.nic_bandwidth)
    assert epoch("sync", slower).seconds - epoch("sync", on).seconds == pytest.approx(longer, rel=1e-6)


def test_overlap_costs_hybrid_the_computing_speed_that_a_collective_takes() -> None:
    on = hardware("ibm_a", nic_latency=0.0)
    free = epoch("hybrid", replace(on, overlap_speed=1.0)).seconds
    assert free == pytest.approx(SHARE * 0.1597, rel=0.03)  # communication is hidden
    lost = (1 - on.overlap_speed) * RING / (on.all_reduce_efficiency * on.nic_bandwidth)
    assert epoch("hybrid", on).seconds - free == pytest.approx(SHARE * lost, rel=0.03)


def test_a_straggler_holds_up_sync_and_hybrid_but_not_adpsgd() -> None:
    even, slowed = hardware("ibm_a"), hardware("ibm_a", faults=Faults(slow={5: 10.0}))
    assert epoch("sync", slowed).seconds > 5 * epoch("sync", even).seconds
    assert epoch("hybrid", slowed).seconds > 5 * epoch("hybrid", even).seconds
    found = epoch("adpsgd", slowed, rounds=300)
    assert found.seconds / 300 < 1.1 * epoch("adpsgd", even).seconds / SHARE
    assert found.batches[5] < min(count for rank, count in found.batches.items() if rank != 5) / 5


def test_eight_gpus_saturate_their_bus_and_four_do_not() -> None:
    for cluster, factor in (("ibm_a", 1.0), ("ibm_b", 2.0)):
        on = hardware(cluster)
        halved = replace(on, host_update_bandwidth=on.host_update_bandwidth / 2)
        ratio = epoch("adpsgd", halved).seconds / epoch("adpsgd", on).seconds
        assert ratio == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (group, path.stem)
        for group in ("cluster", "workload")
        for path in sorted((ROOT / "conf" / group).glob("*.yaml"))
    ],
)
def test_every_config_is_valid(group: str, name: str) -> None:
    found = cluster_config(f"{group}={name}")[group]
    assert found["name"] == name
    built = Cluster.build(found) if group == "cluster" else Workload.build(found)
    if isinstance(built, Cluster) and name.startswith("ibm"):
        WORKLOAD.check(built.device)


def test_an_epoch_without_a_model_needs_its_bytes() -> None:
    bare = Workload("bare", frames_per_second={"p100": 1.0})
    with pytest.raises(InputError, match=r"workload bare: .* needs bytes and seconds_per_batch"):
        time_epoch(lambda *_: pytest.fail("too late"), hardware("ibm_a"), bare, learners=2, batches=4)
