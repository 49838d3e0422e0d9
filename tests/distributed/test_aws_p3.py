"""The cluster of Ladkat et al. (2019) as config, on a few steps. Experiments papers/htm_table1 and 2 have all."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator.epoch_timing import time_epoch
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.stages.train_config import strategy_factory
from tests.support.configurations import cluster_config

SECONDS = 0.1485  # of a batch
MEGABYTES = 97.2e6


@cache
def on_time() -> Cluster:
    """Returns the cluster without jitter."""
    return replace(Cluster.build(cluster_config("cluster=aws_p3")["cluster"]), jitter=0.0)


def seconds(make: object, learners: int, steps: int, on: Cluster | None = None, density: float = 0.01) -> float:
    workload = Workload.build(cluster_config("workload=htm_lstm")["workload"])
    return time_epoch(
        make, on or on_time(), workload, learners=learners, batches=steps * learners, elements=1000, density=density,  # type: ignore[arg-type]
    ).seconds  # fmt: skip


def test_a_block_costs_an_all_reduce() -> None:
    rate = 0.0642 * 3.125e9
    found = seconds(partial(Bmuf, block_size=5), 16, 10)
    assert found == pytest.approx(10 * SECONDS + 2 * (2 * 15 / 16 * MEGABYTES / rate + 30 * 50e-6), rel=1e-6)


def test_htm_averages_between_leaders_and_compresses_inside_hosts() -> None:
    found = seconds(partial(Htm, group_size=8, block_size=5), 16, 5)
    between = MEGABYTES / (0.0642 * 3.125e9) + 2 * 50e-6  # two leaders
    block = between + MEGABYTES / (0.0642 * 37.5e9) + 7 * 10e-6  # then inside each host
    step = SECONDS + 7 * 0.972e6 / 37.5e9 + 2 * 10e-6  # the lengths of the messages go first
    assert found == pytest.approx(5 * step + block, rel=1e-4)


def test_gtc_sends_all_to_all_between_hosts() -> None:
    for learners in (16, 32):
        traffic = learners * (learners - 8) * 0.972e6
        on = on_time()
        nic, fabric = traffic / (learners / 8) / on.nic_bandwidth, traffic / on.fabric_bandwidth
        found = seconds(Gtc, learners, 3)
        assert found == pytest.approx(3 * (SECONDS + max(nic, fabric)), rel=2e-3)
    assert seconds(Gtc, 16, 3, density=0.0) == pytest.approx(3 * SECONDS, rel=2e-3)


def test_half_the_nic_bandwidth_slows_gtc_on_two_hosts() -> None:
    slower = replace(on_time(), nic_bandwidth=on_time().nic_bandwidth / 2)
    longer = 3 * 8 * 8 * 0.972e6 / on_time().nic_bandwidth
    assert seconds(Gtc, 16, 3, slower) - seconds(Gtc, 16, 3) == pytest.approx(longer, rel=2e-3)


@pytest.mark.parametrize("name", ["gtc", "bmuf", "htm"])
def test_strategy_configs_build(name: str) -> None:
    chosen = cluster_config(f"strategy={name}")["strategy"]
    factory = strategy_factory(chosen)
    assert seconds(factory, 16, 2) == pytest.approx(2 * SECONDS, rel=0.3)
