"""Halving any bandwidth of a cluster slows the strategies that use it, and no others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator.epoch_timing import time_epoch
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.train_config import strategy_factory
from tests.support.configurations import cluster_config

BANDWIDTHS = ("nic", "host", "update", "averaging", "host_update", "fabric")
ROUNDS = 4


@dataclass(frozen=True)
class Case:
    """A strategy on a cluster, and the bandwidths that its time depends on. `options` are Hydra's."""

    cluster: str
    workload: str
    learners: int
    options: tuple[str, ...]
    slows: frozenset[str]

    @property
    def name(self) -> str:
        return f"{self.cluster} {' '.join(self.options)}"


def case(cluster: str, workload: str, learners: int, options: str, *slows: str) -> Case:
    return Case(cluster, workload, learners, tuple(options.split()), frozenset(slows))


BLOCKS = "strategy.block_size=2"
GTC = "strategy.density=null"
CASES = [
    case("ibm_a", "swb2000_lstm", 16, "strategy=sync strategy.form=weights", "nic"),
    case("ibm_a", "swb2000_lstm", 16, "strategy=sync", "nic"),
    case("ibm_a", "swb2000_lstm", 16, "strategy=hybrid", "nic"),
    case("ibm_a", "swb2000_lstm", 16, "strategy=dpsgd", "nic", "host", "averaging"),
    # messages are hidden behind gradients, except for the last ones of a run
    case("ibm_a", "swb2000_lstm", 16, "strategy=adpsgd", "update", "host_update", "nic", "host", "averaging"),
    case("ibm_b", "swb2000_lstm", 32, "strategy=adpsgd", "update", "host_update", "host", "averaging"),
    case("aws_p3", "htm_lstm", 16, f"strategy=bmuf {BLOCKS}", "nic"),
    case("aws_p3", "htm_lstm", 16, f"strategy=htm {GTC} {BLOCKS}", "nic", "host"),
    case("aws_p3", "htm_lstm", 16, f"strategy=gtc {GTC}", "nic", "fabric"),
    case("aws_p3", "htm_lstm", 64, f"strategy=gtc {GTC}", "fabric"),
    case("psp_32", "resnet50_cifar10", 8, "strategy=psp strategy.servers=8", "nic", "averaging"),
]  # fmt: skip


def seconds(case: Case, halved: str = "") -> float:
    found = cluster_config(f"cluster={case.cluster}", f"workload={case.workload}", *case.options)
    hardware = replace(Cluster.build(found["cluster"]), jitter=0.0)
    hardware = replace(hardware, faults=replace(hardware.faults, late_share=0.0))
    if halved:
        hardware = replace(hardware, **{f"{halved}_bandwidth": getattr(hardware, f"{halved}_bandwidth") / 2})
    return time_epoch(
        strategy_factory(found["strategy"]), hardware, Workload.build(found["workload"]), learners=case.learners,
        batches=ROUNDS * case.learners, elements=32 * 64, density=0.01,
    ).seconds  # fmt: skip


baseline = cache(seconds)


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_half_the_bandwidth(case: Case, bandwidth: str) -> None:
    change = seconds(case, bandwidth) / baseline(case) - 1
    assert change > 1e-3 if bandwidth in case.slows else abs(change) < 1e-3


def test_every_constant_says_where_it_comes_from() -> None:
    for path in sorted((ROOT / "conf" / "cluster").glob("*.yaml")):
        lines = path.read_text().splitlines()
        values = [line for line in lines if line[:1].isalpha() and not line.startswith(("name:", "faults:"))]
        tags = ("# [sourced]", "# [computed]", "# [fitted]", "# [assumed]")
        assert len(values) > 10 and [line for line in values if not any(tag in line for tag in tags)] == [], path
