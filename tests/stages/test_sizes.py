from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.stages.data import copy_speeds
from asr_am.stages.resolvers import row_for_hours
from tests.support.configurations import config


def config_of(exp: Path, *overrides: str) -> DictConfig:
    return config("corpus=kaldi", "corpus.name=mine", f"exp={exp}", *overrides)


@pytest.mark.parametrize(
    ("hours", "leaves", "cells"),
    [(0.2, 150, 128), (0.63, 300, 128), (0.95, 2000, 128), (5, 2500, 256), (400, 9000, 512)],
)
def test_sizes_follow_the_hours_of_speech(tmp_path: Path, hours: float, leaves: int, cells: int) -> None:
    (tmp_path / "mine/data").mkdir(parents=True)
    (tmp_path / "mine/data/corpus.json").write_text(f'{{"hours": {hours}}}')
    cfg = config_of(tmp_path)
    assert (cfg.align.tri.leaves, cfg.model.cells) == (leaves, cells)
    assert config_of(tmp_path, "model.cells=7").model.cells == 7


def test_sizes_of_other_models_do_too(tmp_path: Path) -> None:
    conformer = config_of(tmp_path, "corpus.hours=20", "model=conformer").model
    assert (conformer.layers, conformer.width, conformer.feed_forward) == (8, 192, 768)
    tdnnf = config_of(tmp_path, "corpus.hours=20", "model=tdnnf").model
    assert (tdnnf.far_layers, tdnnf.width, tdnnf.bottleneck) == (9, 768, 96)


@pytest.mark.parametrize(("hours", "epochs"), [(0.2, None), (0.6, (20, 13)), (2, (20, 13)), (5, (12, 8)), (20, None)])
def test_a_second_network_is_trained_from_20_minutes_to_6_hours(
    tmp_path: Path, hours: float, epochs: tuple[int, int] | None
) -> None:
    second = config_of(tmp_path, f"corpus.hours={hours}").second
    assert ((second.epochs, second.anneal_from) if second.train else None) == epochs


@pytest.mark.parametrize("other", ["train=chain", "train=ctc", "features=lfbe64_lfr"])
def test_what_needs_an_output_per_frame_is_not_trained_without_being_asked_for(tmp_path: Path, other: str) -> None:
    cfg = config_of(tmp_path, "corpus.hours=2")
    assert cfg.mmi.train and cfg.second.train
    cfg = config_of(tmp_path, "corpus.hours=2", other)
    assert not cfg.mmi.train and not cfg.second.train
    assert config_of(tmp_path, "corpus.hours=2", other, "mmi.train=true").mmi.train


def test_at_the_size_of_an4_they_are_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine/data").mkdir(parents=True)
    (tmp_path / "mine/data/corpus.json").write_text('{"hours": 0.63}')
    cfg = config_of(tmp_path, "train.one_speed=false")
    an4 = config("corpus=an4")
    for group in ("align", "model", "train", "egs", "schedule"):
        assert cfg[group] == an4[group], group
    for model in ("conformer", "tdnnf"):
        ours = config_of(tmp_path, f"model={model}").model
        assert config("corpus=an4", f"model={model}").model == ours


def test_copies_at_other_speeds_are_for_the_network_and_not_for_kaldis_alignments(tmp_path: Path) -> None:
    cfg = config_of(tmp_path)
    assert copy_speeds(cfg) == [0.9, 1.1] and cfg.train.one_speed and not cfg.speed_perturb_gmms
    assert copy_speeds(config_of(tmp_path, "align=kaldi")) == copy_speeds(config_of(tmp_path, "speed_perturb=[]")) == []


def test_hours_beyond_every_row_are_refused() -> None:
    with pytest.raises(InputError, match="no row for 3 hours"):
        row_for_hours([{"hours": 1}], 3)
    with pytest.raises(InputError, match=r"corpus.hours=-1: must not be negative"):
        row_for_hours([{"hours": 1}], -1)


def test_silence_phones_beside_the_lexicon_are_an_input_where_there_are_any(tmp_path: Path) -> None:
    lexicon, phones = tmp_path / "lexicon.txt", tmp_path / "silence_phones.txt"
    given = f"corpus.prepare.lexicon={lexicon}"
    assert str(phones) not in config_of(tmp_path, given).corpus.inputs
    phones.write_text("SIL\n")
    assert str(phones) in config_of(tmp_path, given).corpus.inputs
    assert set(config_of(tmp_path).corpus.inputs) == {None}


@pytest.mark.parametrize("row", [{"hours": "many"}, {"leaves": 100}, {"hours": None}, {"hours": True}, 7])
def test_a_row_without_hours_is_named(row: object) -> None:
    with pytest.raises(InputError, match=r"corpus\.sizes\[1\]: hours is .*a number"):
        row_for_hours([{"hours": 1}, row], 3)  # type: ignore[list-item]
