"""Tests the report's section on rescoring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.report.write import write_report
from tests.support.report_files import SEGMENTS, write_score


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    corpus = tmp_path / "tiny"
    write_score(corpus, "tri", "kn3", [2] * SEGMENTS)
    write_score(corpus, "tri", "kn3+lstm", [1, 2] * (SEGMENTS // 2))
    folder = corpus / "rescore/tri_kn3+lstm"
    folder.mkdir(parents=True)
    perplexities = {"ngram": 31.86, "lstm": 27.08, "mixture": 22.65}
    record = {
        "weight": 0.64,
        "dev": {"perplexity": perplexities},
        "test": {"perplexity": {**perplexities, "lstm": 26.0}},
    }
    (folder / "rescore.json").write_text(json.dumps(record))
    described = {"name": "lstm", "source": "train.txt", "parameters": 417962, "dev_perplexity": 27.08}
    (corpus / "lm/lstm").mkdir(parents=True)
    (corpus / "lm/lstm/lm.json").write_text(json.dumps({**described, "dev_words": 967, "dev_oov": 2}))
    return corpus


def report(corpus_dir: Path) -> str:
    write_report(corpus_dir, corpus_dir / "report", "x")
    return (corpus_dir / "RESULTS.md").read_text()


def test_perplexities_and_differences(corpus_dir: Path) -> None:
    text = report(corpus_dir)
    assert "| kn3+lstm | 0.64 | 31.9 | 27.1 | 22.6 | 31.9 | 26.0 | 22.6 |" in text
    assert "| tri | kn3+lstm | kn3 | -5.00 [" in text and "| too few words (600) |" in text
    assert "| lstm | train.txt | 417,962 parameters | 27.1 | 2 of 967 |" in text
    assert "| tri | **20.00** | **15.00** |" in text


def test_without_the_ngrams_score_there_are_perplexities_only(corpus_dir: Path) -> None:
    for path in (corpus_dir / "score/tri_kn3").iterdir():
        path.unlink()
    (corpus_dir / "score/tri_kn3").rmdir()
    assert "| kn3+lstm | 0.64 |" in report(corpus_dir)


def test_no_section_where_nothing_was_rescored(corpus_dir: Path) -> None:
    (corpus_dir / "rescore").rename(corpus_dir / "elsewhere")
    assert "Rescored" not in report(corpus_dir)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight": "much"}'])
def test_a_broken_record(corpus_dir: Path, content: str) -> None:
    (corpus_dir / "rescore/tri_kn3+lstm/rescore.json").write_text(content)
    with pytest.raises(InputError, match=r"rescore.json: .*again"):
        report(corpus_dir)
