"""Training of a real model by real processes with parameter servers, where a server or a worker is killed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asr_am.distributed.runtime.launcher import launch
from asr_am.train.simulate import train_virtually
from tests.support.egs_examples import write_examples
from tests.support.ps_worker_main import SERVED, SERVERS, WORKERS
from tests.support.toy_runs import OPTIONS, WORKLOAD, cluster, lease_log


def train_in_processes(egs_dir: Path, out: Path, strategy: str, killed: int = -1) -> dict[str, Any]:
    """Trains with four workers and two servers, each a process, one of which may be killed. Returns the summary."""
    command = [sys.executable, "-m", "tests.support.ps_worker_main", strategy, str(egs_dir), str(out), str(killed)]
    launch(command, WORKERS + SERVERS, synchronous=False, restart_after=0.1)
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=(60,) * 12)


@pytest.mark.parametrize("killed", [1, 4])
def test_ps_sync_equals_the_virtual_run_also_after_a_death(
    egs_dir: Path, tmp_path: Path, killed: int, caplog: pytest.LogCaptureFixture
) -> None:
    train_virtually(
        egs_dir, tmp_path / "virtual", OPTIONS, learners=WORKERS, servers=SERVERS, cluster=replace(cluster(), hosts=3),
        workload=WORKLOAD, strategy=SERVED["ps_sync"],
    )  # fmt: skip
    virtual = json.loads((tmp_path / "virtual/summary.json").read_text())
    real = train_in_processes(egs_dir, tmp_path / "real", "ps_sync", killed)
    assert f"learner {killed} died" in caplog.text and "all learners start again" in caplog.text
    assert real["heldout_loss"] == virtual["heldout_loss"] and real["train_loss"] == virtual["train_loss"]
    assert real["clock"] == "wall" and real["staleness"] == virtual["staleness"]


@pytest.mark.parametrize(("strategy", "killed"), [("ps_async", 1), ("psp", 2), ("ps_async", 4), ("psp", 5)])
def test_the_others_go_on_when_a_worker_or_a_server_is_killed(
    egs_dir: Path, tmp_path: Path, strategy: str, killed: int
) -> None:
    summary = train_in_processes(egs_dir, tmp_path, strategy, killed)
    log = lease_log(tmp_path)
    done = Counter((record["epoch"], batch) for record in log for batch in record["batch"])
    assert set(done.values()) == {1} and sum(done.values()) == sum(summary["batches_per_learner"].values())
    assert [owner for record in log for _, owner in record["released"]] == [killed] * (killed < WORKERS)
    assert summary["restarts"] == 1 or killed < WORKERS, "without its server no worker reaches the end"
    assert summary["learners"] == WORKERS
    assert all(loss < 2.5 for loss in summary["heldout_loss"])
    assert summary["consensus_distance"][-1] == 0.0, "all learners have the servers' weights"
