"""Stage train: its target, its typed configuration, and the launchers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.leases import HostLost, ProcessLost
from asr_am.distributed.strategies.psp import Psp
from asr_am.errors import InputError
from asr_am.stages import egs
from asr_am.stages.layout import denominator_path, egs_dir, run_dir
from asr_am.stages.sections import LaunchOptions, values
from asr_am.stages.target import KEY
from asr_am.stages.train import (
    check_options,
    on_hosts_left,
    on_processes_left,
    small_strategy,
    targets,
    train_simulated,
    warn_if_crowded,
)
from asr_am.stages.train_config import TrainConfig, schedule_values, strategy_factory
from asr_am.train import simulate, train_options
from asr_am.train.tracking import NoTracker
from tests.support.configurations import CONF, config
from tests.support.egs_examples import write_examples


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("name", choices("strategy"))
def test_every_strategy_can_be_made_from_its_file(name: str) -> None:
    cfg = config(f"strategy={name}")
    assert cfg.strategy.name == name
    factory = strategy_factory(values(cfg.strategy))
    assert factory.func.name == name


@pytest.mark.parametrize(
    ("cluster", "workload"),
    [*((name, "self") for name in choices("cluster")), *(("local", name) for name in choices("workload"))],
)
def test_clusters_and_workloads(cluster: str, workload: str) -> None:
    cfg = config(f"cluster={cluster}", f"workload={workload}", "cluster.faults.slow={3:10}")
    hardware = Cluster.build(values(cfg.cluster))
    assert hardware.name == cluster and hardware.faults.slow == {3: 10}
    assert Workload.build(values(cfg.workload)).name == workload


def test_runs_are_named_by_strategy_launcher_and_learners() -> None:
    names = {
        targets(config(*overrides))[0].out.name
        for overrides in (
            [],
            ["strategy=sync", "launcher=virtual", "learners=16"],
            ["strategy=sync", "launcher=process", "learners=4"],
        )
    }
    assert names == {"blstm-local-b64-s1", "blstm-sync-v16-b64-s1", "blstm-sync-p4-b64-s1"}


def test_the_cluster_is_a_source_of_a_virtual_run_only() -> None:
    def sources(*overrides: str) -> object:
        return targets(config(*overrides))[0].config

    slow = "cluster.faults.slow={0:2}"
    assert sources() == sources(slow)
    virtual = ("launcher=virtual", "learners=16", "strategy=sync")
    assert sources(*virtual) != sources(*virtual, slow)


def test_the_other_hosts_are_not_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ("strategy=sync", "learners=8", "launcher=process", "launcher.nodes=2", "launcher.address=h:1")
    assert targets(config(*two))[0].is_leader
    assert not targets(config(*two, "launcher.node_rank=1"))[0].is_leader
    monkeypatch.setenv("RANK", "3")
    assert not targets(config("strategy=sync", "learners=8", "launcher=torchrun"))[0].is_leader


def test_several_learners_need_a_launcher() -> None:
    with pytest.raises(InputError, match="need launcher=virtual"):
        targets(config("learners=4", "strategy=sync"))


def test_torchrun_must_have_started_as_many_processes_as_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"^learners=4: .* has started 2 processes"):
        targets(config("strategy=sync", "learners=4", "launcher=torchrun"))
    assert targets(config("strategy=sync", "learners=2", "launcher=torchrun"))
    assert targets(config("strategy=sync", "learners=4", "launcher=process"))


@pytest.mark.parametrize(("processes", "warns"), [(2, False), (64, True)])
def test_more_processes_than_cores_are_announced(
    processes: int, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(train_options, "cores", lambda: 2)
    overrides = ("strategy=sync", f"learners={processes}", "launcher=process", "train.device=cpu", "logger=none")
    warn_if_crowded(TrainConfig.parse(config(*overrides), tmp_path))
    assert any("64 processes will share 2 cores" in message for message in caplog.messages) == warns


@pytest.mark.parametrize(("threads", "used"), [(0, 1), (3, 3)])
def test_virtual_learners_compute_with_one_thread(
    threads: int, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Stop

    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(simulate, "SimCluster", stop)
    overrides = ("strategy=sync", "learners=2", "launcher=virtual", f"train.threads={threads}", "logger=none")
    parsed = TrainConfig.parse(config(*overrides), tmp_path)
    run = SimpleNamespace(options=parsed.options, learners=2, num_weights=2)
    with pytest.raises(Stop):
        train_simulated(replace(parsed, open_run=lambda *_: run))
    assert given == [used]


def test_torchrun_is_for_strategies_that_move_in_step(tmp_path: Path) -> None:
    for strategy in ("ps_sync", "adpsgd"):
        with pytest.raises(InputError, match=f"launcher=torchrun: strategy={strategy} is asynchronous"):
            TrainConfig.parse(
                config(f"strategy={strategy}", "learners=2", "launcher=torchrun", "logger=none"), tmp_path
            )
    groups = config("strategy=adpsgd", "strategy.group_size=2", "learners=4", "launcher=torchrun", "logger=none")
    assert TrainConfig.parse(groups, tmp_path).synchronous


def test_a_configuration_is_parsed_once_into_types(tmp_path: Path) -> None:
    (tmp_path / KEY).write_text("0123")
    cfg = config(
        "strategy=psp", "strategy.apart=true", "strategy.servers=2", "learners=4", "launcher=process",
        "launcher.nodes=3", "launcher.timeout=7", "cluster.faults.slow={3:10}", "logger=none",
    )  # fmt: skip
    parsed = TrainConfig.parse(cfg, tmp_path)
    assert (parsed.learners, parsed.servers, parsed.size, parsed.synchronous) == (4, 2, 6, False)
    assert parsed.launch_options == LaunchOptions(
        nodes=3, timeout=7, signals=["TERM", "USR1", "USR2"]
    ) and parsed.cluster.faults.slow == {3: 10}
    assert parsed.strategy.func is Psp and parsed.strategy.keywords["servers"] == 2
    assert isinstance(parsed.make_tracker(), NoTracker)
    assert parsed.provenance["config_hash"] == "0123" and parsed.provenance["faults"] == {"slow": {3: 10}}
    assert parsed.provenance["strategy_options"] == parsed.strategy.keywords


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launcher.nodes=3", r"^launcher\.nodes=3: 4 learners and servers cannot be divided"),
        ("launcher.nodes=0", r"^launcher\.nodes=0: "),
        ("launcher.wire=int8", r"^launcher\.wire=int8: must be 'float32', 'bfloat16' or 'float16'"),
        ("launcher.timeout=soon", r"^launcher\.timeout=soon: must be a number"),
        ("+launcher.ports=3", r"^launcher\.ports: there is no such option"),
        ("logger._target_=wandb.Traker", r"^logger\._target_=wandb\.Traker: must be in asr_am\.train\.tracking;"),
        ("logger._target_=asr_am.train.tracking.Traker", r"^logger\._target_=.*Traker: cannot be imported"),
        ("strategy._target_=x.Sync", r"^strategy\._target_=x\.Sync: must be in asr_am\.distributed\.strategies,"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig.parse(config("strategy=sync", "learners=4", "launcher=process", override), tmp_path)


def test_the_key_of_finished_runs_does_not_change() -> None:
    """Any change of these values would train every finished run again."""
    base = config("strategy=sync", "learners=4", "launcher=process", "corpus=an4")
    (target,) = targets(base)
    assert target.version == 1 and target.config == {
        "train": {
            "epochs": 10, "batch_size": 64, "subset": 1.0, "one_speed": False, "random_offset": True,
            "ivector_noise": 1.0, "label_smoothing": 0.0, "shuffle_buffer": 262144, "chunk": 0, "mmi": None,
            "chain": None, "accumulation": 1, "precision": "float32",
            "optimizer": {"kind": "adam", "momentum": 0.9, "weight_decay": 0.0, "clip_norm": 5.0},
            "masking": {"bands": 0, "band_width": 0, "spans": 0, "span_width": 0, "streams": 3},
        },
        "model": {
            "name": "blstm", "_target_": "asr_am.models.blstm.BlstmOptions", "layers": 2, "cells": 128,
            "projection": 256, "dropout": 0.2,
        },
        "schedule": {
            "_target_": "asr_am.train.schedule.Anneal", "base": 0.003, "anneal_from": 6, "anneal": 0.6,
            "warmup_batches": 50,
        },
        "strategy": {
            "name": "sync", "_target_": "asr_am.distributed.strategies.sync.Sync", "_partial_": True,
            "form": "gradients", "overlap": True,
        },
        "seed": 1,
        "launcher": "process",
        "learners": 4,
        "faults": {"slow": None, "crashes": [], "late_share": 0.0, "late_seconds": 0.0, "lost_share": 0.0},
    }  # fmt: skip


def test_the_type_on_the_wire_decides_the_result() -> None:
    for launcher in ("process", "virtual", "torchrun"):
        options = ("strategy=sync", "learners=4", f"launcher={launcher}")
        (full,), (half,) = targets(config(*options)), targets(config(*options, "launcher.wire=bfloat16"))
        assert half.config == full.config | {"wire": "bfloat16"}


def test_sequence_training_starts_from_the_run_and_has_its_learners() -> None:
    options = ("corpus=an4", "strategy=sync", "learners=4", "launcher=process")
    (only,), (first, second) = (
        targets(config(*options)),
        targets(cfg := config(*options, "mmi.train=true")),
    )
    assert (first.config, first.out) == (only.config, only.out)
    assert second.out == first.out.with_name("blstm-sync-p4-b64-mmi-s1")
    assert {first.out / "best.pt", denominator_path(cfg).parent} <= set(second.inputs)
    assert second.config["schedule"] == {"base": pytest.approx(0.17 * 0.003), "anneal_from": 2, "anneal": 0.6}
    changed = {"epochs": 3, "batch_size": 32, "chunk": 63, "mmi": {"acoustic_scale": 0.15, "ce_weight": 0.1}}
    assert second.config["train"] == first.config["train"] | changed
    assert {key: second.config[key] for key in ("model", "strategy", "learners", "seed")} == {
        key: first.config[key] for key in ("model", "strategy", "learners", "seed")
    }
    with pytest.raises(InputError, match=r"mmi.batch_size=32: learners=3 cannot divide it"):
        targets(config("corpus=an4", "mmi.train=true", "learners=3", "launcher=process"))
    with pytest.raises(InputError, match=r"mmi.train=true: .* lfbe64_lfr joins frames; use other features"):
        targets(config("align=triphone", "features=lfbe64_lfr", "mmi.train=true"))
    with pytest.raises(InputError, match=r"train.mmi: lfbe64_lfr joins frames; use other features"):
        egs.check_options(config("align=triphone", "features=lfbe64_lfr", "train.mmi={acoustic_scale:0.15}"))
    smoothed = targets(config("mmi.train=true", "train.label_smoothing=0.1"))
    assert [run.config["train"]["label_smoothing"] for run in smoothed] == [0.1, 0.0]


def test_the_second_network_is_another_model_with_what_suits_it() -> None:
    options = ("corpus=an4", "strategy=sync", "learners=4", "launcher=process", "second.train=true")
    first, second = targets(config(*options))
    assert (first.config, first.out) == (targets(config(*options[:-1]))[0].config, first.out)
    assert second.out == first.out.with_name("blstm-sync-p4-b64-conformer-s1") and second.inputs == first.inputs
    changed = {"epochs": 20, "batch_size": 24, "chunk": 63}  # four learners cannot divide 21
    assert second.config["train"] == first.config["train"] | changed
    (_, with_sgd) = targets(config(*options, "train=paper", "schedule=anneal"))
    assert with_sgd.config["train"]["optimizer"] == second.config["train"]["optimizer"]
    assert second.config["model"]["_target_"] == "asr_am.models.conformer.ConformerOptions"
    schedule = {
        "_target_": "asr_am.train.schedule.Anneal",
        "batch_ratio": pytest.approx((24 / 21) ** 0.5),
        "warmup_epochs": 12,
        "base": 0.001,
    }
    assert second.config["schedule"] == schedule | {"anneal_from": 13, "anneal": 0.6, "warmup_batches": 50}
    (_, other) = targets(config("second.train=true", "model=conformer", "model@second=blstm", "run=b"))
    assert other.out.name == "b-blstm" and other.config["train"]["batch_size"] == 64
    for wrong, message in (
        (("train=chain", "model=tdnnf"), "only networks trained with cross-entropy can be averaged"),
        (("align=triphone", "features=lfbe64_lfr"), "lfbe64_lfr joins frames"),
        (("second.epochs=0",), "second.epochs=0: must be at least 1"),
        (("second.suits.batch=many",), "second.suits.batch=many: must be a whole number"),
        (("second.model.name=a/b",), "second.model.name=a/b"),
    ):
        with pytest.raises(InputError, match=message):
            targets(config("second.train=true", *wrong))


@pytest.mark.parametrize(
    ("overrides", "left", "node_rank", "expected"),
    [
        ((), (0, 1, 3), 3, (24, 3, 2)),
        (("train.batch_size=64",), (0, 1, 3), 1, (16, 2, 1)),  # 24 learners cannot divide it
        (("strategy=adpsgd",), (0, 1, 3), 0, (24, 3, 0)),
        (("strategy=ps_sync", "strategy.apart=true", "strategy.servers=8", "learners=24"), (0, 2), 2, (8, 2, 1)),
        (("launcher.min_learners=25",), (0, 1, 3), 0, None),
        (("train.batch_size=64",), (0, 1, 3), 3, None),  # this host is not needed
    ],
)  # fmt: skip
def test_after_the_loss_of_a_host_the_others_are_the_largest_team_that_fits(
    overrides: tuple[str, ...], left: tuple[int, ...], node_rank: int, expected: tuple[int, ...] | None, tmp_path: Path
) -> None:
    hosts = ("launcher=process", "launcher.nodes=4", "launcher.address=a:1", f"launcher.node_rank={node_rank}")
    cfg = config("strategy=sync", "learners=32", "train.batch_size=96", *hosts, *overrides)
    lost = HostLost(16, "cannot be reached", left)
    if expected is None:
        with pytest.raises(HostLost, match="learner 16 cannot be reached"):
            on_hosts_left(cfg, TrainConfig.parse(cfg, tmp_path), lost)
        return
    smaller = on_hosts_left(cfg, TrainConfig.parse(cfg, tmp_path), lost)
    assert (smaller.learners, smaller.launcher.nodes, smaller.launcher.node_rank) == expected


@pytest.mark.parametrize(
    ("overrides", "rank", "left", "learners"),
    [
        ((), 3, 4, 4),  # a spare takes the place
        ((), 3, 3, 2),  # three learners cannot divide the batch
        (("strategy=ps_sync", "strategy.apart=true", "strategy.servers=2", "learners=2"), 1, 3, 1),
        (("launcher.min_learners=3",), 3, 3, None),
        ((), 0, 6, None),  # nobody would write the files of the stage
    ],
)  # fmt: skip
def test_after_the_loss_of_a_process_of_mpi_the_others_are_the_largest_team_that_fits(
    overrides: tuple[str, ...], rank: int, left: int, learners: int | None, tmp_path: Path
) -> None:
    cfg = config("strategy=sync", "learners=4", "train.batch_size=64", "launcher=mpi", *overrides)
    lost = ProcessLost(rank, left)
    if learners is None:
        with pytest.raises(ProcessLost, match=f"^learner {rank} has ended; start the same command again"):
            on_processes_left(cfg, TrainConfig.parse(cfg, tmp_path), lost)
    else:
        assert on_processes_left(cfg, TrainConfig.parse(cfg, tmp_path), lost).learners == learners


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("train=paper", "schedule=anneal"), {"base": 0.1, "anneal": 0.70710678, "warmup_batches": 0}),
        (("train.batch_size=16",), {"base": 0.0015, "anneal": 0.6, "warmup_batches": 50}),
        (("train.batch_size=256",), {"base": 0.003, "anneal": 0.6, "warmup_batches": 50, "batch_ratio": 2.0}),
        (("train.batch_size=256", "schedule.base=0.01"), {"base": 0.01, "anneal": 0.6, "warmup_batches": 50}),
    ],
)  # fmt: skip
def test_the_rate_of_a_run_follows_its_batch(overrides: tuple[str, ...], expected: dict[str, float]) -> None:
    cfg = config("schedule.anneal_from=4", *overrides)
    warmup = {"warmup_epochs": 3} if "batch_ratio" in expected else {}
    constant = {"_target_": "asr_am.train.schedule.Anneal", "anneal_from": 4}
    assert targets(cfg)[0].config["schedule"] == schedule_values(cfg) == constant | expected | warmup


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model=blstm",), (0, 64, 0.003, "21/10")), (("model=conformer",), (63, 21, 0.001, "63/31")),
        (("model=conformer", "train.chunk=21", "train.batch_size=84"), (21, 84, 0.001, "63/31")),
        (("model=conformer", "train=chain", "schedule.base=0.01"), (96, 16, 0.01, "63/31")),
    ],
)  # fmt: skip
def test_a_model_is_trained_and_decoded_with_what_suits_it(
    overrides: tuple[str, ...], expected: tuple[int, int, float, str]
) -> None:
    cfg = config(*overrides)
    assert (cfg.train.chunk, cfg.train.batch_size, schedule_values(cfg)["base"], cfg.decode.windows[0]) == expected


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_with_a_batch_has_a_rate(path: Path) -> None:
    """The results of an experiment were made with this rate, so it follows nothing."""
    file = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert "batch_size" not in file.get("train", {}) or "base" in file.get("schedule", {})


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
    assert targets(cfg)[0].run()
    return exp


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.base=-0.1",), ("schedule.base=x",), ("+schedule.kind=cosine",), ("schedule._target_=os.mkdir",),
        ("model.dropout=1.5",),
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
        targets(config(*TINY, f"exp={finished}", *overrides))[0].run()
    assert files() == before and len(list((finished / "toy/train").iterdir())) == 2, "the run and its lock"


@pytest.mark.parametrize("strategy", ["bmuf", "diloco", "slowmo", "htm"])
def test_a_block_that_never_ends_is_told_with_a_remedy(strategy: str, tmp_path: Path) -> None:
    groups = ("strategy.group_size=2",) if strategy == "htm" else ()
    cfg = config(*TINY, *VIRTUAL, f"strategy={strategy}", "strategy.block_size=50", *groups, f"exp={tmp_path}")
    made = small_strategy(TrainConfig.parse(cfg, tmp_path))
    (never,), (seldom,) = made.idle_options(steps=7, epochs=4), made.idle_options(steps=28, epochs=4)
    models = 2 if strategy == "htm" else 4
    assert never == (
        "strategy.block_size=50: each learner takes 7 steps in an epoch, and 28 in all, so that no block ends and "
        f"{models} models never meet; set it to 1, for 7 blocks in an epoch"
    )
    assert f"so that the {models} models meet in some epochs only; set it to 7," in seldom
    assert made.idle_options(steps=50, epochs=1) == []


@pytest.mark.parametrize("strategy", ["htm", "adpsgd", "bmuf"])
def test_a_group_that_does_not_fit_has_a_remedy(strategy: str, tmp_path: Path) -> None:
    cfg = config(*TINY, *VIRTUAL, "learners=2", f"strategy={strategy}", "++strategy.group_size=8", f"exp={tmp_path}")
    with pytest.raises(InputError, match=r"^strategy\.group_size=8: .* choose one of 1, 2, or change learners$"):
        check_options(cfg)


@pytest.mark.parametrize("strategy", ["bmuf", "diloco"])
def test_groups_need_a_strategy_of_their_own(strategy: str, tmp_path: Path) -> None:
    cfg = config(*TINY, *VIRTUAL, "learners=4", f"strategy={strategy}", "++strategy.group_size=2", f"exp={tmp_path}")
    with pytest.raises(InputError, match=r"group_size=2: .* add \+strategy@strategy\.inner=sync"):
        check_options(cfg)


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_a_finished_run_without_its_records_is_no_success(finished: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    cfg = config(*TINY, f"exp={tmp_path}")
    (run_dir(cfg) / name).write_text("")
    for _ in range(2):
        with pytest.raises(InputError, match=r"all epochs are done, so it is not written again|so lines are lost"):
            targets(cfg)[0].run()


def test_options_that_cannot_act_are_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = ("strategy=bmuf", "strategy.block_size=9999", "schedule.warmup_batches=8888")
    cfg = config(*TINY, *VIRTUAL, "learners=2", *slow, f"exp={tmp_path}")
    write_examples(egs_dir(cfg))
    targets(cfg)[0].run()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    block, warmup = (text for text in warnings if "9999" in text or "8888" in text)
    assert "no block ends and 2 models never meet" in block
    assert warmup.startswith("schedule.warmup_batches=8888: training has ") and "set it to" in warmup


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_though_all_is_up_to_date(finished: Path) -> None:
    cfg = config(*TINY, f"exp={finished}", "train.device=cuda")
    assert not targets(cfg)[0].run()
    with pytest.raises(InputError, match=r"^train\.device=cuda: this machine has no GPU that torch can use"):
        check_options(cfg)
