"""Training of a real model on the virtual cluster: the whole loop, its files, crashes and resuming."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_am.distributed.cluster_config import Faults
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.local import Local
from asr_am.distributed.strategies.ps_sync import PsSync
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.team import LearnerLost, SingleProcess
from asr_am.egs.loader import Loader
from asr_am.errors import InputError
from asr_am.models.model_file import load_acoustic_model
from asr_am.train.audit import audit
from asr_am.train.run_setup import StrategyFactory
from asr_am.train.schedule import Anneal
from asr_am.train.simulate import train_virtually
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainer import Trainer, train
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS, STRATEGIES, WORKLOAD, Ended, cluster, lease_log, virtually


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=(60,) * 12)


def with_epochs(epochs: int) -> TrainOptions:
    return TrainOptions(**{**OPTIONS.__dict__, "epochs": epochs})


def states(out: Path) -> list[str]:
    newest = sorted((out / "checkpoints").iterdir())[-1]
    return [str(torch.load(newest / f"learner-{rank}.pt", weights_only=True)["strategy"]) for rank in range(4)]


def test_sync_on_four_learners_is_one_learner_with_the_whole_batch(egs_dir: Path, tmp_path: Path) -> None:
    train(egs_dir, tmp_path / "one", OPTIONS, strategy=Local)
    one = json.loads((tmp_path / "one/summary.json").read_text())
    four = virtually(egs_dir, tmp_path / "four", Sync)
    assert four["heldout_loss"] == pytest.approx(one["heldout_loss"], rel=1e-4)
    assert four["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    assert four["learners"] == 4 and four["clock"] == "virtual" and four["consensus_distance"] == [0.0, 0.0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_seed_gives_the_same_bits_and_seconds(egs_dir: Path, tmp_path: Path, name: str) -> None:
    first, second = (virtually(egs_dir, tmp_path / out, STRATEGIES[name]) for out in ("a", "b"))
    assert first == second and states(tmp_path / "a") == states(tmp_path / "b")
    assert sum(first["batches_per_learner"].values()) == sum(first["staleness"].values()) - idle_turns(tmp_path / "a")
    assert first["seconds"] > 0 and first["bytes_sent"] > 0 and len(first["waiting_seconds"]) == 4
    assert (first["consensus_distance"][-1] > 0) == (name in ("dpsgd", "adpsgd"))


def idle_turns(out: Path) -> int:
    """Counts the turns without a batch in rounds that are not full, from the lease log."""
    if json.loads((out / "summary.json").read_text())["strategy"] == "adpsgd":
        return 0
    epochs = Counter(record["epoch"] for record in lease_log(out) for _ in record["batch"])
    return sum(-batches % 4 for batches in epochs.values())


@pytest.mark.parametrize("name", ["sync", "hybrid", "dpsgd"])
def test_a_resumed_run_gives_the_same_bits(egs_dir: Path, tmp_path: Path, name: str) -> None:
    virtually(egs_dir, tmp_path / "whole", STRATEGIES[name])
    with pytest.raises(LearnerLost, match=r"learner 2 (crashed|died)"):
        virtually(egs_dir, tmp_path / "cut", STRATEGIES[name], crashes=[{"learner": 2, "at": 14.0}])
    assert (tmp_path / "cut/checkpoints").exists() and not (tmp_path / "cut/summary.json").exists()
    resumed = virtually(egs_dir, tmp_path / "cut", STRATEGIES[name])
    assert states(tmp_path / "cut") == states(tmp_path / "whole")
    crash = {"learner": 2, "at": 14.0, "restart_after": 3.0}
    again = virtually(egs_dir, tmp_path / "again", STRATEGIES[name], crashes=[crash])
    assert states(tmp_path / "again") == states(tmp_path / "whole") and again["restarts"] == 4
    assert again["faults_fired"] == {"crash": 1}
    assert resumed["heldout_loss"] == json.loads((tmp_path / "whole/summary.json").read_text())["heldout_loss"]
    if name == "sync":  # its survivors have kept the steps since the checkpoint (test_survivors.py)
        assert len(lease_log(tmp_path / "cut")) == len(lease_log(tmp_path / "whole")) + 1
    else:
        assert lease_log(tmp_path / "cut") == lease_log(tmp_path / "whole")


def test_checkpoints_by_time_change_no_bit(egs_dir: Path, tmp_path: Path) -> None:
    """A step takes a little more than a second. The first checkpoint is after 2 steps, the others 6 seconds apart."""
    virtually(egs_dir, tmp_path / "whole", Sync)
    by_time = replace(OPTIONS, checkpoint_every=2, checkpoint_minutes=0.1)
    with pytest.raises(LearnerLost):
        virtually(egs_dir, tmp_path / "cut", Sync, by_time, crashes=[{"learner": 2, "at": 14.0}])
    virtually(egs_dir, tmp_path / "cut", Sync, by_time)
    assert states(tmp_path / "cut") == states(tmp_path / "whole")
    steps = [len(record["batch"]) / 4 for record in lease_log(tmp_path / "cut") if record["epoch"] == 1]
    assert steps[0] == 2 and steps[1:-1] and set(steps[1:-1]) <= {4, 5, 6}


def test_equal_replicas_are_saved_once(egs_dir: Path, tmp_path: Path) -> None:
    for strategy, equal in ((Sync, True), (partial(Sync, form="weights"), False), (Dpsgd, False)):
        out = tmp_path / f"{equal}-{len(list(tmp_path.iterdir()))}"
        virtually(egs_dir, out, strategy, with_epochs(1))
        newest = sorted((out / "checkpoints").glob("checkpoint-*"))[-1]
        parts = [torch.load(newest / f"learner-{rank}.pt", weights_only=True)["strategy"] for rank in range(4)]
        assert ["weights" in part for part in parts] == [True, *[not equal] * 3]
        assert ["optimizer" in part for part in parts] == [True, *[not equal] * 3]


def test_a_missing_part_of_a_checkpoint_is_not_replaced_by_another_learners(egs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(LearnerLost):
        virtually(egs_dir, tmp_path / "cut", Dpsgd, crashes=[{"learner": 2, "at": 14.0}])
    for checkpoint in (tmp_path / "cut/checkpoints").glob("checkpoint-?????????"):
        (checkpoint / "learner-2.pt").unlink()
    with pytest.raises(InputError, match=r"learner-2.pt: not readable .*to start anew"):
        virtually(egs_dir, tmp_path / "cut", Dpsgd)


def test_adpsgd_goes_on_without_a_learner_that_then_rejoins(egs_dir: Path, tmp_path: Path) -> None:
    crash = {"learner": 1, "at": 2.5, "restart_after": 5.0}
    summary = virtually(egs_dir, tmp_path, Adpsgd, crashes=[crash], slow={"2": 10})
    done = Counter((record["epoch"], batch) for record in lease_log(tmp_path) for batch in record["batch"])
    assert set(done.values()) == {1}
    assert any(record["released"] for record in lease_log(tmp_path)), "its lease was handed out again"
    owners = {
        pair for record in lease_log(tmp_path) for pair in zip(record["owner"], record["incarnation"], strict=True)
    }
    assert {(1, 0), (1, 1)} <= owners, "it worked before and after"
    assert summary["restarts"] == 1 and summary["faults_fired"]["crash"] == 1 and summary["faults_fired"]["slow"] > 0
    batches = {int(rank): count for rank, count in summary["batches_per_learner"].items()}
    assert batches[2] < min(batches[0], batches[3]) / 3, "the slow one did less"
    assert all(loss < 2.5 for loss in summary["heldout_loss"])


@pytest.mark.parametrize("restart_after", [None, 0.5])
@pytest.mark.parametrize("method", ["_validate", "_write_summary", "_commit"])
def test_another_learner_writes_the_files_if_the_leader_dies_meanwhile(
    egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, restart_after: float | None
) -> None:
    whole = getattr(Trainer, method)

    def stuck(run: Trainer, *arguments: Any) -> Any:
        if run.team.rank == 0 and run.team.incarnation == 0:
            run.team.sleep(1000.0)
        return whole(run, *arguments)

    monkeypatch.setattr(Trainer, method, stuck)
    crash = {"learner": 0, "at": 500.0, "restart_after": restart_after}
    summary = virtually(egs_dir, tmp_path, Adpsgd, crashes=[crash])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records if "heldout_loss" in record] == [1, 2]
    assert summary["epochs_done"] == len(summary["heldout_loss"]) == 2
    assert load_acoustic_model(tmp_path / "best.pt")[1]["epoch"] == summary["best_epoch"]
    assert not audit(tmp_path).problems


def test_the_seconds_of_a_segment_are_those_of_a_learner_that_saw_all_of_it(egs_dir: Path, tmp_path: Path) -> None:
    long = replace(OPTIONS, epochs=1, checkpoint_every=1000)
    whole = virtually(egs_dir, tmp_path / "whole", Adpsgd, long)
    crash = {"learner": 0, "at": 0.5 * whole["seconds"], "restart_after": 0.5}
    summary = virtually(egs_dir, tmp_path / "crash", Adpsgd, long, crashes=[crash])
    assert summary["seconds"] >= 0.95 * whole["seconds"]


@pytest.mark.parametrize("strategy", [Sync, Adpsgd])
def test_a_batch_that_is_computed_again_in_place_of_another_ends_the_run(
    egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: StrategyFactory
) -> None:
    assemble = Loader._assemble
    monkeypatch.setattr(Loader, "_assemble", lambda loader, plan, number: assemble(loader, plan, 0))
    with pytest.raises(RuntimeError, match="computed batch 1 from other examples than its own, those of batch 0"):
        virtually(egs_dir, tmp_path, strategy)


def test_a_run_that_fails_ends_its_tracking(egs_dir: Path, tmp_path: Path) -> None:
    tracker = Ended()
    wild = replace(OPTIONS, schedule=Anneal(base=1e30))
    with pytest.raises(InputError, match="the loss is"):
        train_virtually(
            egs_dir, tmp_path, wild, learners=4, cluster=cluster(), workload=WORKLOAD, strategy=Sync, tracker=tracker
        )  # fmt: skip
    assert tracker.ends == 1


def test_more_epochs_go_on_where_adpsgd_stopped(egs_dir: Path, tmp_path: Path) -> None:
    short = virtually(egs_dir, tmp_path, Adpsgd, with_epochs(1))
    long = virtually(egs_dir, tmp_path, Adpsgd)
    assert long["heldout_loss"][0] == short["heldout_loss"][0] and len(long["heldout_loss"]) == 2
    assert long["heldout_loss"][1] < long["heldout_loss"][0]


def test_a_batch_that_cannot_be_divided_is_refused(egs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="learners=4 cannot divide it"):
        virtually(egs_dir, tmp_path, Sync, TrainOptions(**{**OPTIONS.__dict__, "batch_size": 6}))


def test_local_needs_one_learner_and_a_ring_an_even_number(egs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one learner, not 4"):
        virtually(egs_dir, tmp_path, Local)
    odd = partial(train_virtually, egs_dir, tmp_path, TrainOptions(**{**OPTIONS.__dict__, "batch_size": 9}), learners=3)
    for strategy in (Adpsgd, Dpsgd):
        with pytest.raises(InputError, match="an even number: use 4 or 2"):
            odd(cluster=cluster(), workload=WORKLOAD, strategy=strategy)


def test_dpsgd_refuses_a_network_that_loses_messages(egs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"faults\.lost_share=0\.1: dpsgd never resends messages"):
        virtually(egs_dir, tmp_path / "virtual", Dpsgd, lost_share=0.1)


def test_train_checks_the_faults_too(egs_dir: Path, tmp_path: Path) -> None:
    class Fragile(Local):
        def check(self, faults: Faults) -> None:
            raise InputError(f"no strategy for {faults.lost_share}")

    team = SingleProcess()
    team.faults = Faults(lost_share=0.1)
    with pytest.raises(InputError, match=r"no strategy for 0\.1"):
        train(egs_dir, tmp_path, OPTIONS, strategy=Fragile, team=team)


def test_a_run_resumes_only_with_the_same_number_of_servers(egs_dir: Path, tmp_path: Path) -> None:
    virtually(egs_dir, tmp_path, partial(PsSync, servers=1), with_epochs(1))
    with pytest.raises(InputError, match=r"has 1 servers, this run 2: set strategy\.servers=1"):
        virtually(egs_dir, tmp_path, partial(PsSync, servers=2))


def test_learners_that_see_different_checkpoints_do_not_begin(
    egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resume(run: Trainer) -> None:
        run.progress.epoch = int(run.team.rank == 2)

    monkeypatch.setattr(Trainer, "_resume", resume)
    with pytest.raises(InputError, match="the learners see different checkpoints"):
        virtually(egs_dir, tmp_path, Sync)
