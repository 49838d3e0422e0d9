"""The API: recipes and any torch model from Python, the built package outside the checkout, and exported networks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
import torch

from asr_am import network_export, parallel
from asr_am.api import Recipe
from asr_am.dask_jobs import job_options
from asr_am.dask_jobs.client import DaskJobs
from asr_am.errors import InputError
from asr_am.models.blstm import BlstmOptions
from asr_am.models.model_file import save_model
from asr_am.stages.target import Target
from tests.support.spoken_tones import RATE, Voice

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("abba", "dada", "gaga", "cab", "bag", "dab", "fed", "egg")
TINY = (
    "align.mono.iterations=5", "align.mono.gaussians=150", "align.tri.iterations=4", "align.tri.realign=[2]",
    "align.tri.increase_until=3", "align.tri.leaves=40", "align.tri.gaussians=150", "model.layers=1", "model.cells=16",
    "train.epochs=2", "train.batch_size=32", "decode.search.beam=6", "decode.lm_weights=[8]", "logger=none",
    "features=logmel", "align=triphone", "systems=[nnet]", "nj=2",
)  # fmt: skip


def write_recordings(folder: Path, speakers: int = 8, utterances: int = 4) -> None:
    """Writes a folder per speaker with recordings and transcripts, in which each letter sounds its own way."""
    for speaker in range(speakers):
        voice = Voice({word: " ".join(word) for word in WORDS}, speaker)
        (folder / f"amy{speaker}").mkdir(parents=True)
        for number in range(utterances):
            words = [WORDS[choice] for choice in voice.rng.integers(0, len(WORDS), 5)]
            path = folder / f"amy{speaker}/{number}.wav"
            soundfile.write(path, voice.say(words), RATE)
            path.with_suffix(".txt").write_text(f"{words[0].title()}, {' '.join(words[1:])}.\n")


def test_a_folder_of_recordings_becomes_error_rates_and_textgrids(tmp_path: Path) -> None:
    write_recordings(tmp_path / "speech")
    recipe = Recipe(
        "corpus=kaldi", "corpus.name=mine", f"+corpus.prepare.folder={tmp_path}/speech", "corpus.sampling_rate=8000",
        "corpus.aligned_sets=[train,dev,test]", f"exp={tmp_path}/exp", "strategy=sync", "launcher=virtual",
        "learners=2", *TINY,
    )  # fmt: skip
    folder = recipe.prepare()
    summary = recipe.train()
    assert len(summary["batches_per_learner"]) == 2 and min(summary["batches_per_learner"].values()) > 0
    assert [(path.parent.parent, path.name) for path in recipe.decode()] == [(folder, "blstm-sync-v2-b32-s1_kn3")]
    (wer,) = recipe.score().values()
    assert wer < 100  # of two minutes of training speech
    grids = list(folder.glob("alignments/*/*.TextGrid"))
    assert len(grids) == 32 and '"abba"' in "".join(path.read_text() for path in grids)
    done = [path.stat().st_mtime_ns for path in sorted(folder.rglob(".done"))]
    recipe.prepare()  # everything is up to date
    assert done == [path.stat().st_mtime_ns for path in sorted(folder.rglob(".done"))]


def test_the_summary_is_that_of_the_model_when_others_are_trained_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def run(target: Target) -> None:
        made.append(target.out.name)
        target.out.mkdir(parents=True)
        (target.out / "summary.json").write_text(json.dumps({"number": len(made)}), encoding="utf-8")

    monkeypatch.setattr(Target, "run", run)
    recipe = Recipe(
        "corpus=minicts", f"exp={tmp_path}", "run=mine", "mmi.train=true", "second.train=true", "final.train=true"
    )
    assert recipe.train() == {"number": 1}
    assert made == ["mine", "mine-mmi", "mine-conformer", "mine-conformer-final"]
    assert json.loads((recipe.folder / "train/mine-mmi/summary.json").read_text(encoding="utf-8")) == {"number": 2}


def test_parallel_jobs_run_on_the_cluster_of_group_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = []
    monkeypatch.setattr(job_options, "find_spec", lambda module: True)  # the package is not needed to choose
    monkeypatch.setattr(Target, "run", lambda target: clusters.append(parallel._cluster))
    Recipe("corpus=minicts", f"exp={tmp_path}", "jobs=dask").prepare()
    Recipe("corpus=minicts", f"exp={tmp_path}").prepare()
    on_dask, here = clusters[: len(clusters) // 2], clusters[len(clusters) // 2 :]
    assert all(isinstance(cluster, DaskJobs) for cluster in on_dask) and set(here) == {None}


def test_options_are_checked_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean train\.epochs"):
        Recipe("corpus=an4", f"exp={tmp_path}/exp", "train.epoch=3")
    assert not list(tmp_path.iterdir())


def test_the_built_package_has_configurations_and_recipes(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build")]
    subprocess.run([*build, "--build-lib", str(lib)], cwd=ROOT, check=True, capture_output=True)
    library = {
        path.relative_to(ROOT) for pattern in ("*.py", "*.html", "*.json") for path in (ROOT / "asr_am").rglob(pattern)
    }
    recipes = (path for name in ("conf", "local") for path in (ROOT / name).rglob("*") if path.is_file())
    inside = {"asr_am/recipe_files" / path.relative_to(ROOT) for path in recipes if path.suffix != ".pyc"}
    assert {path.relative_to(lib) for path in lib.rglob("*") if path.is_file()} == library | inside
    program = (
        "import asr_am.stages.data as d, asr_am.stages.recipe_files as f\n"
        "from asr_am.stages.option_checks import compose_job\n"
        "from asr_am.stages.overrides import configurations\n"
        "with configurations():\n"
        "    cfg = compose_job(['corpus=minicts'])\n"
        "print(f.ROOT, d.corpus_function(cfg.corpus.prepare._target_, 'x').__code__.co_filename)\n"
    )
    env = os.environ | {"PYTHONPATH": str(lib)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    files = lib / "asr_am/recipe_files"
    assert done.stdout.split() == [str(files), str(files / "local/minicts/prepare.py")], done.stderr


def test_an_exported_network_has_the_same_scores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BlstmOptions(layers=1, cells=8, projection=6).make(5, 7)
    model.set_normalisation(torch.randn(5), torch.rand(5) + 0.5)
    info = {"kind": "logmel", "chunk": 5, "pdf_counts": torch.arange(1, 8)}
    save_model(tmp_path / "best.pt", model, info)
    out = tmp_path / "network.pt2"
    assert network_export.main(["--model", str(tmp_path / "best.pt"), "--out", str(out)]) == 0
    extra = {network_export.INFO: ""}
    exported = torch.export.load(out, extra_files=extra).module()
    x_BTF = torch.randn(3, 5, 5)
    with torch.no_grad():
        counts_P = torch.arange(1.0, 8.0)
        expected = torch.log_softmax(model.eval()(x_BTF), -1) - (counts_P / counts_P.sum()).log()
        torch.testing.assert_close(exported(x_BTF), expected, atol=1e-5, rtol=1e-5)
    assert '"frames": 5' in extra[network_export.INFO] and sorted(p.name for p in tmp_path.iterdir()) == [
        "best.pt", "network.pt2",
    ]  # fmt: skip


def test_an_unknown_format_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert network_export.main(["--model", "best.pt", "--out", str(tmp_path / "network.txt")]) == 1
    assert "must end in .pt2 or .onnx" in capsys.readouterr().err
