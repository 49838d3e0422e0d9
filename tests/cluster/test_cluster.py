"""Measured clusters, predictions for all strategies, and the check of a prediction by real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from asr_am.cluster import measure, predict, real_rounds
from asr_am.cluster.__main__ import configurations, main, taken
from asr_am.cluster.predict import Prediction
from asr_am.distributed.cluster_config import Cluster, Workload
from asr_am.distributed.simulator.epoch_timing import time_epoch
from asr_am.errors import InputError
from tests.support.configurations import config
from tests.support.soak import STRATEGIES
from tests.support.toy_training import hardware

SMALL = ("corpus=minicts", "corpus.hours=1", "model.layers=1", "model.cells=8", "features=logmel", "align=triphone")
ONE = Prediction("sync", 4, 2.0, 6.0, 1.0, 0.0, "all start again")


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_epoch_without_a_model_ends_under_every_strategy(name: str) -> None:
    workload = Workload("toy", bytes=3e3, seconds_per_batch={"toy": 1.0})
    epoch = time_epoch(STRATEGIES[name], hardware(), workload, learners=4, batches=24, elements=1024, density=0.01)
    assert sum(epoch.batches.values()) == 24 and 5 < epoch.seconds < 60


def test_predictions_follow_the_learners_and_a_slow_host(tmp_path: Path) -> None:
    given = [*SMALL, f"exp={tmp_path}", "learners=2,4", "strategy=sync,adpsgd,htm", "cluster=local", "workload=self"]
    cfgs, _ = configurations(given, "virtual")
    found = {(each.strategy, each.learners): each for each in predict.predict(cfgs, jobs=2)}
    assert found.keys() == {("sync", 2), ("sync", 4), ("adpsgd", 2), ("adpsgd", 4)}, "htm has groups of eight"
    for name in ("sync", "adpsgd"):
        assert found[name, 4].hours < 0.7 * found[name, 2].hours
    assert found["sync", 4].slow_hours > 2 * found["sync", 4].hours > 1.2 * found["adpsgd", 4].slow_hours
    predict.write(list(found.values()), tmp_path / "out")
    assert len(json.loads((tmp_path / "out/predictions.json").read_text())) == 4
    assert (tmp_path / "out/scaling.png").stat().st_size > 1000
    lines = predict.table(list(found.values()))
    assert len(lines) == 3 and lines[0].split()[:6] == ["hours", "of", "an", "epoch", "2", "4"]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([replace(ONE, strategy="htm", hours=1.9, loss=0.001)], r"take strategy=sync .* htm takes 95% .* loss \+0\.1%"),
        ([replace(ONE, strategy="htm", hours=1.0, loss=0.001)], r"take strategy=htm .* was \+0\.1% .* sync, .* 2 h"),
        ([replace(ONE, strategy="bmuf", hours=1.0, loss=0.04)], r"take strategy=sync .* bmuf takes 50% .* \+4\.0%"),
        ([replace(ONE, strategy="mine", hours=1.0)], "take strategy=sync .* mine takes 50% .* an unknown loss"),
        ([replace(ONE, strategy="adpsgd", hours=1.9, slow_hours=2.5)], "sync .* slow: strategy=adpsgd, 2.5 h"),
    ],
)
def test_the_recommendation_weighs_speed_against_accuracy(others: list[Prediction], words: str) -> None:
    import re

    assert re.search(words, predict.recommend([ONE, *others]))


def test_this_host_is_measured_and_a_prediction_for_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The prediction is only asked to be of the right size: another test may have the processor."""
    monkeypatch.setattr(measure, "CONF", tmp_path)
    monkeypatch.setattr(measure, "training_speed", lambda cfg: 9000.0)
    monkeypatch.setattr(real_rounds, "SECONDS", 1.0)
    for kind in ("cluster", "workload"):
        (tmp_path / kind).mkdir()
    cfg = config(*SMALL, "strategy=sync", "launcher=process", "learners=2", f"exp={tmp_path}", "train.batch_size=256")
    measure.measure(cfg, "mine")
    made = {kind: yaml.safe_load((tmp_path / kind / "mine.yaml").read_text()) for kind in ("cluster", "workload")}
    cluster = Cluster.build(made["cluster"])
    assert cluster.devices == 2 and cluster.host_bandwidth > 1e7 and 0 < cluster.host_latency < 0.1
    assert Workload.build(made["workload"]).frames_per_second == {"cpu": 9000.0}
    cfg.cluster, cfg.workload = made["cluster"], made["workload"]
    htm = config(*SMALL, "strategy=htm", "launcher=process", "learners=2", f"exp={tmp_path}", "train.batch_size=256")
    htm.cluster, htm.workload = made["cluster"], made["workload"]
    (found,) = real_rounds.check({("htm", 2): htm, ("sync", 2): cfg})
    assert found.strategy == "sync" and found.predicted == pytest.approx(found.measured, rel=0.5)
    assert "left out: htm, 2 learners: strategy.group_size=8: does not divide learners=2" in caplog.text
    (tmp_path / "cluster/mine.yaml").write_text("name: of a user")
    with pytest.raises(InputError, match=r"mine\.yaml: was not made by this command"):
        measure.measure(cfg, "mine")


@pytest.mark.parametrize("value", [8e8, 1.268e7, 2e-5, 0.5, 12.0, 0.0])
def test_round_figures_are_numbers_for_every_reader_of_yaml(value: float) -> None:
    pair = {"host": {"latency": [value + 1.0] * 3, "seconds": [value + 1.0] * 3}}
    trials = dict.fromkeys(("short_all_reduce", "all_reduce", "update", "averaging", "factoring"), [1.0] * 3)
    found = {"hosts": [0, 0], "computing": [1.0, 2.0], "beside": [], **pair, **trials}
    cluster, workload = measure.describe("mine", found, 8e8, value)
    assert yaml.safe_load(workload)["frames_per_second"] == {"cpu": value}
    assert yaml.safe_load(cluster)["update_bandwidth"] == 8e8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mesure"], "did you mean measure"),
        (["measure", "learners=4"], "name=NAME is missing"),
        (["predict", "cluster=local"], "give learners="),
        (["predict", "learners=4,x"], "give learners="),
        (["measure", "name=mine", "learners=1"], "give launcher=process"),
    ],
)
def test_a_wrong_command_is_one_line(arguments: list[str], message: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1 and message in caplog.text and caplog.text.count("\n") == 1


def test_lists_of_values() -> None:
    assert taken(["a=1", "b=2,3"], "b") == (["2", "3"], ["a=1"])
