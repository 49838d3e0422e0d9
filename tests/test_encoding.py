"""Files are UTF-8 in every locale: our own name their encoding, and libraries run in Python's UTF-8 mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.kaldi_corpus import write_kaldi_dir

ROOT = Path(__file__).resolve().parents[1]
LEXICON = "JA Y A\nNÄHE N \u00c6 E\nONE W AH N\nTWO T UW\n"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # an encoding that lacks these letters


def test_every_file_that_is_opened_as_text_names_its_encoding() -> None:
    rule = ["--preview", "--select", "PLW1514"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *rule, "."], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout


def write_corpus(folder: Path) -> list[str]:
    for subset, prefix in (("train", "ä"), ("test", "ö")):
        write_kaldi_dir(folder / subset, prefix, speakers=6)
        text = folder / subset / "text"
        text.write_text(text.read_text("utf-8").replace("YES", "JA").replace("NO", "NÄHE"), encoding="utf-8")
    (folder / "lexicon.txt").write_text(LEXICON, encoding="utf-8")
    prepare = {name: folder / name for name in ("train", "test")} | {"lexicon": folder / "lexicon.txt"}
    return [f"corpus.prepare.{name}='{path}'" for name, path in prepare.items()]


def test_stages_data_and_lang_write_utf8(tmp_path: Path) -> None:
    overrides = write_corpus(tmp_path / "Müller")
    for stage in ("data", "lang"):
        done = subprocess.run(
            [sys.executable, "-m", f"asr_am.stages.{stage}", "corpus=kaldi", "corpus.name=x", "nj=1", "logger=none",
             f"exp={tmp_path}/exp", *overrides],
            cwd=ROOT, env=os.environ | ASCII, capture_output=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode(errors="replace")
    root = tmp_path / "exp/x"
    for path in [*root.rglob("*.txt"), *root.rglob("*.json"), *root.rglob("*.log"), *root.rglob("ref.stm")]:
        path.read_text(encoding="utf-8")
    assert "NÄHE" in (root / "data/test/ref.stm").read_text("utf-8")
    assert "\u00c6_I" in (root / "lang/phones.txt").read_text("utf-8")
    from asr_am.data.manifests import read_recordings, read_supervisions

    assert {segment.speaker for segment in read_supervisions(root / "data", "test")} == {f"ö{n}" for n in range(6)}
    sources = [Path(recording.sources[0].source) for recording in read_recordings(root / "data", "test")]
    assert all(path.exists() for path in sources)


def test_a_program_runs_in_utf8_mode_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "ref.stm").write_text("f A amy 0 1 <O> Nähe\n", encoding="utf-8")
    (tmp_path / "hyp.ctm").write_text("f A 0 0.4 Nähe 1\n", encoding="utf-8")
    command = ["-m", "asr_am.score", "--stm", str(tmp_path / "ref.stm"), "--ctm", str(tmp_path / "hyp.ctm"), "--errors"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "fehler-ä.txt")],
        cwd=ROOT,
        env=os.environ | ASCII,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Nähe".lower() in (tmp_path / "fehler-ä.txt").read_text("utf-8")
