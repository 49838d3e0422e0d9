"""Real processes that die at chosen moments: what counts is what a checkpoint has, once."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.worker_process import LOCALHOST, free_port
from asr_am.errors import Preempted
from asr_am.models.model_file import load_acoustic_model
from asr_am.train.audit import History, audit
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import lease_log

Fault = tuple[int, int, str, int]  # rank, incarnation, moment, number


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=(60,) * 12)


def train_with(
    egs_dir: Path, out: Path, strategy: str, faults: Sequence[Fault], hosts: int = 1, **launcher: Any
) -> tuple[History, dict[str, Any]]:
    """Trains for an epoch of four segments with four processes. Returns the verdict of the audit, and the summary."""
    program = [sys.executable, "-m", "tests.support.fault_worker_main", strategy, str(egs_dir), str(out)]
    options = {"synchronous": False, "restart_after": 0.1, **launcher}
    if hosts > 1:
        options |= {"nodes": hosts, "encrypt": False, "address": f"{LOCALHOST}:{free_port(LOCALHOST)}"}
    start = partial(launch, [*program, json.dumps(faults), "1"], 4 // hosts, **options)
    others = [threading.Thread(target=partial(start, node_rank=node)) for node in range(1, hosts)]
    for other in others:
        other.start()
    start()
    for other in others:
        other.join()
    history = audit(out)
    assert not history.problems, str(history)
    return history, json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize(("strategy", "hosts"), [("hybrid", 2), ("dpsgd", 1), ("ps_sync", 1)])
def test_a_team_in_step_starts_again_by_itself(egs_dir: Path, tmp_path: Path, strategy: str, hosts: int) -> None:
    """A learner dies in the second segment, and the leader in the checkpoint of the third."""
    options = {"synchronous": strategy != "ps_sync"}
    train_with(egs_dir, tmp_path / "whole", strategy, [], **options)
    faults = [(hosts, 0, "gradient", 6), (0, 1, "commit", 2)]
    _, summary = train_with(egs_dir, tmp_path / "killed", strategy, faults, hosts, **options)
    assert summary["restarts"] >= 8, "all four, twice"
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize(("strategy", "same_bits"), [("sync", True), ("adpsgd", False)])
def test_a_preempted_team_saves_a_checkpoint_and_continues(
    egs_dir: Path, tmp_path: Path, strategy: str, same_bits: bool
) -> None:
    """Learner 2 gets the signal in its second gradient, before the first checkpoint."""
    options = {"synchronous": strategy != "adpsgd"}
    with pytest.raises(Preempted, match="continues from the last checkpoint"):
        train_with(egs_dir, tmp_path / "again", strategy, [(2, 0, "preempted", 2)], **options)
    assert lease_log(tmp_path / "again") and not (tmp_path / "again/summary.json").exists(), "in the first epoch"
    train_with(egs_dir, tmp_path / "again", strategy, [], **options)
    if same_bits:
        train_with(egs_dir, tmp_path / "whole", strategy, [], **options)
        assert contents(tmp_path / "again")[0] == contents(tmp_path / "whole")[0]


def contents(run: Path) -> list[Any]:
    """Returns the weights of the last checkpoint, and what was done."""
    newest = sorted((run / "checkpoints").glob("checkpoint-?????????"))[-1]
    weights = torch.load(newest / "learner-0.pt", weights_only=True)["strategy"]["weights"].tolist()
    varies = ("launch", "incarnation", "owner")  # ps_sync: whoever is ready first
    return [weights, *({k: v for k, v in line.items() if k not in varies} for line in lease_log(run))]


@pytest.mark.parametrize("hosts", [1, 2])
def test_batches_whose_weights_died_with_all_learners_are_done_again(egs_dir: Path, tmp_path: Path, hosts: int) -> None:
    faults = [(rank, 0, "gradient", 3) for rank in range(4)]
    train_with(egs_dir, tmp_path, "adpsgd", faults, hosts, restart_after=2.0)
    first = lease_log(tmp_path)[0]
    assert min(first["incarnation"]) == 1 and first["batch"] == list(range(16)) and first["launch"]


@pytest.mark.parametrize("strategy", ["adpsgd", "ps_async", "psp"])
def test_the_leader_dies_in_a_checkpoint(egs_dir: Path, tmp_path: Path, strategy: str) -> None:
    """Learner 0 is the leader and has a server."""
    _, summary = train_with(egs_dir, tmp_path, strategy, [(0, 0, "commit", 2)])
    assert summary["epochs_done"] == 1 and (summary["restarts"] == 1 or strategy == "adpsgd")


@pytest.mark.parametrize(("moment", "last"), [("commit", 4), ("publish", 5)])
def test_the_leader_dies_in_the_last_checkpoint(egs_dir: Path, tmp_path: Path, moment: str, last: int) -> None:
    train_with(egs_dir, tmp_path, "adpsgd", [(0, 0, moment, last)])
    assert len(lease_log(tmp_path)) == 4
    best = load_acoustic_model(tmp_path / "best.pt")[1]
    assert best["heldout_loss"] == min(json.loads((tmp_path / "summary.json").read_text())["heldout_loss"])


def test_a_server_that_is_gone_for_good_is_replaced_on_another_rank(egs_dir: Path, tmp_path: Path) -> None:
    _, summary = train_with(egs_dir, tmp_path, "ps_async", [(2, 0, "update", 20)], max_restarts=0)
    assert summary["epochs_done"] == 1 and all(loss < 2.5 for loss in summary["heldout_loss"])
    assert {server["rank"] for server in lease_log(tmp_path)[-1]["servers"]} == {0, 1}
