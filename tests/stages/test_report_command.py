"""The command that results name as theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from asr_am.stages.layout import layout
from asr_am.stages.report import command_line, targets, wer_table
from tests.support.configurations import config
from tests.support.report_files import write_score


@pytest.mark.parametrize(
    ("corpus", "words", "command"),
    [
        ("an4", ["corpus=an4", "nj=4", "seed=1,2", "systems=[sat]"], "recipes/an4/run.sh seed=1,2 'systems=[sat]'"),
        ("an4", ["--multirun", "corpus=an4"], "recipes/an4/run.sh"),
        (
            "mine",
            ["corpus=kaldi", "corpus.name=mine", "+corpus.prepare.folder=x", "~corpus.lms.kn3", "lexicon_probs=false"],
            "recipes/kaldi/run.sh --name mine ... lexicon_probs=false",
        ),
        ("mine", ["corpus=kaldi", "corpus.prepare.train=data/train"], "recipes/kaldi/run.sh --name mine ..."),
    ],
)
def test_options_that_change_results_are_in_the_command(
    monkeypatch: pytest.MonkeyPatch, corpus: str, words: list[str], command: str
) -> None:
    monkeypatch.setattr(HydraConfig, "initialized", staticmethod(lambda: True))
    monkeypatch.setattr(sys, "argv", ["stage", *words])
    assert command_line(corpus) == command


def test_unfinished_scores_are_not_shown_and_a_renamed_one_is_another(tmp_path: Path) -> None:
    cfg = config("corpus=minicts", f"exp={tmp_path}", "run=a")
    folder = write_score(tmp_path / "minicts", "tri", "kn3", [1, 2])
    for left in ("tri_kn3.partial", "tri_kn3.unfinished2"):
        (folder.parent / left).mkdir()
        (folder.parent / left / "wer.json").write_text('{"sys')
    before = targets(cfg)[0]
    assert {path.parent for path in before.inputs} == {folder}
    assert wer_table(layout(cfg)).count("tri_kn3") == 1
    folder.rename(folder.parent / "other_kn3")
    assert targets(cfg)[0].config != before.config


def test_what_a_corpus_is_reaches_the_report(tmp_path: Path) -> None:
    minicts, an4 = (targets(config(f"corpus={corpus}", f"exp={tmp_path}", "run=a"))[0] for corpus in ("minicts", "an4"))
    assert "say nothing about human speech" in minicts.config["description"]
    assert "description" not in an4.config
