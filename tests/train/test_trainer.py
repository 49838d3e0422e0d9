from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asr_am.egs.augment import Masking
from asr_am.errors import InputError
from asr_am.models.acoustic import ModelOptions
from asr_am.models.blstm import BlstmOptions
from asr_am.models.model_file import load_acoustic_model
from asr_am.train.run_log import RunLog
from asr_am.train.schedule import Anneal
from asr_am.train.tracking import NoTracker, WandbTracker
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainer import train
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import Ended, final_state, lines

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = TrainOptions(
    epochs=3, batch_size=3, model=BlstmOptions(1, 8, 6, dropout=0.2), schedule=Anneal(base=0.3), random_offset=True,
    masking=Masking(1, 2, 1, 2, streams=1), threads=1, report_every=4, checkpoint_every=3, precision="bfloat16",
    device="cpu",
)  # fmt: skip


class Killer(NoTracker):
    """Kills this process with SIGKILL at the given report."""

    def __init__(self, reports: int) -> None:
        self.reports = reports

    def log(self, record: Mapping[str, Any], step: int) -> None:
        self.reports -= 1
        if self.reports == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(egs_dir: Path, out: Path, reports: int) -> int:
    """Trains in a process that kills itself after so many reports. Returns its exit status."""
    code = "import sys; from pathlib import Path; from tests.train.test_trainer import *; " \
           "train(Path(sys.argv[1]), Path(sys.argv[2]), OPTIONS, tracker=Killer(int(sys.argv[3])))"  # fmt: skip
    command = [sys.executable, "-c", code, str(egs_dir), str(out), str(reports)]
    return subprocess.run(command, cwd=ROOT, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs")


@pytest.fixture(scope="module")
def undisturbed(egs_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    train(egs_dir, out, OPTIONS)
    return out


class Layer(ModelOptions):
    """Options of a user's own that make no acoustic model."""

    def make(self, inputs: int, outputs: int) -> nn.Module:  # type: ignore[override]
        return nn.Linear(inputs, outputs)


def test_a_model_of_a_users_own_needs_an_output_layer(egs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Layer.make must return an AcousticModel with a linear layer `output`"):
        train(egs_dir, tmp_path, replace(OPTIONS, model=Layer()))


def test_it_learns(tmp_path: Path) -> None:
    egs_dir = write_examples(tmp_path / "egs", frames_U=(60,) * 20)
    options = TrainOptions(epochs=4, batch_size=8, model=BlstmOptions(1, 16, 8), schedule=Anneal(base=0.3), threads=1)
    train(egs_dir, tmp_path, options)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["heldout_loss"][-1] < 0.5 * math.log(6)  # the loss of a uniform distribution
    assert min(summary["heldout_frame_error"]) < 0.25


def test_the_files_of_a_run(egs_dir: Path, undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["strategy"] == "local" and summary["learners"] == 1 and summary["clock"] == "wall"
    batches = sum(summary["batches_per_learner"].values())
    assert summary["staleness"] == {"0": batches} and summary["bytes_sent"] == 0
    assert len(summary["heldout_loss"]) == len(summary["heldout_frame_error"]) == summary["epochs"] == 3
    assert summary["seconds"] > 0 and summary["frames_per_second"] > 0
    reports = [record for record in lines(undisturbed) if "loss" in record]
    assert [record["batch"] for record in reports] == list(range(4, batches + 1, 4))
    model, info = load_acoustic_model(undisturbed / "best.pt")
    assert info["epoch"] == summary["best_epoch"] and info["heldout_loss"] == min(summary["heldout_loss"])
    assert info["kind"] == "logmel" and info["pdf_counts"].sum() == 60
    assert model(torch.zeros(1, 7, info["dim"])).shape == (1, 7, info["num_pdfs"])
    assert len(list((undisturbed / "checkpoints").glob("checkpoint-*"))) == 2


def test_killed_anywhere_and_resumed_gives_the_same_bits(egs_dir: Path, undisturbed: Path, tmp_path: Path) -> None:
    statuses = [run_and_die(egs_dir, tmp_path, reports) for reports in (2, 4)]
    assert statuses == [-signal.SIGKILL] * 2
    train(egs_dir, tmp_path, OPTIONS)
    assert lines(tmp_path) == lines(undisturbed)
    ours, theirs = final_state(tmp_path), final_state(undisturbed)
    assert torch.equal(ours["strategy"]["weights"], theirs["strategy"]["weights"])
    assert str(ours["strategy"]["optimizer"]) == str(theirs["strategy"]["optimizer"])
    first, second = (load_acoustic_model(out / "best.pt")[0].state_dict() for out in (tmp_path, undisturbed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_run_does_nothing_and_more_epochs_go_on(egs_dir: Path, undisturbed: Path, tmp_path: Path) -> None:
    short = TrainOptions(**{**OPTIONS.__dict__, "epochs": 2})
    train(egs_dir, tmp_path, short)
    before = lines(tmp_path)
    train(egs_dir, tmp_path, short)
    assert lines(tmp_path) == before
    train(egs_dir, tmp_path, OPTIONS)
    assert lines(tmp_path) == lines(undisturbed)


def test_killed_before_the_last_summary_it_is_still_written(
    egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(run_log: RunLog, summary: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    one = TrainOptions(**{**OPTIONS.__dict__, "epochs": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunLog, "summary", dies)
        train(egs_dir, tmp_path, one)
    train(egs_dir, tmp_path, one)
    assert json.loads((tmp_path / "summary.json").read_text())["epochs_done"] == 1


def test_the_number_of_threads_and_workers_changes_nothing(egs_dir: Path, undisturbed: Path, tmp_path: Path) -> None:
    train(egs_dir, tmp_path, TrainOptions(**{**OPTIONS.__dict__, "workers": 3}))
    assert lines(tmp_path) == lines(undisturbed)


def test_resuming_with_another_number_of_threads_says_so(
    egs_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = TrainOptions(**{**OPTIONS.__dict__, "epochs": 1})
    train(egs_dir, tmp_path, one)
    assert json.loads((tmp_path / "summary.json").read_text())["threads"] == 1
    for threads in (1, 2):
        caplog.clear()
        train(egs_dir, tmp_path, TrainOptions(**{**one.__dict__, "threads": threads}))
        assert ("resuming with 2 threads per learner after 1" in caplog.text) == (threads == 2)
    torch.set_num_threads(1)


def test_other_options_or_a_damaged_checkpoint_are_refused(egs_dir: Path, tmp_path: Path) -> None:
    one = TrainOptions(**{**OPTIONS.__dict__, "epochs": 1})
    train(egs_dir, tmp_path, one)
    with pytest.raises(InputError, match="other options"):
        train(egs_dir, tmp_path, TrainOptions(**{**one.__dict__, "seed": 2}))
    *others, newest = sorted((tmp_path / "checkpoints").glob("checkpoint-*"))
    for other in others:
        shutil.rmtree(other)
    for name, key in (("run.pt", "cursor"), ("learner-0.pt", "strategy")):
        part = newest / name
        whole = part.read_bytes()
        state = torch.load(part, weights_only=True)
        for damaged in (b"", whole[: len(whole) // 2]):
            part.write_bytes(damaged)
            with pytest.raises(InputError, match=rf"checkpoint-\d+/{name}: not readable"):
                train(egs_dir, tmp_path, OPTIONS)
        torch.save({k: value for k, value in state.items() if k != key}, part)
        with pytest.raises(InputError, match="not complete"):
            train(egs_dir, tmp_path, OPTIONS)
        part.write_bytes(whole)


@pytest.mark.parametrize("name", ["metrics.jsonl", "leases.jsonl"])
def test_a_run_whose_records_have_lost_lines_does_not_go_on(egs_dir: Path, tmp_path: Path, name: str) -> None:
    run_and_die(egs_dir, tmp_path, 3)
    checkpoints = sorted((tmp_path / "checkpoints").glob("checkpoint-?????????"))
    os.truncate(tmp_path / name, 20)
    with pytest.raises(InputError, match=rf"{name}: has 20 bytes, and had \d+ at the checkpoint, so lines are lost"):
        train(egs_dir, tmp_path, OPTIONS)
    assert sorted((tmp_path / "checkpoints").glob("checkpoint-?????????")) == checkpoints != []


def test_a_damaged_newest_checkpoint_is_kept_aside_and_the_one_before_is_taken(
    egs_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two = TrainOptions(**{**OPTIONS.__dict__, "epochs": 2})
    train(egs_dir, tmp_path / "whole", two)
    train(egs_dir, tmp_path / "damaged", two)
    before, newest = sorted((tmp_path / "damaged/checkpoints").glob("checkpoint-*"))
    caplog.set_level("INFO")
    for name, end in (("learner-0.pt", "damaged"), ("best.pt", "damaged2")):
        part = newest / name
        part.write_bytes(part.read_bytes()[:-100])
        caplog.clear()
        train(egs_dir, tmp_path / "damaged", two)
        kept = f"); it is kept as {newest.name}.{end}, and the checkpoint before it is taken\n"
        assert kept in caplog.text and f"resuming from {before}" in caplog.text
        assert (newest.parent / f"{newest.name}.{end}" / name).exists()
    parts = [tmp_path / name / f"checkpoints/{newest.name}/learner-0.pt" for name in ("whole", "damaged")]
    whole, again = (torch.load(part, weights_only=True)["strategy"]["weights"] for part in parts)
    assert torch.equal(whole, again), "the same bits"


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(egs_dir: Path, tmp_path: Path) -> None:
    good = TrainOptions(epochs=1, batch_size=3, model=BlstmOptions(1, 8, 6), threads=1, report_every=1)
    train(egs_dir, tmp_path, good)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    state = torch.load(newest / "learner-0.pt", weights_only=True)
    state["strategy"]["weights"].fill_(torch.inf)
    torch.save(state, newest / "learner-0.pt")
    tracker = Ended()
    with pytest.raises(InputError, match=rf"loss is nan in epoch 2.*{newest.name}"):
        train(egs_dir, tmp_path, TrainOptions(**{**good.__dict__, "epochs": 2}), tracker=tracker)
    assert tracker.ends == 1, "a failed run ends its tracking, too"


def test_wandb_offline_writes_and_its_failure_is_a_warning(
    egs_dir: Path, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def init(self, **_: object) -> None:
            raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "wandb", Broken())  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        train(egs_dir, tmp_path, OPTIONS, tracker=WandbTracker())
    assert "no route to host" in caplog.text
    assert lines(tmp_path) == lines(undisturbed)


def test_options_out_of_range_are_input_errors() -> None:
    for wrong in ({"epochs": 0}, {"precision": "int4"}, {"label_smoothing": 1.0}, {"optimiser": "sgd"}):
        with pytest.raises(InputError):
            TrainOptions.build(wrong, {}, {}, seed=1)
    with pytest.raises(InputError, match=r"model\.depth: there is no such option"):
        TrainOptions.build({}, {"depth": 3}, {}, seed=1)
    for groups in (({}, {"layers": 0}, {}), ({"masking": {"streams": 0}}, {}, {}), ({}, {}, {"base": -0.1})):
        with pytest.raises(InputError, match="must"):
            TrainOptions.build(*groups, seed=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(egs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no GPU"):
        train(egs_dir, tmp_path, TrainOptions(device="cuda"))
