"""Stage train: what a configuration says about who trains together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.errors import InputError
from asr_am.stages.app import values
from asr_am.stages.egs import egs_dir
from asr_am.stages.target import KEY
from asr_am.stages.train import units
from asr_am.stages.train_worker import run_worker
from tests.support.egs_examples import write_examples

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
    assert units(config(*two))[0].is_leader
    assert not units(config(*two, "launcher.node_rank=1"))[0].is_leader
    monkeypatch.setenv("RANK", "3")
    assert not units(config("strategy=sync", "learners=8", "launcher=torchrun"))[0].is_leader


def test_several_learners_need_a_launcher() -> None:
    with pytest.raises(InputError, match="need launcher=virtual"):
        units(config("learners=4", "strategy=sync"))


def test_torchrun_is_for_strategies_that_move_in_step(tmp_path: Path) -> None:
    (tmp_path / KEY).write_text("0")
    with pytest.raises(InputError, match="strategy=ps_sync does not move in step"):
        run_worker(config("strategy=ps_sync", "learners=2", "launcher=torchrun", "logger=none"), tmp_path)


TINY = (
    "corpus.name=toy", "features=logmel", "align=triphone", "model.layers=1", "model.cells=8", "model.projection=4",
    "train.epochs=1", "train.batch_size=8", "train.threads=1", "train.device=cpu", "logger=none",
)  # fmt: skip
VIRTUAL = ("launcher=virtual", "learners=4", "run=blstm-local-b8-s1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """exp/ with one finished run."""
    exp = tmp_path_factory.mktemp("exp")
    cfg = config(*TINY, f"exp={exp}")
    write_examples(egs_dir(cfg))
    assert units(cfg)[0].run()
    return exp


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.base=-0.1",), ("schedule.base=x",), ("+schedule.kind=cosine",), ("model.dropout=1.5",),
        ("model.layers=0",), ("model.cells=x",), ("train.epochs=0",), ("train.epochs=2", "train.device=cuda"),
        ("train.epochs=2", "train.device=tpu"),
        ("train.precision=fp8",), ("train.subset=2",), ("train.optimizer.momentum=1",), ("train.optimizer.kind=lion",),
        ("train.masking.streams=0",), ("train.init=/nowhere/best.pt",), ("+strategy.foo=1",), ("+train.foo=1",),
        ("learners=2",), (*VIRTUAL, "learners=3", "strategy=sync"), (*VIRTUAL, "learners=1", "strategy=adpsgd"),
        (*VIRTUAL, "strategy=psp", "strategy.c=9"), (*VIRTUAL, "strategy=bmuf", "strategy.block_size=0"),
        (*VIRTUAL, "strategy=gtc", "strategy.density=2"), (*VIRTUAL, "strategy=htm", "strategy.group_size=3"),
        (*VIRTUAL, "strategy=ps_sync", "strategy.servers=9"), (*VIRTUAL, "strategy=sync", "cluster.faults.slow={9:2}"),
        (*VIRTUAL, "strategy=sync", "cluster.hosts=0"),
    ],
    ids=lambda overrides: overrides[-1],
)  # fmt: skip
def test_a_finished_run_survives_any_typo(finished: Path, overrides: tuple[str, ...]) -> None:
    def files() -> dict[str, tuple[int, int]]:
        paths = (path for path in (finished / "toy/train").rglob("*") if path.is_file() and path.suffix != ".lock")
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    before = files()
    with pytest.raises(InputError):
        units(config(*TINY, f"exp={finished}", *overrides))[0].run()
    assert files() == before and len(list((finished / "toy/train").iterdir())) == 2, "the run and its lock"
