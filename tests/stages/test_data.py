"""Stage data: when it adds copies at other speeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asr_am.data.manifests import read_supervisions
from asr_am.stages import data
from tests.support.manifest_corpus import write_corpus
from tests.support.toy_stage import ROOT

HOURS = 2 * 3 * 0.9 / 3600  # of the training speech of `write_corpus`


@pytest.mark.parametrize(("below", "copies"), [(float("inf"), 2), (1.01 * HOURS, 2), (0.99 * HOURS, 0)])
def test_copies_are_made_below_a_number_of_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: float, copies: int
) -> None:
    monkeypatch.setattr(data, "corpus_function", lambda *_: lambda out, jobs: write_corpus(out))
    data.prepare({"_target_": "local.tiny.prepare"}, [0.9, 1.1], below, 1, ["train", "dev", "test"], tmp_path)
    assert len(list(read_supervisions(tmp_path, "train"))) == 6 * (1 + copies)
    assert len(list(read_supervisions(tmp_path, "dev"))) == 6


def test_copies_that_are_left_out_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data, "corpus_function", lambda *_: lambda out, jobs: write_corpus(out))
    arguments = ({"_target_": "local.tiny.prepare"}, [], float("inf"), 1, ["train", "dev", "test"])
    with caplog.at_level("INFO"):
        data.prepare(*arguments, tmp_path / "none", asked=[])
        assert "speed_perturb" not in caplog.text
        data.prepare(*arguments, tmp_path / "left out", asked=[0.9, 1.1])
    assert "speed_perturb=[0.9, 1.1]: left out, as align=kaldi" in caplog.text


def test_another_package_local_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local/__init__.py").write_text("")
    function = "corpus_function('local.minicts.prepare.prepare', 'corpus.prepare._target_')"
    code = f"from asr_am.stages.data import corpus_function; print({function}.__module__)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "local.minicts.prepare\n", done.stderr
    command = [sys.executable, "-c", f"import local; {code}"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert f"{tmp_path}/local/__init__.py: Python has imported this package `local`" in done.stderr
