"""A tiny recipe from nothing to word error rates, through run.sh; killed and started again; refused when misused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = "recipes/minicts/run.sh"
TINY = [
    "corpus.hours=0.08", "corpus.speakers=8", "corpus.test_words=150",
    "align.mono.iterations=12", "align.tri.iterations=12", "align.tri.leaves=150", "align.tri.gaussians=600",
    "model.layers=1", "model.cells=32", "train.epochs=3", "train.checkpoint_every=10", "logger=none",
    "systems=[mono,tri,nnet]",
]  # fmt: skip


def recipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUN, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)


def word_errors(exp: Path) -> dict[str, tuple[int, int]]:
    """(errors, words) of each scored system."""
    found = {}
    for path in sorted(exp.glob("minicts/score/*/wer.json")):
        everything = json.loads(path.read_text())["all"]
        found[path.parent.name] = (everything["errors"], everything["words"])
    return found


@pytest.fixture(scope="module")
def exp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """exp/ of a whole run of the tiny recipe."""
    folder = tmp_path_factory.mktemp("exp")
    done = recipe(f"exp={folder}", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_stage_leaves_its_output(exp: Path) -> None:
    for name in ("data", "lang", "lm/kn3", "features/mfcc", "features/logmel", "align/tri", "egs/logmel-tri", "report"):
        assert any((exp / "minicts" / name).iterdir()), name
    assert "| tri |" in (exp / "minicts/RESULTS.md").read_text()
    assert not list(exp.rglob("*.partial")) and not list(exp.rglob("*.tmp"))
    errors = word_errors(exp)
    assert len(errors) == 3 and {name.split("_")[0].split("-")[0] for name in errors} == {"mono", "tri", "blstm"}
    for name, (wrong, words) in errors.items():
        assert words > 100 and 0 < wrong < words, f"{name} recognised nothing: {wrong} errors in {words} words"


def test_run_again_finds_everything_up_to_date_without_importing_torch(
    exp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    again = recipe(f"exp={exp}", *TINY)
    assert again.returncode == 0
    assert "wrote" not in again.stdout and again.stdout.count("is up to date") >= 15
    assert "hydra.main" in again.stderr and not re.search(r"\| +(torch|lhotse|wandb|kaldifst)$", again.stderr, re.M)


STOPS = [
    (3, "align", lambda exp: any(exp.glob("minicts/align.partial/mono/gmm.npz"))),
    (5, "egs", lambda exp: any(exp.glob("minicts/egs/*.partial/*"))),
    (6, "train", lambda exp: any(exp.glob("minicts/train/*/checkpoints/*"))),
    (7, "decode", lambda exp: any(exp.glob("minicts/decode/*.partial/*"))),
]  # fmt: skip


MADE_BY = [(3, "align"), (5, "egs"), (6, "train"), (7, "graph"), (7, "decode"), (9, "score"), (10, "report")]


@pytest.mark.parametrize(("number", "name", "reached"), STOPS, ids=[name for _, name, _ in STOPS])
def test_killed_in_the_middle_of_a_stage(
    exp: Path, tmp_path: Path, number: int, name: str, reached: Callable[[Path], bool]
) -> None:
    """SIGKILL to all its processes once the stage has made something; started again, it ends with the same WER."""
    copy = tmp_path / "exp"
    subprocess.run(["cp", "-r", exp, copy], check=True)
    expected = word_errors(exp)
    undone = [folder for stage, folder in MADE_BY if stage >= number]
    subprocess.run(["rm", "-rf", *(copy / "minicts" / folder for folder in undone)], check=True)
    command = [RUN, f"exp={copy}", *TINY]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 300
    while not reached(copy):
        assert process.poll() is None and time.monotonic() < deadline, f"{name} was never seen at work"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = recipe(f"exp={copy}", *TINY)
    assert again.returncode == 0, again.stdout + again.stderr
    assert word_errors(copy) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "x"], "whole number"),
        (["--stage", "11"], "no stage 11"),
        (["--stage", "3", "--stop-stage", "2"], "comes before"),
        (["--nj", "0"], "at least 1"),
        (["--data-dir", "/nowhere"], "does not exist"),
        (["--frobnicate"], "unknown option"),
        (["word"], "neither"),
        (["--stage"], "needs a value"),
    ],
)
def test_misuse_is_one_clear_line(arguments: list[str], message: str) -> None:
    done = recipe(*arguments)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_help_names_the_stages() -> None:
    done = recipe("--help")
    assert done.returncode == 0 and "--stop-stage" in done.stdout and "7 decode" in done.stdout


def test_a_stage_without_its_inputs_says_which_to_run(tmp_path: Path) -> None:
    done = recipe("--stage", "3", f"exp={tmp_path}")
    assert done.returncode == 1 and "does not exist; run the stage that makes it first" in done.stderr
