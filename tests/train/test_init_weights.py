from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.egs.loader import Loader
from asr_am.egs.store import EgsInfo, EgsSet
from asr_am.errors import InputError
from asr_am.models.blstm import BlstmOptions
from asr_am.models.model_file import load_acoustic_model
from asr_am.train.run_setup import RunSetup
from asr_am.train.schedule import Anneal, Schedule
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainer import train
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import lines

OPTIONS = TrainOptions(
    epochs=1, batch_size=3, model=BlstmOptions(1, 8, 6), schedule=Anneal(base=0.3), threads=1, report_every=1,
    device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs")


@pytest.fixture(scope="module")
def first(egs_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains on a part of the utterances. Returns the model file."""
    out = tmp_path_factory.mktemp("first")
    train(egs_dir, out, replace(OPTIONS, subset=0.6))
    return out / "best.pt"


def test_a_run_begins_with_the_weights_of_another(egs_dir: Path, first: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, init=str(first), seed=2)
    setup = RunSetup(egs_dir, tmp_path, options, lambda *_: pytest.fail("no learner is needed"))
    weights = load_acoustic_model(first)[0].state_dict()
    for model in (setup.model(), setup.validator.model):
        assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    train(egs_dir, tmp_path / "run", options)
    train(egs_dir, tmp_path / "other", replace(OPTIONS, seed=2))
    assert lines(tmp_path / "run")[0]["loss"] < lines(tmp_path / "other")[0]["loss"]
    with pytest.raises(InputError, match="other options"):
        train(egs_dir, tmp_path / "other", options)


def test_a_run_on_dev_too_has_no_held_out_loss_and_keeps_the_best_epoch_of_training(
    egs_dir: Path, first: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, init=str(first), with_dev=True, epochs=3)
    train(egs_dir, tmp_path, options)
    epochs = [line for line in lines(tmp_path) if "train_loss" in line]
    losses = [line["train_loss"] for line in epochs]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not any(name.startswith("heldout") for record in (*epochs, summary) for name in record)
    frames = EgsSet(egs_dir, "train").frames + EgsSet(egs_dir, "dev").frames
    setup = RunSetup(egs_dir, tmp_path / "a", options, lambda *_: pytest.fail("no learner is needed"))
    assert setup.plan(0).num_frames == frames
    model, info = load_acoustic_model(tmp_path / "best.pt")
    assert info["epoch"] == 1 + losses.index(min(losses)) and info["heldout_loss"] is None
    start = load_acoustic_model(first)[0].state_dict()
    assert any(not torch.equal(weight, start[name]) for name, weight in model.state_dict().items())
    assert OPTIONS.fingerprint() != options.fingerprint()


def test_a_model_that_does_not_fit_is_refused(egs_dir: Path, first: Path, tmp_path: Path) -> None:
    def begin(match: str, directory: Path = egs_dir, init: Path = first, model: BlstmOptions = OPTIONS.model) -> None:
        with pytest.raises(InputError, match=match):
            train(directory, tmp_path / "run", replace(OPTIONS, init=str(init), model=model))
        assert not (tmp_path / "run/best.pt").exists()

    begin(r"layers.0.bias_hh_l0 has shape \(32,\), here it is \(36,\)", model=BlstmOptions(1, 9, 6))
    begin(r"layers.1.* has shape None", model=BlstmOptions(2, 8, 6))
    begin("not readable", init=tmp_path / "none.pt")
    other = write_examples(tmp_path / "egs", dim=7)
    begin("its 6 senones are not the 7", other)
    value = torch.load(first, weights_only=True)
    value["info"]["senones"] = "another tree"
    torch.save(value, tmp_path / "tree.pt")
    replace(EgsInfo.load(egs_dir), senones="this tree").save(other_egs := write_examples(tmp_path / "senones"))
    begin("its 6 senones are not the 6 of the examples", other_egs, tmp_path / "tree.pt")
    replace(EgsInfo.load(egs_dir), kind="fmllr").save(other_egs)
    begin("is for features logmel, the examples have fmllr", other_egs)


def test_a_subset_is_the_same_utterances_in_every_epoch(egs_dir: Path) -> None:
    egs = EgsSet(egs_dir, "train")
    whole, part, less = (Loader(egs, 3, random_offset=True, subset=share) for share in (1.0, 0.6, 0.3))
    used = [set(loader.plan(epoch).utterance_N.tolist()) for loader in (whole, part, less) for epoch in (0, 1)]
    assert used[0] == used[1] == set(range(8))
    assert used[4] == used[5] < used[2] == used[3] < used[0]
    plan = part.plan(3)
    frames = np.bincount(plan.utterance_N, plan.frames_N, minlength=8)
    assert all(frames[u] == egs.index.frames_U[u] for u in used[2])
    with pytest.raises(InputError, match=r"train.subset=1e-09: selects no utterance"):
        Loader(egs, 3, subset=1e-9)
    with pytest.raises(InputError, match="must be above 0"):
        replace(OPTIONS, subset=0.0)


def test_a_run_is_not_resumed_with_another_option_or_class() -> None:
    same_values = {"schedule": Schedule(OPTIONS.schedule.base)}, {"schedule": Constant(OPTIONS.schedule.base)}
    changes = ({}, {"init": "a"}, {"subset": 0.5}, *same_values)
    assert len({replace(OPTIONS, **change).fingerprint() for change in changes}) == len(changes)


class Constant(Schedule):
    """A schedule with the options of its base class."""
