"""The table of strategies and features in asr_am/distributed/README.md, cell by cell."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_am.distributed.cluster_config import Crash, Faults, Workload
from asr_am.distributed.optimizer import OptimizerOptions
from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.dpsgd import Dpsgd
from asr_am.distributed.strategies.hybrid import Hybrid
from asr_am.distributed.strategies.sync import Sync
from asr_am.models.blstm import BlstmOptions
from asr_am.train import gradient
from asr_am.train.schedule import Anneal
from asr_am.train.simulate import train_virtually
from asr_am.train.train_options import TrainOptions
from tests.support import reference_algorithms as reference
from tests.support.egs_examples import write_examples
from tests.support.soak import FAULT_TOLERANT, STRATEGIES
from tests.support.strategy_checks import MATRICES
from tests.support.toy_problem import Problem
from tests.support.toy_training import hardware, in_lockstep, train

# clipping and Adam: which gradient they act on

RULES: dict[str, tuple[OptimizerOptions, reference.MakeRule]] = {
    "clipping": (OptimizerOptions(clip_norm=0.8), partial(reference.Momentum, clip=0.8)),
    "adam": (OptimizerOptions("adam"), reference.Adam),
}


def problem_with(rule: str) -> Problem:
    return Problem(batches=44, epochs=2, lr=0.01 if rule == "adam" else 0.05, options=RULES[rule][0])


def max_difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


@pytest.mark.parametrize("rule", RULES)
def test_sync_of_gradients_acts_on_the_mean_gradient(rule: str) -> None:
    problem, (_, make_rule) = problem_with(rule), RULES[rule]
    for result in train(problem, Sync).values():
        assert max_difference(result.consensus[-1], reference.sync(problem, make_rule)[-1]) < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_the_others_act_on_each_learners_gradient(rule: str) -> None:
    problem, (_, make_rule) = problem_with(rule), RULES[rule]
    of_the_mean = reference.sync(problem, make_rule)[-1]
    averaged = reference.dpsgd(problem, MATRICES["all"], make_rule)[-1]
    for result in train(problem, partial(Sync, form="weights")).values():
        assert max_difference(result.replica, averaged[0]) < 1e-5 and max_difference(averaged[0], of_the_mean) > 1e-3
    for result in train(problem, Hybrid).values():
        assert max_difference(result.replica, reference.hybrid_own(problem, make_rule)[-1]) < 1e-5
    for rank, result in train(problem, Dpsgd).items():
        assert max_difference(result.replica, reference.dpsgd(problem, MATRICES["pairs"], make_rule)[-1][rank]) < 1e-5
    results = train(problem, Adpsgd, cluster=hardware(jitter=0.0), wrap=in_lockstep)
    expected = reference.adpsgd(problem, [results[rank].computed for rank in range(4)], make_rule)
    assert max(max_difference(results[rank].replica, expected[rank]) for rank in range(4)) < 1e-5


# real training: accumulation, bfloat16, dropout, a learner's crash, resuming from a checkpoint


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs")


Train = Callable[..., tuple[Tensor, float]]


@pytest.fixture
def run(egs_dir: Path, tmp_path: Path) -> Train:
    """Returns a function that trains two learners and returns their weights [2, N] and the last held-out loss."""
    runs = 0

    def trained(
        name: str, dropout: float = 0.0, into: str = "", crash: Crash | None = None, **options: Any
    ) -> tuple[Tensor, float]:  # fmt: skip
        nonlocal runs
        runs += 1
        out = tmp_path / (into or str(runs))
        chosen = TrainOptions(**{
            "epochs": 2, "batch_size": 8, "model": BlstmOptions(1, 8, 6, dropout=dropout), "threads": 1,
            "schedule": Anneal(base=0.3), "device": "cpu", "checkpoint_every": 2, **options,
        })  # fmt: skip
        cluster = replace(hardware(), faults=Faults(crashes=[crash] if crash else []))
        train_virtually(
            egs_dir, out, chosen, learners=2, cluster=cluster, strategy=STRATEGIES[name],
            workload=Workload("toy", seconds_per_batch={"toy": 1.0}),
        )  # fmt: skip
        newest = max((out / "checkpoints").iterdir())
        states = [torch.load(newest / f"learner-{rank}.pt", weights_only=True)["strategy"] for rank in range(2)]
        weights = torch.stack([state.get("x", (states[0] | state)["weights"]) for state in states])
        return weights, json.loads((out / "summary.json").read_text())["heldout_loss"][-1]

    return trained


@pytest.mark.parametrize("name", STRATEGIES)
def test_accumulation_changes_rounding_only(name: str, run: Train) -> None:
    full, parts = run(name), run(name, accumulation=3)
    difference = max_difference(full[0], parts[0])
    assert difference < 1e-5 and (difference > 0 or name in ("gtc", "htm"))  # thresholds mostly hide it
    assert parts[1] == pytest.approx(full[1], abs=2e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_bfloat16_is_close(name: str, run: Train) -> None:
    exact, rounded = run(name), run(name, precision="bfloat16")
    difference = max_difference(exact[0], rounded[0])
    assert difference < 0.1 and (difference > 1e-6 or name == "gtc")  # the threshold may hide it
    assert rounded[0].dtype == torch.float32
    assert rounded[1] != exact[1] and rounded[1] == pytest.approx(exact[1], rel=0.02)


@pytest.mark.parametrize("name", STRATEGIES)
def test_dropout_is_the_same_every_time_and_after_a_checkpoint(name: str, run: Train) -> None:
    without, with_dropout = run(name), run(name, dropout=0.3)
    assert torch.equal(run(name, dropout=0.3)[0], with_dropout[0])
    assert max_difference(without[0], with_dropout[0]) > 1e-3
    if name not in FAULT_TOLERANT:
        run(name, dropout=0.3, into="stopped", epochs=1)
        assert torch.equal(run(name, dropout=0.3, into="stopped")[0], with_dropout[0])


def test_dropout_depends_on_the_batch_not_on_the_learner(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[Counter[int]] = []
    seed_dropout = gradient.seed_dropout

    def record(seed: int, device: torch.device) -> None:
        seeds[-1][seed] += 1
        seed_dropout(seed, device)

    monkeypatch.setattr(gradient, "seed_dropout", record)
    for name in ("sync", "dpsgd", "adpsgd"):
        seeds.append(Counter())
        run(name, dropout=0.3)
    assert len(seeds[0]) > 8
    assert seeds[0].keys() == seeds[1].keys() == seeds[2].keys()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_learner_crashes(name: str, run: Train, tmp_path: Path) -> None:
    """A synchronous team starts again, with the same bits if no residual is lost. Others go on without the learner."""
    for at in (0.3, 2.2, 4.1):
        into, crash = f"crash at {at}", Crash(1, at, restart_after=1.0)
        weights = run(name, into=into, crash=crash, dropout=0.0 if name in FAULT_TOLERANT else 0.3)[0]
        summary = json.loads((tmp_path / into / "summary.json").read_text())
        assert summary["restarts"] == 1 if name in FAULT_TOLERANT else summary["restarts"] > 1
        lines = [json.loads(line) for line in (tmp_path / into / "leases.jsonl").read_text().splitlines()]
        done = [(line["epoch"], batch) for line in lines for batch in line["batch"]]
        assert len(done) == len(set(done)) == sum(summary["batches_per_learner"].values())
        lost = summary["counts"].get("residuals lost", 0)
        assert not lost or (name in ("dpsgd", "gtc", "bmuf", "htm", "powersgd", "topk") and at > 1)
        if name not in FAULT_TOLERANT and not lost and not summary["counts"].get("steps repeated"):
            assert torch.equal(weights, run(name, dropout=0.3)[0])
