"""A synchronous team that loses a learner repeats no completed step, or at most the present block."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_am.distributed.launch_spec import EXIT_LOST
from asr_am.distributed.leases import Segment
from asr_am.distributed.simulator.cluster import SimCluster
from asr_am.distributed.strategies.bmuf import Bmuf
from asr_am.distributed.strategies.diloco import Diloco
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.gtc import Gtc
from asr_am.distributed.strategies.htm import Htm
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.powersgd import Powersgd
from asr_am.distributed.strategies.slowmo import Slowmo
from asr_am.distributed.strategies.sync import Sync
from asr_am.distributed.strategies.topk import Topk
from asr_am.distributed.team import LearnerLost
from asr_am.errors import InputError
from asr_am.models.model_file import load_acoustic_model
from asr_am.train import checkpoint, survivors
from asr_am.train.audit import audit
from asr_am.train.gradient import GradientComputer
from asr_am.train.run_setup import RunSetup, StrategyFactory
from asr_am.train.survivors import Survivors, copied
from asr_am.train.train_options import TrainOptions
from asr_am.train.trainer import Trainer
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS, WORKLOAD, cluster, lease_log, virtually

STRATEGIES = {
    "sync": Sync, "gtc": partial(Gtc, density=0.1), "powersgd": partial(Powersgd, rank=1),
    "topk": partial(Topk, density=0.1), "bmuf": partial(Bmuf, block_size=2), "diloco": partial(Diloco, block_size=3),
    "slowmo": partial(Slowmo, block_size=2), "htm": partial(Htm, block_size=2, group_size=2, density=0.1),
    "sync-weights": partial(Sync, form="weights"), "gtc-before": partial(Gtc, density=0.1, momentum="before"),
    "hybrid": Hybrid, "dpsgd": Dpsgd,
}  # fmt: skip
BLOCKS = {"bmuf": 2, "diloco": 3, "slowmo": 2, "htm": 2, "sync-weights": 1, "gtc-before": 1, "hybrid": 1, "dpsgd": 1}
"""Steps of their blocks."""
LATER = {"hybrid", "dpsgd"}  # hybrid's average ends in the next step, and a step of dpsgd may need no lost learner
TIMES = {**dict.fromkeys(STRATEGIES, (14.0, 14.8)), **dict.fromkeys(BLOCKS, (11.0, 15.0))}
TIMES |= {"diloco": (10.0, 11.0), "hybrid": (10.8, 14.4)}
"""Seconds after which a learner is lost. A step takes about 1.2 s."""


def as_processes(
    egs_dir: Path, out: Path, strategy: StrategyFactory, learners: int = 4, options: TrainOptions = OPTIONS,
    **faults: object,
) -> dict[str, Any]:  # fmt: skip
    """Does `virtually` with learners that end and save their last step as real ones, by the supervisor of these."""
    setup = RunSetup(egs_dir, out, options, strategy, learners=learners)
    launched = SimCluster(
        cluster(**faults), WORKLOAD, learners, OPTIONS.seed, model_elements=setup.num_weights, control_latency=0.01,
        exit_status=lambda error: EXIT_LOST,
    )  # fmt: skip
    supervisor = launched.launch(lambda team: Trainer(setup, team).train(), synchronous=True)
    try:
        launched.scheduler.run(lambda: all(task.finished for _, task in launched.processes))
    finally:
        launched.scheduler.kill_all()
        setup.run_log.close()
    if supervisor.error is not None:
        raise supervisor.error
    return dict(json.loads((out / "summary.json").read_text()))


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=(60,) * 12)


@pytest.fixture(autouse=True)
def a_copy_after_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivors, "STEPS_BETWEEN_COPIES", 1)


def read(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True))


def saved_by_survivors(out: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem[-1]): read(path) for path in (out / "checkpoints").glob("survivors-*/learner-*.pt")}


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {key: leaf for k in value for key, leaf in leaves(value[k], f"{name}/{k}").items()}
    if isinstance(value, list | tuple):
        return leaves(dict(enumerate(value)), name)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_lost_step_leaves_the_state_after_the_step_before(
    egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(checkpoint, "KEPT", 1000)
    virtually(egs_dir, tmp_path / "whole", STRATEGIES[name], replace(OPTIONS, checkpoint_every=1, epochs=1))
    for at in TIMES[name]:
        out = tmp_path / f"{at}"
        with pytest.raises(LearnerLost):
            as_processes(egs_dir, out, STRATEGIES[name], crashes=[{"learner": 1, "at": at}])
        survivors = saved_by_survivors(out)
        assert set(survivors) == {0, 2, 3}
        before = int(next((out / "checkpoints").glob("survivors-*")).name[10:19])
        for rank, saved in survivors.items():
            expected = read(tmp_path / f"whole/checkpoints/checkpoint-{before + saved['steps']:09d}/learner-{rank}.pt")
            found = saved["part"]["strategy"]
            assert saved["steps"] and {"weights", "optimizer"} <= found.keys()
            assert saved["repeated"] < BLOCKS.get(name, 1) + (name in LATER)
            assert (before + saved["steps"]) % BLOCKS.get(name, 1) == 0
            values, wanted = leaves({key: found[key] for key in expected["strategy"]}), leaves(expected["strategy"])
            values = {key: value for key, value in values.items() if not key.startswith("/counts")}
            assert values == {key: wanted[key] for key in values}


@pytest.mark.parametrize(("at", "steps"), [(4.0, 0), (8.0, 5), (13.0, 10)])
def test_learners_copy_their_state_every_fifth_step(
    egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float, steps: int
) -> None:
    monkeypatch.undo()
    with pytest.raises(LearnerLost):
        options = replace(OPTIONS, checkpoint_every=100)
        as_processes(egs_dir, tmp_path, STRATEGIES["hybrid"], options=options, crashes=[{"learner": 1, "at": at}])
    survivors = saved_by_survivors(tmp_path)
    assert [saved["steps"] for saved in survivors.values()] == [steps] * (3 if steps else 0)
    assert all(1 <= saved["repeated"] < 5 for saved in survivors.values())


def test_those_of_another_run_and_copies_of_them_stay(egs_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(LearnerLost):
        as_processes(egs_dir, tmp_path, Sync, crashes=[{"learner": 1, "at": 14.8}])
    (own,) = (tmp_path / "checkpoints").glob("survivors-*")
    shutil.copytree(own, copied := own.with_name(f"{own.name}.bak"))
    with pytest.raises(InputError, match="other options"):
        virtually(egs_dir, tmp_path, Sync, replace(OPTIONS, seed=5))
    assert own.exists()
    virtually(egs_dir, tmp_path, Sync)
    assert not own.exists() and copied.exists()


def test_a_team_of_one_gives_them_back_to_four(egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no residual, and is killed before its first checkpoint."""
    with pytest.raises(LearnerLost):
        as_processes(egs_dir, tmp_path, STRATEGIES["gtc"], crashes=[{"learner": 1, "at": 14.8}])
    with monkeypatch.context() as patch, pytest.raises(LearnerLost, match="killed"):
        patch.setattr(Gtc, "step", lambda self, gradient: (_ for _ in ()).throw(LearnerLost(0, "was killed")))
        virtually(egs_dir, tmp_path, STRATEGIES["gtc"], learners=1)
    summary = virtually(egs_dir, tmp_path, STRATEGIES["gtc"])
    assert summary["counts"]["residuals lost"] == 1 and not audit(tmp_path).problems


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets one entry for each gradient that a learner is asked for: whether it had a batch."""
    found: list[bool] = []
    compute = GradientComputer.__call__

    def count(self: GradientComputer, on_bucket: Any) -> Any:
        result = compute(self, on_bucket)
        found.append(result is not None)
        return result

    monkeypatch.setattr(GradientComputer, "__call__", count)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_completed_step_is_done_again(egs_dir: Path, tmp_path: Path, computed: list[bool], name: str) -> None:
    whole = virtually(egs_dir, tmp_path / "whole", STRATEGIES[name])
    steps = sum(computed)
    computed.clear()
    crash = {"learner": 1, "at": TIMES[name][1], "restart_after": 3.0}
    again = as_processes(egs_dir, tmp_path / "again", STRATEGIES[name], crashes=[crash])
    repeated = sum(computed) - steps
    most = 4 * (BLOCKS.get(name, 1) + (name in LATER))
    assert 0 < repeated <= most, "at most the step or block in which the learner was lost, and those of `LATER` before"
    assert again["counts"].get("steps repeated", 0) >= repeated - 4
    assert again["restarts"] == 4 and not audit(tmp_path / "again").problems
    assert again["counts"].get("residuals lost", 0) == (name not in ("sync", "slowmo"))
    assert again["heldout_loss"][0] == pytest.approx(whole["heldout_loss"][0], rel=0.02)
    assert again["staleness"] == whole["staleness"]
    assert again["batches_per_learner"] == whole["batches_per_learner"]
    batches = [[batch for line in lease_log(tmp_path / out) for batch in line["batch"]] for out in ("again", "whole")]
    assert batches[0] == batches[1]
    if name == "sync":
        assert again["heldout_loss"] == whole["heldout_loss"]
    assert again["train_loss"] == pytest.approx(whole["train_loss"], rel=0.05)  # that of the lost one is not known
    assert not list((tmp_path / "again/checkpoints").glob("survivors-*"))
    updates = [[line["batch"] for line in metrics(tmp_path / out)] for out in ("again", "whole")]
    assert updates[0] == updates[1]


@pytest.mark.parametrize(("name", "epoch", "lost"), [
    ("sync", 1, 0), ("sync", 1, 1), ("sync", 2, 0), ("sync", 2, 1), ("gtc", 1, 0), ("gtc", 1, 1), ("dpsgd", 2, 1),
])  # fmt: skip
def test_the_end_of_an_epoch_is_done_by_the_next_team(
    egs_dir: Path, tmp_path: Path, computed: list[bool], monkeypatch: pytest.MonkeyPatch, name: str, epoch: int,
    lost: int,
) -> None:  # fmt: skip
    """A learner, of which 0 leads, is lost in the validation, which is after the last step. No step is done again."""
    validate = Trainer._validate

    def validate_slowly(self: Trainer, *args: Any) -> tuple[float, float]:
        self.team.sleep(10.0)
        return validate(self, *args)

    monkeypatch.setattr(Trainer, "_validate", validate_slowly)
    whole = virtually(egs_dir, tmp_path / "whole", STRATEGIES[name])
    steps = sum(computed)
    computed.clear()
    crash = {"learner": lost, "at": 26.0 * epoch - 5.0, "restart_after": 3.0}
    again = as_processes(egs_dir, tmp_path / "again", STRATEGIES[name], crashes=[crash])
    assert again["restarts"] == 4 and sum(computed) == steps and not audit(tmp_path / "again").problems
    same = "batches_per_learner", "staleness", "teams"
    assert {key: again[key] for key in same} == {key: whole[key] for key in same}
    records = [[line for line in metrics(tmp_path / out) if "heldout_loss" in line] for out in ("again", "whole")]
    assert [line["epoch"] for line in records[0]] == [1, 2]
    if name == "sync":
        assert [line["heldout_loss"] for line in records[0]] == [line["heldout_loss"] for line in records[1]]
    if (name, epoch) == ("sync", 2):
        models = [load_acoustic_model(tmp_path / out / "best.pt")[1] for out in ("again", "whole")]
        assert models[0]["heldout_loss"] == models[1]["heldout_loss"]


@pytest.mark.parametrize(("name", "at"), [("sync", 3.5), ("sync", 14.8), ("powersgd", 14.8)])
def test_a_team_of_another_size_continues_after_the_last_step(
    egs_dir: Path, tmp_path: Path, computed: list[bool], name: str, at: float
) -> None:
    """The first loss is in the first segment, of which there is no checkpoint."""
    out = tmp_path / "run"
    with pytest.raises(LearnerLost):
        as_processes(egs_dir, out, STRATEGIES[name], crashes=[{"learner": 1, "at": at}])
    survivors = saved_by_survivors(out)
    done = int(next((out / "checkpoints").glob("survivors-*")).name[10:19]) + survivors[0]["steps"]
    computed.clear()
    whole = virtually(egs_dir, tmp_path / "whole", STRATEGIES[name], learners=2)
    batches = sum(computed)
    computed.clear()
    two = virtually(egs_dir, out, STRATEGIES[name], learners=2)
    assert two["teams"] == [{"updates": 0, "learners": 4}, {"updates": done, "learners": 2}]
    assert sum(computed) == batches - 2 * done and not audit(out).problems
    if name == "sync":
        assert two["heldout_loss"] == pytest.approx(whole["heldout_loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["sync", "topk"])
def test_a_smaller_team_loses_a_learner_before_its_first_checkpoint(
    egs_dir: Path, tmp_path: Path, computed: list[bool], name: str
) -> None:
    """It continues from a checkpoint of four learners, made of what survivors had saved. Nothing is done again."""
    out, done = tmp_path / "run", []
    for learners, at in ((4, 10.9), (2, 2.5)):
        with pytest.raises(LearnerLost):
            as_processes(egs_dir, out, STRATEGIES[name], learners, crashes=[{"learner": 1, "at": at}])
        survivors = saved_by_survivors(out)
        assert survivors and all(saved["learners"] == learners for saved in survivors.values())
        updates = int(next((out / "checkpoints").glob("survivors-*")).name[10:19])
        done.append(updates + survivors[0]["steps"])
    assert updates == done[0] < done[1]
    computed.clear()
    whole = virtually(egs_dir, tmp_path / "whole", STRATEGIES[name], learners=1)
    batches = sum(computed)
    computed.clear()
    one = virtually(egs_dir, out, STRATEGIES[name], learners=1)
    assert [team["learners"] for team in one["teams"]] == [4, 2, 1]
    assert [team["updates"] for team in one["teams"]] == [0, *done]
    assert sum(computed) == batches - done[1] and not audit(out).problems
    steps = 4 * done[0] + 2 * (done[1] - done[0]) + sum(whole["staleness"].values()) - done[1]
    assert sum(one["staleness"].values()) == steps


@pytest.mark.parametrize("lost", [(0,), (1,), (2, 3), (1, 2), (0, 2)])
def test_a_lost_learner_of_a_group_continues_with_its_model(
    egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    lost: tuple[int, ...],
) -> None:  # fmt: skip
    """Learners 0 and 1, and 2 and 3, have the same optimizer. Only 0 and 2 have the model of the last block."""
    monkeypatch.setattr(checkpoint, "KEPT", 1000)
    crashes = [{"learner": rank, "at": TIMES["htm"][1], "restart_after": 3.0} for rank in lost]
    as_processes(egs_dir, tmp_path, STRATEGIES["htm"], crashes=crashes)
    assert not audit(tmp_path).problems
    checkpoints = {path.name: path for path in (tmp_path / "checkpoints").glob("checkpoint-*")}
    if lost == (0, 2):
        assert "no model of the last block for learner 0" in caplog.text and "checkpoint-000000014" not in checkpoints
        return
    states = [read(checkpoints["checkpoint-000000014"] / f"learner-{rank}.pt")["strategy"] for rank in range(4)]
    found = [leaves({name: state[name] for name in ("weights", "W_g", "delta", "optimizer")}) for state in states]
    momentum = [{name: values for name, values in state.items() if "optimizer" in name} for state in found]
    assert momentum[0] == momentum[1] and momentum[2] == momentum[3]
    assert (momentum[0] == momentum[2]) == (lost == (2, 3))  # the mean of those of 0 and 1
    for name in ("/weights", "/W_g", "/delta"):
        assert found[0][name] == found[2][name] and found[1][name] == found[3][name]
    assert found[0]["/weights"] == found[1]["/weights"] and found[0]["/delta"] and not found[1]["/delta"]
    assert [state["residual"].abs().sum() == 0 for state in states] == [rank in lost for rank in range(4)]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_what_cannot_be_read_is_done_again(egs_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LearnerLost):
        as_processes(egs_dir, tmp_path / "cut", Sync, crashes=[{"learner": 1, "at": 14.8}])
    for path in (tmp_path / "cut/checkpoints").glob("survivors-*/learner-[02].pt"):
        path.write_bytes(path.read_bytes()[:-100])
    caplog.set_level(logging.INFO)
    cut = virtually(egs_dir, tmp_path / "cut", Sync)
    assert caplog.text.count("not readable") == 2 and "1 of 4 learners have saved" in caplog.text
    assert cut["heldout_loss"] == virtually(egs_dir, tmp_path / "whole", Sync)["heldout_loss"]


@pytest.mark.parametrize("missing", ["done", "part", "learners"])
def test_what_is_not_complete_is_done_again(
    egs_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    """The loss is in the first segment, so the run begins anew."""
    with pytest.raises(LearnerLost):
        as_processes(egs_dir, tmp_path / "cut", Sync, crashes=[{"learner": 1, "at": 3.0}])
    for path in (tmp_path / "cut/checkpoints").glob("survivors-*/learner-*.pt"):
        state = read(path)
        del state[missing]
        torch.save(state, path)
    cut = virtually(egs_dir, tmp_path / "cut", Sync)
    assert f"not complete ('{missing}'): their steps are done again" in caplog.text
    whole = virtually(egs_dir, tmp_path / "whole", Sync)
    assert all(cut[name] == whole[name] for name in ("heldout_loss", "batches_per_learner", "train_loss"))
    assert not audit(tmp_path / "cut").problems


def test_survivors_of_other_options_are_not_taken(egs_dir: Path, tmp_path: Path) -> None:
    """The loss is in the first segment, so there is no checkpoint that would be refused."""
    with pytest.raises(LearnerLost):
        virtually(egs_dir, tmp_path / "cut", Sync, crashes=[{"learner": 2, "at": 3.0}])
    assert saved_by_survivors(tmp_path / "cut") and not list((tmp_path / "cut/checkpoints").glob("checkpoint-*"))
    others = replace(OPTIONS, seed=5)
    cut = virtually(egs_dir, tmp_path / "cut", Sync, others)
    assert cut["heldout_loss"] == virtually(egs_dir, tmp_path / "whole", Sync, others)["heldout_loss"]


def saved(steps: int, replica: bool = True, learners: int = 3, rank: int = 0) -> dict[str, Any]:
    strategy = {"weights": steps, "optimizer": {}, "staleness": {0: steps}, "counts": {}}
    kept = strategy if replica else {key: strategy[key] for key in ("staleness", "counts")}
    done = [number for step in range(steps) for number in (3 * step + rank, 2, 1, 0)]
    return {
        "part": {"strategy": kept, "usage": {}}, "learners": learners, "steps": steps, "seconds": 1.0 * steps,
        "done": torch.tensor(done, dtype=torch.float64), "totals": [2.0 * steps, 1.0 * steps, 10.0 * steps, steps],
        "repeated": 0,
    }  # fmt: skip


def test_the_latest_step_with_a_replica_counts() -> None:
    ahead = saved(3, replica=False, rank=1)
    found = Survivors.of({0: saved(2), 1: ahead})
    assert found is not None and (found.steps, set(found.saved), found.state["weights"]) == (2, {0}, 2)
    found = Survivors.of({0: saved(2), 1: saved(3, rank=1)})
    assert found is not None and (found.steps, found.seconds, set(found.saved)) == (3, 3.0, {1})
    segment = Segment(0, 0, 9, 12, (10,) * 9, 0, 3)
    record = found.record(segment, [2] * 9)
    assert [(each.batch, each.owner) for each in record.completions] == [(n, n % 3) for n in range(9)]
    record.audit([2] * 9)
    totals = found.totals(9)
    assert (totals.loss, totals.correct, totals.frames, totals.batches) == (18.0, 9.0, 90.0, 9)


def test_most_of_the_learners_must_know_their_momentum_and_weights() -> None:
    found = {0: saved(3, learners=4), **{rank: saved(2, rank=rank, learners=4) for rank in (1, 2)}}
    furthest = Survivors.of(found)
    assert furthest is not None and (furthest.steps, set(furthest.saved), furthest.repeated) == (3, {0}, 0)
    half = Survivors.of(found, ("optimizer",))
    assert half is not None and (half.steps, set(half.saved), half.repeated) == (2, {1, 2}, 1)
    assert Survivors.of({0: found[0], 1: found[1]}, ("optimizer",)) is None
    assert Survivors.of(found, ("weights", "optimizer")) is None
    most = Survivors.of({**found, 3: saved(2, rank=3, learners=4)}, ("weights", "optimizer"))
    assert most is not None and (most.steps, set(most.saved), most.repeated) == (2, {1, 2, 3}, 1)


@pytest.mark.parametrize("found", [{}, {0: saved(2, replica=False)}])
def test_without_a_replica_nothing_is_kept(found: dict[int, dict[str, Any]]) -> None:
    assert Survivors.of(found) is None


def test_a_copy_takes_the_place_of_the_last_one() -> None:
    state = {"w": torch.arange(3.0), "m": [(torch.ones(2), 7)], "rows": torch.zeros(4, dtype=torch.float64)}
    first = copied(state, None)
    memory = first["w"].data_ptr(), first["m"][0][0].data_ptr()
    state["w"] += 1
    state["rows"], state["m"] = torch.ones(6, dtype=torch.float64), [(torch.zeros(2), 8), (torch.ones(1), 9)]
    second = copied(state, first)
    assert (second["w"].data_ptr(), second["m"][0][0].data_ptr()) == memory
    assert leaves(second) == leaves(state)
    assert all(second[name].data_ptr() != state[name].data_ptr() for name in ("w", "rows"))
    state["m"] = [(torch.zeros(2), 8)]
    assert leaves(copied(state, second)) == leaves(state)
