"""Stage train: what a configuration says about who trains together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig

from asr_am.distributed.cluster import Cluster, Workload
from asr_am.errors import InputError
from asr_am.stages.app import values
from asr_am.stages.learner import learn
from asr_am.stages.train import units
from asr_am.stages.unit import KEY

CONF = Path(__file__).resolve().parents[2] / "conf"


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("name", choices("strategy"))
def test_every_strategy_can_be_made_from_its_file(name: str) -> None:
    cfg = config(f"strategy={name}")
    assert cfg.strategy.name == name
    factory = instantiate({key: value for key, value in values(cfg.strategy).items() if key != "name"})
    assert factory.func.name == name


@pytest.mark.parametrize("cluster", choices("cluster"))
@pytest.mark.parametrize("workload", choices("workload"))
def test_clusters_and_workloads(cluster: str, workload: str) -> None:
    cfg = config(f"cluster={cluster}", f"workload={workload}", "cluster.faults.slow={3:10}")
    hardware = Cluster.build(values(cfg.cluster))
    assert hardware.name == cluster and hardware.faults.slow == {3: 10}
    assert Workload.build(values(cfg.workload)).name == workload


def test_runs_are_named_by_who_trains() -> None:
    names = {
        units(config(*overrides))[0].out.name
        for overrides in (
            [],
            ["strategy=sync", "launcher=virtual", "learners=16"],
            ["strategy=sync", "launcher=process", "learners=4"],
        )
    }
    assert names == {"blstm-local-b64-s1", "blstm-sync-v16-b64-s1", "blstm-sync-p4-b64-s1"}


def test_the_cluster_is_a_source_of_a_virtual_run_only() -> None:
    def sources(*overrides: str) -> object:
        return units(config(*overrides))[0].config

    slow = "cluster.faults.slow={0:2}"
    assert sources() == sources(slow)
    virtual = ("launcher=virtual", "learners=16", "strategy=sync")
    assert sources(*virtual) != sources(*virtual, slow)


def test_the_other_hosts_take_part_and_mark_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ("strategy=sync", "learners=8", "launcher=process", "launcher.nodes=2", "launcher.address=h:1")
    assert units(config(*two))[0].leads
    assert not units(config(*two, "launcher.node_rank=1"))[0].leads
    monkeypatch.setenv("RANK", "3")
    assert not units(config("strategy=sync", "learners=8", "launcher=torchrun"))[0].leads


def test_several_learners_need_a_launcher() -> None:
    with pytest.raises(InputError, match="need launcher=virtual"):
        units(config("learners=4", "strategy=sync"))


def test_torchrun_is_for_strategies_that_move_in_step(tmp_path: Path) -> None:
    (tmp_path / KEY).write_text("0")
    with pytest.raises(InputError, match="strategy=ps_sync does not move in step"):
        learn(config("strategy=ps_sync", "learners=2", "launcher=torchrun", "logger=none"), tmp_path)
