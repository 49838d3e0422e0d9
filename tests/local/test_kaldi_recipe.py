"""Tests recipes/kaldi/run.sh: options, and stages 0 to 2 on small directories at 8 kHz from 16 and 44.1 kHz files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.kaldi_corpus import LEXICON, write_kaldi_dir
from tests.support.kaldi_scp import load_scp

ROOT = Path(__file__).resolve().parents[2]


def recipe(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "recipes/kaldi/run.sh", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_stages_data_lang_and_features(tmp_path: Path) -> None:
    """Runs from another folder with relative paths, one of which has a blank and a quote."""
    folder = tmp_path / "Amy's data"
    write_kaldi_dir(folder / "train", "a", speakers=10)
    write_kaldi_dir(folder / "test", "b", kind="flac", rate=44100)
    (folder / "lexicon.txt").write_text(LEXICON)
    arpa = ["<s>", "</s>", "YES", "NO", "ONE", "TWO"]
    lines = "".join(f"-0.7 {word}\n" for word in arpa)
    (folder / "lm.arpa").write_text(f"\\data\\\nngram 1={len(arpa)}\n\n\\1-grams:\n{lines}\n\\end\\\n")
    given = ["--name", "mine", "--train", "train", "--test", "test", "--lexicon", "lexicon.txt", "--arpa", "lm.arpa"]
    options = [
        *given,
        "--sampling-rate",
        "8000",
        "--stop-stage",
        "2",
        "--nj",
        "1",
        f"exp={tmp_path}/exp",
        "logger=none",
    ]
    done = recipe(*options, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recordings at 44100 Hz: resampled to 8000 Hz when read" in done.stdout
    assert "minutes of training speech are too few for speaker adaptation" in done.stderr
    root = tmp_path / "exp/mine"
    assert [path.name for path in (root / "lm").iterdir() if path.is_dir()] == ["given"]
    assert json.loads((root / "features/mfcc/options.json").read_text())["sampling_rate"] == 8000
    features = load_scp(root / "features/logmel/test.scp")
    assert len(features) == 12 and all(x.shape == (98, 40) for x in features.values())
    (folder / "lexicon.txt").write_text("YES Y EH S\n")
    changed = recipe(*options, "--stop-stage", "0", cwd=folder)
    assert changed.returncode == 1 and "check that the lexicon belongs to this corpus" in changed.stderr
    assert (root / "lang/L.fst").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--name is missing"),
        (["--name", "a/b"], "--name takes one word"),
        (["--name", "mine", "--train", "/nowhere"], "--train: '/nowhere' does not exist"),
        (["--name", "mine", "--arpa"], "--arpa needs a value"),
        (["--name", "mine", "--frobnicate"], "unknown option"),
    ],
)
def test_misuse_is_one_clear_line(arguments: list[str], message: str) -> None:
    done = recipe(*arguments)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_help_has_its_own_options() -> None:
    done = recipe("--help")
    assert done.returncode == 0 and "--lexicon FILE" in done.stdout and "7 decode" in done.stdout
