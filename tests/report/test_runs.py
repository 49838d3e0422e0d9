"""Tests reading summary.json of old and new runs, complete and malformed, and grouping of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asr_am.distributed.cluster_config import Faults
from asr_am.errors import InputError
from asr_am.report.formatting import describe_faults, duration, size, spans
from asr_am.report.run_labels import labels, shared
from asr_am.report.runs import group_runs, read_training_run
from tests.support.report_files import write_distributed


def test_a_run_of_today(tmp_path: Path) -> None:
    folder = write_distributed(
        tmp_path / "an4", "adpsgd", 2, 30.0, [2.0, 1.5, 1.75], seed=7, faults={"slow": {"1": 10}},
        waiting_seconds={"0": 1.5, "1": 0.25}, consensus_distance=[0.5, 0.25, 0.125], staleness={"1": 3, "4": 1},
    )  # fmt: skip
    run = read_training_run(folder)
    config = run.config
    assert (config.corpus, config.strategy, config.learners, config.batch) == ("an4", "adpsgd", 2, 64)
    assert (config.clock, config.cluster, config.workload) == ("virtual", "ibm_a", "swb2000_lstm")
    assert (config.faults, config.slow) == ("learner 1 slowed 10x", ((1, 10.0),))
    assert (run.seed, run.family, run.best_epoch, run.best_loss, run.epoch_seconds) == (7, "adpsgd2-b64", 2, 1.5, 10.0)
    assert (run.waiting_seconds, run.consensus_distance_E, run.staleness) == (1.75, [0.5, 0.25, 0.125], {1: 3, 4: 1})


@pytest.mark.parametrize("by_rank", [[1.0, 2.0, 0.5], {"0": 1.0, "1": 2.0, "2": 0.5}])
def test_waiting_is_summed_over_learners(tmp_path: Path, by_rank: object) -> None:
    run = read_training_run(write_distributed(tmp_path, "sync", 3, 10.0, [1.0], waiting_seconds=by_rank))
    assert run.waiting_seconds == 3.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", None), ("learners", "many"), ("batch", 1.5), ("batch", -1), ("seconds", float("nan")),
        ("seconds", -1), ("seconds", [1]), ("batches_per_learner", [1, 2]), ("batches_per_learner", {"a": 1}),
        ("staleness", {"0": "often"}), ("staleness", 3), ("waiting_seconds", ["long"]), ("faults", {"sloth": 1}),
        ("faults", {"slow": {"0": "very"}}), ("faults", {"slow": 31}), ("faults", 3), ("consensus_distance", {"0": []}),
        ("heldout_loss", 1.0), ("heldout_loss", []), ("bytes_sent", "1 GB"), ("seed", "one"),
    ],
)  # fmt: skip
def test_a_malformed_summary_is_named(tmp_path: Path, key: str, value: object) -> None:
    folder = write_distributed(tmp_path, "sync", 2, 10.0, [1.0])
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**summary, key: value}.items() if v is not None}))
    with pytest.raises(InputError, match=rf"{path}: .*({key}|held-out|wrong value)") as raised:
        read_training_run(folder)
    assert "train" in str(raised.value) and "\n" not in str(raised.value)


def test_groups_differ_by_more_than_the_seed(tmp_path: Path) -> None:
    folders = [
        write_distributed(tmp_path / "a", strategy, learners, 10.0, [1.0], seed=seed, **more)
        for strategy, learners, more in (
            ("sync", 2, {}), ("sync", 4, {}), ("hybrid", 2, {}), ("sync", 2, {"batch": 128}),
            ("sync", 2, {"name": "other"}), ("sync", 2, {"name": "slow", "faults": {"slow": {"0": 2}}}),
            ("sync", 2, {"name": "b", "cluster": "ibm_b"}),
        )
        for seed in (2, 1, 10)
    ]  # fmt: skip
    folders.append(write_distributed(tmp_path / "elsewhere", "sync", 2, 10.0, [1.0], seed=3))
    groups = group_runs([read_training_run(folder) for folder in folders])
    assert sorted(len(group.runs) for group in groups) == [1, 3, 3, 3, 3, 3, 3, 3]
    assert all(group.seeds in ([1, 2, 10], [3]) for group in groups)


def test_means_are_over_the_epochs_that_all_seeds_have_done(tmp_path: Path) -> None:
    folders = [
        write_distributed(tmp_path, "sync", 2, 9.0, [4.0, 2.0, 1.0], seed=1, epochs=3),
        write_distributed(tmp_path, "sync", 2, 6.0, [2.0, 1.0], seed=2, epochs=3),
    ]
    (group,) = group_runs([read_training_run(folder) for folder in folders])
    assert group.mean_loss_E() == [3.0, 1.5]
    assert group.mean(lambda run: run.epoch_seconds) == 3.0
    assert group.mean(lambda run: None) is None


def test_labels_say_what_differs(tmp_path: Path) -> None:
    def label_all(*more: dict) -> list[str]:
        folders = [
            write_distributed(tmp_path / str(len(more)) / "c", "sync", 2, 1.0, [1.0], **{"name": f"run{nth}", **each})
            for nth, each in enumerate(more)
        ]
        groups = group_runs([read_training_run(folder) for folder in folders])
        assert shared(groups).startswith("sync, 2 learners, blstm, sgd, batch 64, 1 epoch, virtual clock")
        return labels(groups, ("strategy", "learners"))

    assert label_all({}) == ["sync, 2 learners"]
    assert label_all({}, {"cluster": "ibm_b"}) == ["sync, 2 learners, cluster ibm_a", "sync, 2 learners, cluster ibm_b"]
    assert label_all({}, {}, {"faults": {"slow": {"1": 2}}}) == [
        "sync, 2 learners, no faults, run0", "sync, 2 learners, no faults, run1",
        "sync, 2 learners, learner 1 slowed 2x",
    ]  # fmt: skip


def test_words() -> None:
    assert spans([3, 0, 1, 7]) == "0-1, 3, 7" and spans([]) == ""
    crash = {"learner": 2, "at": 20, "restart_after": 5}
    faults = Faults.build({"slow": {"0": 2, "1": 2, "4": 10, "5": 1}, "crashes": [crash], "lost_share": 0.05})
    assert describe_faults(faults) == (
        "learners 0-1 slowed 2x; learner 4 slowed 10x; learner 2 killed at 20 s, back after 5 s; 5 % of messages lost"
    )
    assert describe_faults(Faults(late_share=0.1, late_seconds=0.5)) == "10 % of messages late by 0.5 s"
    assert [duration(s) for s in (None, 0.1234, 90, 150, 3924, 34092)] == [
        "–", "0.123 s", "90 s", "2.5 min", "1.09 h", "9.47 h"
    ]  # fmt: skip
    assert [size(n) for n in (None, 0, 999, 1.5e3, 165e6, 4.35e9)] == [
        "–",
        "0 B",
        "999 B",
        "1.5 kB",
        "165 MB",
        "4.35 GB",
    ]
