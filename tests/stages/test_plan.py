"""The plan of a recipe: published hours on IBM's clusters, growth with the hours of speech, and the kept speeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.stages import plan, speeds
from asr_am.stages.option_checks import compose_job
from asr_am.stages.resolvers import composing

SWB2000 = ["corpus=kaldi", "corpus.name=swb", "corpus.hours=2000", "features=fusion260", "align=sat", "train=paper"]
SWB2000 += ["train.epochs=16", "train.batch_size=2560", "launcher=virtual"]
SWB2000 += ["workload=swb2000_lstm", "schedule=anneal"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "SECONDS", 0.01)
    monkeypatch.setattr(speeds, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(plan, "SHARE", 0.0)
    monkeypatch.setattr(plan, "LEAST_BATCHES", 500)


def config(exp: Path, *overrides: str) -> DictConfig:
    with composing():
        return compose_job([f"exp={exp}", *overrides])


@pytest.mark.parametrize(
    ("cluster", "learners", "strategy", "published"),
    [("ibm_a", 16, "adpsgd", 13.98), ("ibm_a", 16, "sync", 16 * 1.09), ("ibm_b", 32, "hybrid", 11.5)],
)
def test_hours_of_swb2000_are_those_published(
    tmp_path: Path, cluster: str, learners: int, strategy: str, published: float
) -> None:
    form = ["strategy.form=weights"] if strategy == "sync" else []
    cfg = config(tmp_path, *SWB2000, f"cluster={cluster}", f"learners={learners}", f"strategy={strategy}", *form)
    train = 2000 * plan.FRAMES
    need = plan.training(cfg, train, speed=300.0, outputs=9000)
    assert need.hours == pytest.approx(published, rel=0.1)
    assert "MB a step and learner" in need.note and need.core_hours == pytest.approx(16 * train / 300 / 3600)


def test_sequence_training_is_a_stage_of_its_own(tmp_path: Path) -> None:
    cfg = config(tmp_path, "corpus=minicts", "corpus.hours=10", "mmi.train=true")
    needs = {need.stage: need for need in plan.plan(cfg)[0]}
    train, paths = 10 * plan.FRAMES * 3, plan.PER_FRAME["paths"] / 1e6
    per_frame = needs["train"].core_hours / (10 * plan.FRAMES * cfg.train.epochs)
    assert needs["train mmi"].core_hours == pytest.approx(train * (per_frame + paths / 3600))
    assert needs["train mmi"].note.startswith(f"{train / 3 / 63 / 32:,.0f} updates")


def test_further_epochs_with_dev_are_stages_of_their_own(tmp_path: Path) -> None:
    cfg = config(tmp_path, "corpus=minicts", "corpus.hours=10", "second.train=true", "final.train=true")
    needs = {need.stage: need for need in plan.plan(cfg)[0]}
    for name, epochs in (("train", cfg.train.epochs), ("train second", cfg.second.epochs)):
        share = needs[f"{name} final"].core_hours / needs[name].core_hours
        assert share == pytest.approx(cfg.final.epochs / epochs * (1 + plan.EVALUATED))


def test_a_second_network_is_a_stage_of_its_own(tmp_path: Path) -> None:
    options = ("corpus=minicts", "corpus.hours=10")
    alone = {need.stage: need for need in plan.plan(config(tmp_path, *options))[0]}
    cfg = config(tmp_path, *options, "second.train=true", "second.epochs=7")
    needs = {need.stage: need for need in plan.plan(cfg)[0]}
    assert needs["train"] == alone["train"] and needs["train second"].core_hours > 0
    assert needs["train second"].note.startswith(f"{10 * plan.FRAMES / 63 / 21:,.0f} updates")
    assert needs["decode"].core_hours > alone["decode"].core_hours


def test_copies_at_other_speeds_cost_what_is_done_with_them(tmp_path: Path) -> None:
    def core_hours(*overrides: str) -> dict[str, float]:
        given = ("corpus=minicts", "corpus.hours=10", "speed_perturb=[]", "train.one_speed=false", *overrides)
        needs, _ = plan.plan(config(tmp_path, *given))
        return {need.stage: need.core_hours for need in needs}

    plain, copies = core_hours(), core_hours("speed_perturb=[0.9,1.1]", "speed_perturb_gmms=true")
    assert core_hours("speed_perturb=[0.9,1.1]", "speed_perturb_below=10") == plain
    one_speed = core_hours(
        "speed_perturb=[0.9,1.1]", "speed_perturb_gmms=true", "speed_perturb_below=11", "train.one_speed=true"
    )
    assert copies["train"] == pytest.approx(3 * plain["train"]) and one_speed == copies | {"train": plain["train"]}
    assert copies["egs"] > 2 * plain["egs"]
    without = core_hours("speed_perturb=[0.9,1.1]", "speed_perturb_gmms=false")
    assert plain["align"] < without["align"] < 1.5 * plain["align"] < 2 * plain["align"] < copies["align"]
    assert without | {"align": 0} == copies | {"align": 0}


def test_needs_grow_with_the_speech(tmp_path: Path) -> None:
    short, known = plan.plan(config(tmp_path, "corpus=minicts"))
    assert [need.stage for need in short] == ["data", "features", "align", "speaker", "egs", "train", "decode"]
    assert all(need.core_hours > 0 and need.hours > 0 and need.memory > 0 for need in short)
    written = (tmp_path / "speeds-blstm.json").read_text()
    long, again = plan.plan(config(tmp_path, "corpus=minicts", "corpus.hours=10"))
    assert again == known and (tmp_path / "speeds-blstm.json").read_text() == written
    for before, after in zip(short, long, strict=True):
        assert 4 * before.core_hours < after.core_hours < 15 * before.core_hours, before.stage
    lines = plan.table(long)
    assert len(lines) == len(long) + 2 and lines[-1].startswith("all")
    fewer, _ = plan.plan(config(tmp_path, "corpus=minicts", "align=triphone", "features=logmel"))
    assert "speaker" not in [need.stage for need in fewer] and fewer[2].core_hours < short[2].core_hours


def test_the_plan_has_what_stage_speaker_makes(tmp_path: Path) -> None:
    def cost(align: str, features: str) -> float:
        cfg = config(tmp_path, "corpus=minicts", f"align={align}", "features=logmel", f"features.name={features}")
        needs, known = plan.plan(cfg)  # another width of inputs is measured again
        return known.features * sum(need.core_hours for need in needs if need.stage == "speaker")

    adaptation, ivectors = cost("sat", "logmel"), cost("triphone", "ivector+logmel")
    assert adaptation > 0 and ivectors > 0 and cost("triphone", "logmel") == 0
    assert cost("sat", "ivector+logmel") == pytest.approx(adaptation + ivectors)


def test_speeds_are_measured_again_for_another_network_or_processor(tmp_path: Path) -> None:
    path = tmp_path / "speeds-blstm.json"
    first = speeds.speeds(path, {"cells": 8, "layers": 1}, 5, 9, 21)
    assert speeds.speeds(path, {"cells": 8, "layers": 1}, 5, 9, 21) == first
    assert speeds.speeds(path, {"cells": 9, "layers": 1}, 5, 9, 21).network != first.network
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processor": "another", "training": 1.0}))
    assert speeds.speeds(path, {"cells": 9, "layers": 1}, 5, 9, 21).training > 1.0
    path.write_text("{")
    with pytest.raises(InputError, match=r"speeds-blstm.json: not readable .*remove it"):
        speeds.speeds(path, {"cells": 9, "layers": 1}, 5, 9, 21)


def test_unknown_hours_and_too_many_learners_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"corpus.hours=HOURS"):
        plan.plan(config(tmp_path, "corpus=an4"))
    with pytest.raises(InputError, match=r"learners=17: cluster ibm_a has"):
        plan.plan(config(tmp_path, "corpus=minicts", "launcher=virtual", "learners=17", "cluster=ibm_a"))
