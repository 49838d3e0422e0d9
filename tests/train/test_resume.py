"""A run continues with another number of learners, under every strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asr_am.distributed.cluster_config import Workload
from asr_am.models.blstm import BlstmOptions
from asr_am.models.model_file import load_acoustic_model
from asr_am.train.audit import audit
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.schedule import Anneal
from asr_am.train.simulate import train_virtually
from asr_am.train.train_options import TrainOptions
from tests.support.egs_examples import write_examples
from tests.support.soak import STRATEGIES
from tests.support.toy_training import hardware

OPTIONS = TrainOptions(
    epochs=3, batch_size=24, model=BlstmOptions(1, 8, 6), threads=1, device="cpu",
    checkpoint_every=1,
)  # fmt: skip
FRAMES = (30, 7, 12, 3, 41, 20, 25, 9) * 3  # 4 rounds in an epoch


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=FRAMES)


class Stopped(Exception):
    """Ends a run after a checkpoint."""


def train(
    egs_dir: Path, out: Path, name: str, learners: int, monkeypatch: pytest.MonkeyPatch, commits: int = 0
) -> None:  # fmt: skip
    """Trains until so many checkpoints are complete, or to the end (0)."""
    commit, done = Checkpoints.commit, 0

    def stopping(self: Checkpoints, *arguments: object) -> None:
        nonlocal done
        commit(self, *arguments)  # type: ignore[arg-type]
        done += 1
        if done == commits:
            raise Stopped

    rate = 0.05 if name == "ps_async" else 0.3  # its gradients are stale
    options = replace(OPTIONS, schedule=Anneal(base=rate))
    monkeypatch.setattr(Checkpoints, "commit", stopping)
    try:
        train_virtually(
            egs_dir, out, options, learners=learners, cluster=hardware(), strategy=STRATEGIES[name],
            workload=Workload("toy", seconds_per_batch={"toy": 1.0}),
        )  # fmt: skip
    except Stopped:
        assert commits
    finally:
        monkeypatch.setattr(Checkpoints, "commit", commit)


@pytest.mark.parametrize("name", STRATEGIES)
def test_four_two_and_six_learners_do_one_run(
    name: str, egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teams = (4, 2, 8 if name == "adpsgd-groups" else 6)  # groups in pairs
    for learners, commits in zip(teams, (2, 4, 0), strict=True):  # the teams change in the middle of epochs
        train(egs_dir, tmp_path / "changed", name, learners, monkeypatch, commits)
    train(egs_dir, tmp_path / "whole", name, teams[0], monkeypatch)
    assert not (history := audit(tmp_path / "changed")).problems, history
    changed, whole = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("changed", "whole"))
    assert [team["learners"] for team in changed["teams"]] == list(teams)
    rounds = changed["teams"][1]["updates"], changed["teams"][2]["updates"]
    assert rounds == (2, 6) and sum(changed["batches_per_learner"].values()) == history.batches
    assert sum(changed["staleness"].values()) % history.batches == 0, "counts of all teams, for each server"
    assert changed["heldout_loss"][-1] == pytest.approx(whole["heldout_loss"][-1], rel=0.08)
    if name == "sync":  # the same batches, the same updates
        models = [load_acoustic_model(tmp_path / run / "best.pt")[0] for run in ("changed", "whole")]
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.allclose(one, other, atol=1e-6)
