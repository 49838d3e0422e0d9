"""The package of asr_am/README.md, section Extend: installed as a user would, and run by the stages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.egs_examples import write_examples
from tests.support.manifest_corpus import write_corpus

ROOT = Path(__file__).resolve().parents[1]


def files() -> dict[str, str]:
    """Returns the blocks of the section by the path in their first line."""
    section = (ROOT / "asr_am/README.md").read_text().partition("## Extend\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed into."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "installed"))
    (source / "my_asr").mkdir()
    (source / "my_asr/__init__.py").touch()
    for name, text in files().items():
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


def stage(installed: Path | None, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs a stage, with the package or without it."""
    path = os.pathsep.join(map(str, [ROOT, *([installed] if installed else [])]))
    command = [sys.executable, "-m", f"asr_am.stages.{name}", "logger=none", "align=triphone", *overrides]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)


def test_strategy_model_and_schedule_of_a_users_own(installed: Path, tmp_path: Path) -> None:
    write_examples(tmp_path / "toy/egs/logmel-tri", frames_U=(60,) * 12)
    options = (
        f"exp={tmp_path}", "corpus.name=toy", "features=logmel", "run=mine", "learners=4", "launcher=virtual",
        "strategy=signsgd", "model=feedforward", "+model.cells=16", "schedule=cosine", "+schedule.epochs=3",
        "train.epochs=3", "train.batch_size=8", "train.threads=1", "train.device=cpu", "train.optimizer.kind=sgd",
    )  # fmt: skip
    done = stage(installed, "train", *options)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "toy/train/mine/summary.json").read_text())
    assert summary["strategy"] == "signsgd" and summary["strategy_options"] == {"scale": 0.01}
    assert summary["schedule"] == {"base": 0.1, "epochs": 3} and summary["heldout_loss"][-1] < 1.6 < 1.79  # of chance
    wrong = stage(installed, "train", *options, "strategy.scale=much")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("ERROR stage train: strategy.scale=much: must be a number")
    typo = stage(installed, "train", *options, "strategy.scal=1")
    assert "strategy.scal: there is no such option; did you mean strategy.scale" in typo.stderr
    plus = stage(installed, "train", *options, "schedule.base=1")
    assert "schedule.base: is not in the file of its section; write +schedule.base=" in plus.stderr
    without = stage(None, "train", *options)
    assert without.returncode == 1 and "strategy=signsgd: there is no such choice" in without.stderr


def test_a_feature_kind_of_a_users_own(installed: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "toy/data")
    (tmp_path / "toy/features").mkdir()
    (tmp_path / "toy/features/.key").touch()  # so that exp/toy is taken for a folder of this program
    done = stage(installed, "features", f"exp={tmp_path}", "corpus.name=toy", "features=power")
    assert done.returncode == 0, done.stderr
    program = (
        "from pathlib import Path; from asr_am.features.fusion import InputReader\n"
        f"reader = InputReader(Path({str(tmp_path / 'toy/features')!r}), 'power+logmel', 'dev')\n"
        "x_TF = reader[reader.utterances[0]]; print(reader.streams, *x_TF.shape, abs(x_TF[:, 0]).mean() > 0.1)"
    )
    path = os.pathsep.join([str(ROOT), str(installed)])
    read = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert read.stdout == "{'power': 3, 'logmel': 120} 88 123 True\n", read.stderr


def test_a_corpus_of_a_users_own(installed: Path, tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "source")
    done = stage(installed, "data", f"exp={tmp_path}", "corpus=mine", f"data_dir={source}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine/data/lexicon.txt").read_bytes() == (source / "lexicon.txt").read_bytes()
