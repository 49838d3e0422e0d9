"""The command that results name as theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from asr_am.stages.report import command_line, targets
from tests.support.configurations import config


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


def test_what_a_corpus_is_reaches_the_report(tmp_path: Path) -> None:
    minicts, an4 = (targets(config(f"corpus={corpus}", f"exp={tmp_path}", "run=a"))[0] for corpus in ("minicts", "an4"))
    assert "say nothing about human speech" in minicts.config["description"]
    assert "description" not in an4.config
