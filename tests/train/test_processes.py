"""Training of a real model by real processes, compared with the virtual cluster, and with a learner killed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asr_am.distributed import supervisor
from asr_am.distributed.runtime.launcher import launch
from asr_am.train.audit import audit
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import STRATEGIES, lease_log, virtually
from tests.support.train_worker_main import IMPATIENT


def train_in_processes(egs_dir: Path, out: Path, strategy: str, fails: int = -1, how: str = "kill") -> dict[str, Any]:
    """Trains with four processes, one of which may fail. Returns the summary."""
    command = [sys.executable, "-m", "tests.support.train_worker_main", strategy, str(egs_dir), str(out)]
    command += [str(fails), how]
    launch(command, 4, synchronous=strategy != "adpsgd", restart_after=0.1)
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=(60,) * 12)


def test_four_processes_are_four_virtual_learners_also_when_one_was_killed(egs_dir: Path, tmp_path: Path) -> None:
    virtual = virtually(egs_dir, tmp_path / "virtual", STRATEGIES["sync"])
    real = train_in_processes(egs_dir, tmp_path / "real", "sync", fails=2)
    assert real["restarts"] == 4
    assert real["heldout_loss"] == pytest.approx(virtual["heldout_loss"], rel=1e-5)
    assert real["train_loss"] == pytest.approx(virtual["train_loss"], rel=0.01), "that of the lost one is not known"
    assert real["batches_per_learner"] == virtual["batches_per_learner"] and real["clock"] == "wall"
    lines = lease_log(tmp_path / "real")
    assert len({line["launch"] for line in lines}) == 2, "each start of the team has a name of its own"
    columns = ("batch", "owner", "examples", "digest")
    done, expected = (
        [(line["epoch"], *row) for line in log for row in zip(*(line[name] for name in columns), strict=True)]
        for log in (lines, lease_log(tmp_path / "virtual"))
    )
    assert done == expected, "each batch once, by the learner whose turn it was"
    assert sum(len(line["batch"]) == 4 for line in lines) == 1, "survivors have kept the step before the loss"
    assert not audit(tmp_path / "real").problems


@pytest.mark.parametrize(
    ("how", "said"),
    [("kill", "SIGKILL"), ("stop", "learner 1 has not been heard from for 2 s"), ("hang", "ended with exit status 70")],
)
def test_adpsgd_does_every_batch_once_though_a_learner_fails(
    egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str,
    said: str,
) -> None:  # fmt: skip
    if how == "stop":
        monkeypatch.setattr(supervisor, "HEARTBEAT_TIMEOUT", IMPATIENT)
    summary = train_in_processes(egs_dir, tmp_path, "adpsgd", fails=1, how=how)
    log = lease_log(tmp_path)
    done = Counter((record["epoch"], batch) for record in log for batch in record["batch"])
    assert set(done.values()) == {1} and sum(done.values()) == sum(summary["batches_per_learner"].values())
    assert [owner for record in log for _, owner in record["released"]] == [1], "its lease was handed out again"
    assert all(loss < 2.5 for loss in summary["heldout_loss"])
    assert said in caplog.text and "restarting it" in caplog.text


def test_a_synchronous_learner_that_hangs_is_named_and_the_team_starts_again(
    egs_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert train_in_processes(egs_dir, tmp_path, "sync", fails=2, how="hang")["epochs_done"] == 2
    assert "ended with exit status 70: all learners start again from the last checkpoint" in caplog.text
    said = capfd.readouterr().err
    assert "learner 2 hangs: it has computed one batch for" in said
    assert "train_worker_main.py" in said, "the place where it hangs"
