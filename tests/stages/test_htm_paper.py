"""The targets of a configuration with Ladkat et al.'s model, features and schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.models.lstm import LstmOptions
from asr_am.stages import decode, egs, features, train
from asr_am.stages.sections import values
from asr_am.stages.train_config import schedule_values
from asr_am.train.schedule import Newbob
from asr_am.train.train_options import TrainOptions
from tests.support.configurations import config

PAPER = ("features=lfbe64_lfr", "model=lstm_htm_paper", "schedule=newbob")


def options(cfg: DictConfig) -> TrainOptions:
    model = {name: value for name, value in values(cfg.model).items() if name != "name"}
    return TrainOptions.build(values(cfg.train), model, schedule_values(cfg), cfg.seed)


@pytest.mark.parametrize("corpus", ["minicts", "an4", "kaldi"])
def test_the_paper_on_every_corpus(corpus: str) -> None:
    named = ["corpus.name=mine"] if corpus == "kaldi" else []
    cfg = config(*PAPER, f"corpus={corpus}", "model.layers=5", "model.cells=768", *named)
    built = options(cfg)
    assert isinstance(built.schedule, Newbob) and isinstance(built.model, LstmOptions)
    assert (built.model.layers, built.model.cells, built.model.lookahead) == (5, 768, 3)
    folders = {target.out.name: target for target in features.targets(cfg)}
    assert set(folders) == {"mfcc", "logmel", "lfbe64"} and folders["lfbe64"].config["num_bins"] == 64
    assert folders["lfbe64"].config["resample"] == folders["logmel"].config["resample"]


def test_examples_are_made_from_the_features_that_are_stacked() -> None:
    (target,) = egs.targets(config("features=lfbe64_lfr"))
    assert target.out.name.startswith("lfbe64_lfr-") and [path.name for path in target.inputs] == ["lfbe64", "align"]
    assert "random_phase" not in target.config and "random_phase" not in egs.targets(config())[0].config
    (phased,) = egs.targets(config("features=lfbe64_lfr", "features.random_phase=true"))
    assert phased.config["random_phase"] is True
    run = next(
        u for u in decode.targets(config("features=lfbe64_lfr", "systems=[nnet]")) if u.out.parent.name == "decode"
    )
    assert "lfbe64" in {path.name for path in run.inputs}


def test_a_start_is_a_source_of_the_run_and_nothing_is_where_none_is_given(tmp_path: Path) -> None:
    def sources(*overrides: str) -> tuple[list[Path], object]:
        (target,) = train.targets(config(*overrides))
        return list(target.inputs), target.config["train"]

    plain_inputs, plain = sources()
    assert isinstance(plain, dict) and "init" not in plain and plain["subset"] == 1.0
    inputs, with_init = sources(f"train.init={tmp_path}/best.pt")
    assert inputs == [*plain_inputs, tmp_path / "best.pt"] and with_init == plain
    assert sources("train.subset=0.125")[1] == plain | {"subset": 0.125}
    (target,) = train.targets(config(f"train.init={tmp_path}/best.pt"))
    with pytest.raises(InputError, match="does not exist"):
        target.key()


def test_a_corpus_says_when_small_schedules_anneal() -> None:
    assert config().schedule.anneal_from == config("corpus=an4").schedule.anneal_from == 6
    assert config("schedule=anneal").schedule.anneal_from == 6
    assert config("corpus=an4", "schedule=anneal").schedule.anneal_from == 11
    assert config("schedule.anneal_from=9").schedule.anneal_from == 9
