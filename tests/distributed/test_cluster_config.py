from __future__ import annotations

from typing import Any

import pytest

from asr_am.distributed.cluster_config import Cluster, Crash, Faults, Workload
from asr_am.errors import InputError
from tests.support.round_cluster import VALUES


def test_built_from_plain_values() -> None:
    faults = {"slow": {"3": 2, 1: 10.0}, "crashes": [{"learner": 1, "at": 5}], "late_share": 0.5, "late_seconds": 3}
    cluster = Cluster.build({**VALUES, "jitter": 0.1, "faults": faults})
    assert cluster.faults == Faults({3: 2, 1: 10.0}, (Crash(1, 5, None),), 0.5, 3, 0.0)
    assert (cluster.hosts, cluster.jitter, cluster.devices) == (2, 0.1, 4)
    assert [cluster.host_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert Cluster.build({**VALUES, "faults": None}).faults == Faults()
    assert Cluster.build({**VALUES, "nic_bandwidth": float("inf")}).nic_bandwidth == float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": 0}, r"cluster\.hosts: must be an integer of at least 1, not 0"),
        ({"hosts": "two"}, r"cluster\.hosts"),
        ({"devices_per_host": 1.5}, r"cluster\.devices_per_host"),
        ({"nic_bandwidth": 0.0}, r"cluster\.nic_bandwidth: must be a number at least 1, not 0.0"),
        ({"fabric_bandwidth": -1.0}, r"cluster\.fabric_bandwidth: must be a number at least 1"),
        ({"averaging_bandwidth": "fast"}, r"cluster\.averaging_bandwidth"),
        ({"nic_latency": -1.0}, r"cluster\.nic_latency: must be a number at least 0"),
        ({"host_latency": float("nan")}, r"cluster\.host_latency"),
        ({"all_reduce_efficiency": 0.0}, r"cluster\.all_reduce_efficiency: must be a number above 0"),
        ({"scatter_cost": float("inf")}, r"cluster\.scatter_cost"),
        ({"overlap_speed": 0.0}, r"cluster\.overlap_speed: must be a number above 0 and at most 1"),
        ({"overlap_speed": 1.5}, r"cluster\.overlap_speed"),
        ({"jitter": None}, r"cluster\.jitter"),
        ({"colour": "blue"}, r"cluster\.colour: there is no such option; there are name, hosts"),
        ({"faults": {"slower": {1: 2}}}, r"cluster\.faults\.slower: there is no such"),
        ({"faults": {"slow": {1: 0.5}}}, r"cluster\.faults\.slow\.1: must be a number at least 1"),
        ({"faults": {"slow": {"one": 2}}}, r"cluster\.faults\.slow: 'one' is not a learner's number"),
        ({"faults": {"slow": [1, 2]}}, r"cluster\.faults\.slow: must be a mapping"),
        ({"faults": {"crashes": 5}}, r"cluster\.faults\.crashes: must be a list"),
        ({"faults": {"crashes": [5]}}, r"cluster\.faults\.crashes=5: must be a mapping"),
        ({"faults": "none"}, r"cluster\.faults: must be a mapping"),
        ({"faults": {"late_share": 1.1}}, r"cluster\.faults\.late_share: must be a number at least 0 and at most 1"),
        ({"faults": {"late_seconds": -1}}, r"cluster\.faults\.late_seconds"),
        ({"faults": {"late_seconds": 3601}}, r"late_seconds: must be a number at least 0 and at most 3600"),
        ({"faults": {"slow": {1: 1e308}}}, r"slow\.1: must be a number at least 1 and at most 1e\+06"),
        ({"jitter": 1000}, r"jitter: must be a number at least 0 and at most 3"),
        ({"host_bandwidth": 1e-300}, r"host_bandwidth: must be a number at least 1"),
        ({"collective_latency": 1e300}, r"collective_latency: must be a number at least 0 and at most 3600"),
        ({"faults": {"lost_share": True}}, r"cluster\.faults\.lost_share"),
        ({"faults": {"lost_share": 1.0}}, r"lost_share: must be a number at least 0 and at most 0\.9"),
        ({"faults": {"crashes": [{"at": 1.0}]}}, r"cluster\.faults\.crashes\.learner: is missing"),
        ({"faults": {"crashes": [{"learner": -1, "at": 1.0}]}}, r"cluster\.faults\.crashes: learner"),
        ({"faults": {"crashes": [{"learner": 1, "at": None}]}}, r"cluster\.faults\.crashes\.at"),
        ({"faults": {"crashes": [{"learner": 1, "at": 1, "restart_after": -1}]}}, r"crashes: restart_after"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cluster.build({**VALUES, **changes})


def test_a_missing_value_is_named() -> None:
    values = {key: value for key, value in VALUES.items() if key != "host_bandwidth"}
    with pytest.raises(InputError, match=r"cluster\.host_bandwidth: is missing"):
        Cluster.build(values)


def test_learners_and_faults_must_fit() -> None:
    with pytest.raises(InputError, match="learners=5: cluster round has 2 hosts x 2 devices"):
        Cluster.build(VALUES).check(5)
    for faults, key in (({"slow": {3: 2.0}}, "slow"), ({"crashes": [{"learner": 3, "at": 1.0}]}, "crashes")):
        cluster = Cluster.build({**VALUES, "faults": faults})
        cluster.check(4)
        with pytest.raises(InputError, match=rf"cluster\.faults\.{key}: there is no learner 3 among 3"):
            cluster.check(3)


def test_workload_seconds() -> None:
    per_batch = Workload.build({"name": "w", "bytes": 4e6, "seconds_per_batch": {"gpu": 2.0}, "emulate": True})
    assert per_batch.seconds("gpu", 10, 40) == 0.5 and per_batch.seconds("gpu", 0, 0) == 0.0
    by_speed = Workload.build({"name": "self", "frames_per_second": {"cpu": 100.0}})
    assert by_speed.seconds("cpu", 10, 40) == 0.1 and by_speed.bytes is None
    with pytest.raises(InputError, match=r"workload\.frames_per_second: no figure for device 'gpu', only for cpu"):
        by_speed.check("gpu")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "w"}, "give one of"),
        ({"name": "w", "seconds_per_batch": {"a": 1.0}, "frames_per_second": {"a": 1.0}}, "give one of"),
        ({"name": "w", "seconds_per_batch": {"a": 0.0}}, r"workload\.seconds_per_batch\.a"),
        ({"name": "w", "seconds_per_batch": 3.0}, r"workload\.seconds_per_batch=3\.0: "),
        ({"name": "w", "frames_per_second": {"a": -1}}, r"workload\.frames_per_second\.a"),
        ({"name": "w", "bytes": 0, "frames_per_second": {"a": 1}}, r"workload\.bytes"),
        ({"name": "w", "speed": 3}, r"workload\.speed: there is no such"),
        ({"seconds_per_batch": {"a": 1.0}}, r"workload\.name: is missing"),
    ],
)
def test_bad_workloads_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload.build(values)
