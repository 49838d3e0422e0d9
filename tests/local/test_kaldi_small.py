"""recipes/kaldi chooses systems that can be trained on the speech that there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from local.kaldi.small import UNADAPTED, overrides_by_size
from tests.support.configurations import config


def write_corpus(exp: Path, hours: float) -> list[str]:
    (exp / "mine/data").mkdir(parents=True)
    (exp / "mine/data/corpus.json").write_text(json.dumps({"hours": hours}), encoding="utf-8")
    return ["corpus.name='mine'", f"exp={exp}"]


def test_little_speech_is_not_adapted_to_speakers(tmp_path: Path) -> None:
    given = write_corpus(tmp_path, 1 / 60)
    overrides, why = overrides_by_size(given)
    assert overrides == UNADAPTED
    assert why.startswith("mine: 1.0 minutes of training speech are too few for speaker adaptation, which needs 3")
    cfg = config("corpus=kaldi", *given, *overrides)
    assert (cfg.align.system, cfg.features.name, "sat" in cfg.align) == ("tri", "logmel", False)


@pytest.mark.parametrize("chosen", ["align=sat", "features=fmllr", "align.sat.leaves=9", "+experiment=fusion"])
def test_what_the_user_has_chosen_stays(tmp_path: Path, chosen: str) -> None:
    assert overrides_by_size([*write_corpus(tmp_path, 1 / 60), chosen]) == ((), "")


@pytest.mark.parametrize("options", [[], ["corpus.adapted_hours=0.01"]])
def test_enough_speech_is_adapted(tmp_path: Path, options: list[str]) -> None:
    given = write_corpus(tmp_path, 0.02 if options else 0.05)
    assert overrides_by_size([*given, *options]) == ((), "")


def test_before_stage_data_nothing_is_chosen(tmp_path: Path) -> None:
    assert overrides_by_size(["corpus.name=mine", f"exp={tmp_path}"]) == ((), "")
