"""Experiment tracking: what is in the files of an offline W&B run, without network."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from google.protobuf.message import DecodeError
from omegaconf import DictConfig
from wandb.proto.wandb_internal_pb2 import Record

from asr_am.data.ownership import begun_key
from asr_am.errors import InputError
from asr_am.score.scoring import Reference
from asr_am.stages.layout import egs_dir
from asr_am.stages.report import track as track_report
from asr_am.stages.resolvers import experiment_or
from asr_am.stages.score import summary, track
from asr_am.stages.sections import values
from asr_am.stages.train import targets
from asr_am.stages.train_config import TrainConfig, tracker_factory
from asr_am.train import tracking
from asr_am.train.tracking import NoTracker, TensorboardTracker, WandbTracker, attempt, wandb_id
from asr_am.train.wandb_segments import messages
from tests.support.configurations import config
from tests.support.egs_examples import write_examples

TINY = (
    "corpus.name=toy", "model.layers=1", "model.cells=8", "model.projection=4", "train.epochs=2", "train.batch_size=8",
    "train.threads=1", "train.device=cpu", "train.report_every=1", "run=first",
)  # fmt: skip
VIRTUAL = ("launcher=virtual", "learners=2", "strategy=adpsgd", "cluster=ibm_a", "workload=swb2000_lstm")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps W&B away from the home directory, and from any server that the environment names."""
    home = tmp_path_factory.mktemp("home")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for name in ("MODE", "DIR", "DISABLED", "PROJECT", "ENTITY", "NAME", "RUN_GROUP"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)


def segments(run: Path, finished: int = 1) -> list[list[Record]]:
    """Reads the offline segments of a run directory, oldest first. The newest of them, `finished`, were not killed."""
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    deadline = time.monotonic() + 30
    while not all(map(has_ended, files[-finished:])) and time.monotonic() < deadline:
        time.sleep(0.05)  # W&B's service may write after `finish`
    return [list(whole_records(path)) for path in files]


def has_ended(path: Path) -> bool:
    return any(record.WhichOneof("record_type") == "exit" for record in whole_records(path))


def whole_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file up to where it was cut off."""
    for message in messages(path.read_bytes()):
        try:
            yield Record.FromString(message)
        except DecodeError:
            return


def run_record(records: list[Record]) -> Any:
    return next(record.run for record in records if record.WhichOneof("record_type") == "run")


def items(updates: Any) -> dict[str, Any]:
    """Decodes items of a history, summary or config record."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def history(records: list[Record]) -> list[dict[str, Any]]:
    return [items(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]


def summary_of(records: list[Record]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records:
        found |= items(record.summary.update)
    return found


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    made = config(*TINY, *VIRTUAL, f"exp={tmp_path_factory.mktemp('exp')}")
    write_examples(egs_dir(made))
    return made


@pytest.fixture(scope="module")
def trained(cfg: DictConfig) -> Path:
    """A run on a virtual cluster, trained through its stage."""
    (target,) = targets(cfg)
    assert target.run()
    return target.out


def test_an_offline_run_has_configuration_curves_and_summary(trained: Path) -> None:
    (records,) = segments(trained)
    run = run_record(records)
    assert run.run_id == wandb_id(trained) and run.run_id.startswith(begun_key(trained) or "none")
    assert (run.project, run.run_group, run.job_type, run.display_name) == ("asr_am", "toy", "train", "first")
    assert sorted(run.tags) == ["adpsgd", "toy", "virtual"]
    options = items(run.config.update)
    assert options["strategy"]["name"] == "adpsgd" and options["learners"] == 2
    assert options["launcher"]["name"] == "virtual" and options["cluster"]["name"] == "ibm_a"
    assert (
        options["corpus"]["name"] == "toy" and "logmel" in options["features"]["kinds"] and "mono" in options["align"]
    )
    assert options["train"]["batch_size"] == 8
    rows = history(records)
    epochs = [row for row in rows if "heldout_loss" in row]
    per_rank = {f"{name}/rank{rank}" for name in ("bytes_sent", "waiting_seconds", "batches") for rank in (0, 1)}
    expected = {"epoch", "virtual_seconds", "heldout_frame_error", "train_loss", "staleness_mean", "waiting_seconds"}
    assert len(epochs) == 2 and expected | {"bytes_sent", "modelled_bytes"} | per_rank <= epochs[-1].keys()
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert "virtual_seconds" not in lines[0] and "staleness_mean" not in lines[-1]
    reports = [row for row in rows if "loss" in row]
    assert {"epoch", "frame_accuracy", "lr", "frames_per_second", "virtual_seconds"} <= reports[0].keys()
    seconds = [row["virtual_seconds"] for row in rows if "virtual_seconds" in row]
    assert seconds == sorted(seconds) and seconds[0] > 0
    axes = {record.metric.name or record.metric.glob_name: record.metric.step_metric
            for record in records if record.WhichOneof("record_type") == "metric"}  # fmt: skip
    assert axes["heldout_loss"] == axes["batches/*"] == "epoch" and axes["loss"] == "virtual_seconds"
    whole = json.loads((trained / "summary.json").read_text())
    found = summary_of(records)
    assert found["best_epoch"] == whole["best_epoch"] and found["training_seconds"] == whole["seconds"]
    assert found["best_heldout_loss"] == min(whole["heldout_loss"]) and found["parameters"] == whole["parameters"]


def test_a_resumed_run_continues_the_same_wandb_run(cfg: DictConfig, trained: Path, tmp_path: Path) -> None:
    first, second = (WandbTracker(name="a") for _ in range(2))
    for tracker, step in ((first, 1), (second, 2)):
        tracker.start(tmp_path, {})
        tracker.log({"loss": 1.0}, step)
        tracker.finish()
    ids = [run_record(records).run_id for records in segments(tmp_path, finished=2)]
    assert len(ids) == 2 and len(set(ids)) == 1 and ids[0] != wandb_id(trained)


def test_a_resumed_run_adds_the_points_that_a_kill_has_lost(tmp_path: Path) -> None:
    def log_points(steps: range, lot: int) -> None:
        time.sleep(1 - time.time() % 1)  # W&B names a folder by the second
        tracker = WandbTracker()
        tracker.start(tmp_path, {})
        for step in steps:
            tracker.log({"loss": float(step)}, step)
            tracker.log({"lot": lot}, step)
        tracker.finish()

    log_points(range(400), 1)
    segments(tmp_path)  # waits for the file
    (segment,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    with segment.open("r+b") as file:  # what had been written when the process was killed
        file.truncate(segment.stat().st_size // 2)
    log_points(range(380, 420), 2)  # from its checkpoint on
    first, second = map(history, segments(tmp_path))
    assert 50 < len(first) < 380
    assert [row["loss"] for row in [*first, *second]] == list(range(420)), "none is missing, none is there twice"
    assert [row["lot"] for row in second if row["loss"] >= 380] == [2] * 40
    log_points(range(410, 430), 3)  # nothing was lost this time
    (third,) = (rows for rows in map(history, segments(tmp_path)) if rows not in (first, second))
    assert [row["loss"] for row in third] == list(range(420, 430))


@pytest.mark.parametrize(
    ("variables", "overrides", "mode"),
    [
        ({}, (), "offline"),
        ({"MODE": "online"}, (), "online"),
        ({"MODE": "dryrun"}, (), "offline"),
        ({"MODE": "online"}, ("logger.mode=offline",), "offline"),
        ({"DISABLED": "true"}, (), "disabled"),
        ({"DISABLED": "false"}, (), "offline"),
        ({"DISABLED": "true", "MODE": "online"}, (), "disabled"),
        ({"DISABLED": "true"}, ("logger.mode=online",), "online"),
    ],
)
def test_the_environment_wins_over_defaults_and_options_over_it(
    variables: dict[str, str], overrides: tuple[str, ...], mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**variables, "PROJECT": "theirs", "NAME": "x", "RUN_GROUP": "y", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    tracker = tracker_factory(values(config("corpus=an4", "run=r", *overrides).logger))()
    assert isinstance(tracker, WandbTracker)
    assert (tracker.mode, tracker.dir) == (mode, str(tmp_path))
    assert (tracker.project, tracker.name, tracker.group) == ("theirs", "x", "y")
    own = ("logger.project=ours", "logger.name=a", "logger.group=b", "logger.dir=c")
    tracker = tracker_factory(values(config("corpus=an4", "run=r", *own).logger))()
    assert isinstance(tracker, WandbTracker)
    assert (tracker.project, tracker.name, tracker.group, tracker.dir) == ("ours", "a", "b", "c")


def test_a_mode_in_the_environment_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(InputError, match=r"^WANDB_MODE=ofline: must be offline, online or disabled; change"):
        tracker_factory(values(config().logger))


def test_a_training_does_not_wait_for_the_start_of_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    init, logged = wandb.init, threading.Event()

    def slow_init(**options: Any) -> Any:
        assert logged.wait(60)
        return init(**options)

    monkeypatch.setattr(wandb, "init", slow_init)
    tracker = WandbTracker()
    tracker.start(tmp_path, {})
    tracker.log({"loss": 2.5}, 1)
    assert json.loads((tmp_path / "wandb/points.jsonl").read_text()) == [1, {"loss": 2.5}]
    logged.set()
    tracker.finish()
    (records,) = segments(tmp_path)
    assert [record.history.step.num for record in records if record.WhichOneof("record_type") == "history"] == [1]


def test_files_are_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "theirs"))
    run = tmp_path / "run"
    run.mkdir()
    tracker = WandbTracker()
    with caplog.at_level(logging.INFO, logger="asr_am"):
        tracker.start(run, {})
        tracker.log({"loss": 1.0}, 1)
        tracker.finish()
    (records,) = segments(tmp_path / "theirs")
    assert run_record(records).run_id == wandb_id(run) and not list(run.rglob("*.wandb"))
    assert f"wandb sync {tmp_path}/theirs/wandb/offline-run-*-{wandb_id(run)}" in caplog.text


def test_training_names_the_command_that_uploads_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "run.new"
    directory.mkdir()
    with caplog.at_level(logging.INFO, logger="asr_am"):
        for records in ([{"loss": 1.0}], []):  # training, then a stage that only adds results
            tracker = WandbTracker()
            tracker.start(directory, {})
            for record in records:
                tracker.log(record, 1)
            tracker.summarize({"wer": 7.5})
            tracker.finish()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("asr_am")]
    assert ours == [f"W&B offline run: wandb sync {tmp_path}/run/wandb"]


def test_scores_and_report_continue_the_run_of_the_network(cfg: DictConfig, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "ref.stm").write_text("a 1 ann 0 2 one two\nb 1 bob 0 2 three\n")
    (tmp_path / "hyp.ctm").write_text("a 1 0.1 0.1 one\na 1 0.5 0.1 too\nb 1 0.1 0.1 three\n")
    score = Reference(tmp_path / "ref.stm", None, {}).score(tmp_path / "hyp.ctm")
    before = len(segments(trained))
    tracker = tracker_factory(values(cfg.logger))()
    track(tracker, trained, "ug", {"dev_wer": 12.5, "lm": "ug", **summary(score, 10)}, score)
    (tmp_path / "RESULTS.md").write_text("# Results\n")
    track_report(trained, values(cfg.logger), tmp_path / "RESULTS.md")
    scored, reported = segments(trained)[before:]
    assert {run_record(records).run_id for records in (scored, reported)} == {wandb_id(trained)}
    assert run_record(scored).job_type == "train"
    found = summary_of(scored)
    assert found["wer/ug/dev"] == 12.5 and found["wer/ug/all"] == pytest.approx(100 / 3)
    table = found["errors/ug"]
    assert table["_type"] == "table-file" and table["nrows"] == 2
    (media,) = (trained / "wandb").rglob("*.table.json")
    content = json.loads(media.read_text())
    assert content["columns"][0] == "speaker" and [row[0] for row in content["data"]] == ["ann", "bob"]
    artifacts = [[record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
                 for records in (scored, reported)]  # fmt: skip
    kinds = [[artifact.type for artifact in segment] for segment in artifacts]
    assert kinds == [["run_table", "model"], ["report"]]
    (model,) = artifacts[0][1].manifest.contents
    assert (model.path, model.local_path) == ("best.pt", str(trained / "best.pt")), "not copied"
    assert TrainConfig.parse(cfg, trained) and not targets(cfg)[0].run(), "the finished run is still up to date"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("logger.mode=of-line",), r"^logger\.mode=of-line: must be 'offline', 'online' or 'disabled'"),
        (("logger.project=7",), r"^logger\.project=7: must be text"),
        (("logger.tags=an4",), r"^logger\.tags=an4: must be a list"),
        (("+logger.nane=x",), r"^logger\.nane: there is no such option; did you mean name\?"),
    ],
)
def test_a_wrong_logger_option_is_named(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tracker_factory(values(config(*overrides).logger))


def test_groups_are_experiments_or_corpora() -> None:
    cfg = config("corpus=an4", "logger.group=rates")
    assert cfg.logger.group == "rates" and config("corpus=an4").logger.group == "an4" == experiment_or("an4")
    assert isinstance(tracker_factory(values(config("logger=none").logger))(), NoTracker)


def test_a_failure_is_one_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert attempt("wandb", lambda: None) and not caplog.messages
    (tmp_path / "file").write_text("")
    tracker = WandbTracker()
    tracker.start(tmp_path / "file", {})
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
    tracker.finish()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("wandb failed (")


def test_tensorboard_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^logger=tensorboard: tensorboard is not installed; run pip install"):
        tracker_factory(values(config("logger=tensorboard").logger))


def test_tensorboard_has_the_same_names(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorboardTracker()
    tracker.start(tmp_path, {"seed": 1})
    tracker.log({"epoch": 1, "loss": 0.5, "virtual_seconds": 3.0}, 4)
    tracker.summarize({"wer/ug/all": 7.5})
    tracker.table("errors/ug", ["speaker", "wer"], [["ann", 7.5]])
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"epoch", "loss", "wer/ug/all"} <= set(events.Tags()["scalars"])
    (loss,) = events.Scalars("loss")
    assert (loss.step, loss.value, loss.wall_time) == (4, 0.5, 3.0)
    assert {"config/text_summary", "errors/ug/text_summary"} <= set(events.Tags()["tensors"])
