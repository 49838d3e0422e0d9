"""What a configuration of Ladkat et al.'s model, features and schedule says to the stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.model.lstm_lookahead import LstmOptions
from asr_am.stages import decode, egs, features, train
from asr_am.stages.app import values
from asr_am.train.schedule import Newbob
from asr_am.train.train_options import TrainOptions
from tests.stages.test_train import config

PAPER = ("features=lfbe64_lfr", "model=lstm_htm_paper", "schedule=newbob")


def options(cfg: DictConfig) -> TrainOptions:
    model = {name: value for name, value in values(cfg.model).items() if name != "name"}
    return TrainOptions.build(values(cfg.train), model, values(cfg.schedule), cfg.seed)


@pytest.mark.parametrize("corpus", ["minicts", "an4", "kaldi"])
def test_the_paper_on_every_corpus(corpus: str) -> None:
    named = ["corpus.name=mine"] if corpus == "kaldi" else []
    cfg = config(*PAPER, f"corpus={corpus}", "model.layers=5", "model.cells=768", *named)
    built = options(cfg)
    assert isinstance(built.schedule, Newbob) and isinstance(built.model, LstmOptions)
    assert (built.model.layers, built.model.cells, built.model.lookahead) == (5, 768, 3)
    folders = {unit.out.name: unit for unit in features.units(cfg)}
    assert set(folders) == {"mfcc", "logmel", "lfbe64"} and folders["lfbe64"].config["num_bins"] == 64
    assert folders["lfbe64"].config["resample"] == folders["logmel"].config["resample"]


def test_examples_are_made_from_the_features_that_are_stacked() -> None:
    (unit,) = egs.units(config("features=lfbe64_lfr"))
    assert unit.out.name.startswith("lfbe64_lfr-") and [path.name for path in unit.inputs] == ["lfbe64", "align"]
    assert "random_phase" not in unit.config and "random_phase" not in egs.units(config())[0].config
    (phased,) = egs.units(config("features=lfbe64_lfr", "features.random_phase=true"))
    assert phased.config["random_phase"] is True
    run = next(
        u for u in decode.units(config("features=lfbe64_lfr", "systems=[nnet]")) if u.out.parent.name == "decode"
    )
    assert "lfbe64" in {path.name for path in run.inputs}


def test_a_start_is_a_source_of_the_run_and_nothing_is_where_none_is_given(tmp_path: Path) -> None:
    def sources(*overrides: str) -> tuple[list[Path], object]:
        (unit,) = train.units(config(*overrides))
        return list(unit.inputs), unit.config["train"]

    plain_inputs, plain = sources()
    assert isinstance(plain, dict) and not {"init", "subset"} & plain.keys()
    inputs, with_init = sources(f"train.init={tmp_path}/best.pt")
    assert inputs == [*plain_inputs, tmp_path / "best.pt"] and with_init == plain
    assert sources("train.subset=0.125")[1] == plain | {"subset": 0.125}
    (unit,) = train.units(config(f"train.init={tmp_path}/best.pt"))
    with pytest.raises(InputError, match="does not exist"):
        unit.key()


def test_a_corpus_says_when_small_schedules_anneal() -> None:
    assert config().schedule.anneal_from == 4 and config("corpus=an4").schedule.anneal_from == 6
    assert config("corpus=an4", "schedule=anneal").schedule.anneal_from == 11
    assert config("schedule.anneal_from=9").schedule.anneal_from == 9
