"""The last lines of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

from asr_am.stages.closing import closing_lines
from tests.support.configurations import config


def write_score(root: Path, system: str, lm: str, dev_wer: float, errors: int) -> None:
    folder = root / "score" / f"{system}_{lm}"
    folder.mkdir(parents=True)
    score = {"system": system, "lm": lm, "dev_wer": dev_wer, "all": {"errors": errors, "words": 200}}
    (folder / "wer.json").write_text(json.dumps(score))


def lines_of(exp: Path, *overrides: str) -> list[str]:
    return closing_lines(config("corpus=an4", f"exp={exp}", *overrides), "an4", overrides)


def test_each_system_has_its_error_rate_with_the_best_lm_on_dev(tmp_path: Path) -> None:
    assert lines_of(tmp_path) == []
    for system, lm, dev_wer, errors in (
        ("mono", "kn2", 30, 50), ("mono", "kn3", 20, 60), ("blstm-local-b64-s1", "kn3", 9, 10),
        ("blstm-local-b64-s1", "kn3+lstm", 8, 9), ("blstm-local-b64-s1_other", "kn3", 1, 0),
    ):  # fmt: skip
        write_score(tmp_path / "an4", system, lm, dev_wer, errors)
    rates, report, command = lines_of(tmp_path)
    assert rates == "word error rate: mono 30.00 % (kn3), blstm-local-b64-s1 4.50 % (kn3+lstm)"
    assert report == f"report: {tmp_path}/an4/report/index.html, as Markdown {tmp_path}/an4/RESULTS.md"
    assert command == ("next, for example: recipes/an4/run.sh --stage 6 strategy=sync launcher=virtual learners=4")
    write_score(tmp_path / "an4", "sat", "kn3", 25, 55)
    command = lines_of(tmp_path, "strategy=bmuf", "launcher=virtual", "learners=2")[2]
    assert command == f"next, for example: python -m asr_am.transcribe --model {tmp_path}/an4/decode/mono_kn3 my.wav"
