"""The output of a training run: metrics, lease log, summary, experiment tracking and the progress bar."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import yaml

from asr_am.data import disk
from asr_am.data.checksums import intact
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.progress import ProgressBar

if TYPE_CHECKING:  # they import torch, which stage report does without
    from asr_am.distributed.leases import SegmentRecord
    from asr_am.train.checkpoint import TrainProgress
    from asr_am.train.comm_metrics import CommMetrics
    from asr_am.train.train_options import TrainOptions

log = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """Experiment tracking beside the files of the run. Stages score and report continue the tracking of a run."""

    def start(self, directory: Path, config: Mapping[str, Any]) -> None:
        """Starts, or continues, the tracking of the run in `directory` with this configuration."""

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Adds a point to each curve that `record` names. `step` counts the updates of the team."""

    def summarize(self, values: Mapping[str, Any]) -> None:
        """Sets results of the whole run."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table of results."""

    def save(self, path: Path, kind: str, copy: bool) -> None:
        """Attaches a file. Without `copy` it must stay where it is until it is uploaded."""

    def finish(self) -> None:
        """Ends the tracking."""


class NoTracker:
    """Tracks nothing. The files of the run are enough."""

    def start(self, directory: Path, config: Mapping[str, Any]) -> None:
        pass

    def log(self, record: Mapping[str, Any], step: int) -> None:
        pass

    def summarize(self, values: Mapping[str, Any]) -> None:
        pass

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        pass

    def save(self, path: Path, kind: str, copy: bool) -> None:
        pass

    def finish(self) -> None:
        pass


EPOCH_CURVES = (
    "heldout_loss", "heldout_frame_error", "train_loss", "train_frame_accuracy", "consensus_distance", "staleness_mean",
    "idle_seconds", "bytes_sent", "modelled_bytes", "idle_seconds/*", "bytes_sent/*", "batches/*",
)  # fmt: skip
UPDATE_CURVES = ("loss", "frame_accuracy", "lr", "frames_per_second")
WANDB_TIMEOUTS = {"init_timeout": 30, "login_timeout": 10, "finish_timeout": 120}  # seconds, for mode=online


class WandbTracker:
    """Weights & Biases. Its first failure becomes one warning and ends the tracking, never the run.

    A run directory belongs to one W&B run, whose id is in wandb/run-id. Each process that continues it, such as a
    resumed training or stage score, adds a segment offline, and `wandb sync` merges the segments. wandb is imported on
    `start`.

    Args:
        project: name of the project.
        mode: offline (files in the run's directory, uploaded by `wandb sync`), online or disabled.
        name: name of the run, by default that of its directory.
        entity: user or team that owns the project, by default that of the account.
        group: runs with the same group are shown together.
        tags: labels of the run.
    """

    def __init__(
        self, project: str = "asr_am", mode: Literal["offline", "online", "disabled"] = "offline",
        name: str | None = None, entity: str | None = None, group: str | None = None, tags: list[str] | None = None,
    ) -> None:  # fmt: skip
        self.project, self.mode, self.name, self.entity, self.group = project, mode, name, entity, group
        self.tags = [tag[:64] for tag in tags or []]  # W&B refuses longer tags
        self._run: Any = None
        self._has_curves = False

    def start(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._directory = directory
        if self.mode != "disabled" and not attempt("wandb", lambda: self._init(directory, config)):
            self._run = None

    def _init(self, directory: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            entity=self.entity, project=self.project, name=self.name or directory.name, group=self.group,
            job_type="train", tags=self.tags, id=wandb_id(directory), resume="allow", dir=str(directory),
            config=dict(config), mode=self.mode, settings=WANDB_TIMEOUTS,
        )  # fmt: skip
        axes = dict.fromkeys(EPOCH_CURVES, "epoch")
        if config.get("launcher", {}).get("name") == "virtual":
            axes |= dict.fromkeys(UPDATE_CURVES, "virtual_seconds")
        for axis in sorted(set(axes.values())):
            self._run.define_metric(axis)
        for name, axis in axes.items():
            self._run.define_metric(name, step_metric=axis)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        self._has_curves = True
        self._attempt(lambda: self._run.log(dict(record), step=step))

    def summarize(self, values: Mapping[str, Any]) -> None:
        self._attempt(lambda: self._run.summary.update(dict(values)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        def add() -> None:
            import wandb

            self._run.summary[name] = wandb.Table(columns=list(columns), data=[list(row) for row in rows])

        self._attempt(add)

    def save(self, path: Path, kind: str, copy: bool) -> None:
        def add() -> None:
            import wandb

            artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
            artifact.add_file(str(path), skip_cache=True, policy="mutable" if copy else "immutable")
            self._run.log_artifact(artifact)

        self._attempt(add)

    def finish(self) -> None:
        failed = sys.exception() is not None  # called while an exception ends the run
        self._attempt(lambda: self._run.finish(exit_code=int(failed)))
        if self._run is not None and self._has_curves and self.mode == "offline":
            final = self._directory.with_name(self._directory.name.removesuffix(".new"))  # renamed when it is finished
            log.info("W&B offline run: wandb sync %s", final / "wandb")
        self._run = None

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._run is not None and not attempt("wandb", action):
            self._run = None


class TensorboardTracker:
    """TensorBoard, with the same names. Its first failure becomes one warning and ends the tracking, never the run.

    The files are in tensorboard/ of the run's directory. On a virtual cluster, times are virtual seconds.

    Raises:
        InputError: tensorboard is not installed.
    """

    def __init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise InputError("logger=tensorboard: tensorboard is not installed; run pip install -e '.[tensorboard]'")
        self._writer: Any = None

    def start(self, directory: Path, config: Mapping[str, Any]) -> None:
        def init() -> None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"))
            self._writer.add_text("config", f"```\n{json.dumps(config, indent=1, default=str)}\n```")

        attempt("tensorboard", init)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        def add() -> None:
            for name, value in record.items():
                self._writer.add_scalar(name, value, step, walltime=record.get("virtual_seconds"))

        self._attempt(add)

    def summarize(self, values: Mapping[str, Any]) -> None:
        def add() -> None:
            for name, value in values.items():
                self._writer.add_scalar(name, value)

        self._attempt(add)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        self._attempt(lambda: self._writer.add_text(name, text))

    def save(self, path: Path, kind: str, copy: bool) -> None:
        pass  # TensorBoard keeps no files

    def finish(self) -> None:
        self._attempt(lambda: self._writer.close())
        self._writer = None

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._writer is not None and not attempt("tensorboard", action):
            self._writer = None


def attempt(what: str, action: Callable[[], object]) -> bool:
    """Runs `action`. A failure becomes a warning that names `what`. Returns True on success."""
    try:
        action()
    except Exception as error:  # whatever failed, the run continues
        log.warning(
            "%s failed (%s: %s): the run continues without it; the files of the run have all results", what,
            type(error).__name__, error,
        )  # fmt: skip
        return False
    return True


def wandb_id(directory: Path) -> str:
    """Returns the W&B id of the run in `directory`, made on the first call and stored there.

    It begins with the run's key. The rest is random: a run that is deleted and trained again is another W&B run.
    """
    path = directory / "wandb" / "run-id"
    if not path.exists():
        key = directory / ".key"
        parts = [key.read_text()] if key.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, ["-".join([*parts, secrets.token_hex(4)])])
    return path.read_text().strip()


def saved_config(directory: Path) -> dict[str, Any]:
    """Returns the resolved configuration that stage train saved in a run's directory, {} if there is none."""
    path = directory / "config.yaml"
    if not path.exists():
        return {}
    config = yaml.safe_load(intact(path).read_text())
    assert isinstance(config, dict)
    return {str(name): value for name, value in config.items()}


class TrainingBar:
    """The progress bar of a training run over all of its epochs. Only the leader of a team shows it."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._epoch, self._batches, self._done = 0, 0, 0
        self._shown = False
        self._bar: ProgressBar | None = None

    def start(self) -> None:
        """Shows the bar from the next count on. A new leader calls this in the middle of an epoch."""
        self._shown = True
        if self._batches:
            self.done(self._done)

    def stop(self) -> None:
        self._shown = False
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None

    def epoch(self, epoch: int, batches: int, done: int) -> None:
        """Starts or resumes epoch `epoch` (from 0) of `batches` batches, `done` of which are finished."""
        self._epoch, self._batches = epoch, batches
        self.done(done)

    def done(self, batches: int) -> None:
        """Sets the number of finished batches of the epoch, counted over all learners."""
        self._done = batches
        done, total = self._epoch * self._batches + batches, self._epochs * self._batches
        if self._bar is None and self._shown:
            self._bar = ProgressBar("training", total, done)
            self._bar.__enter__()
        if self._bar is not None:
            self._bar.description, self._bar.total = f"training, epoch {self._epoch + 1}/{self._epochs}", total
            self._bar.update(done)

    def status(self, text: str) -> None:
        if self._bar is not None:
            self._bar.status = text


class JsonLines:
    """A file with one JSON object per line.

    Its lines are copied to a new file first, so that whoever had it open before, such as a leader that was replaced,
    writes to the old one, which is gone.

    Args:
        path: the file, created if there is none.
        keep_bytes: keep only so many bytes of it. A resumed run writes the lines after its checkpoint again. None: all
            complete lines.
        writer: see `disk.replace`.
        check: see `disk.replace`.
    """

    def __init__(
        self, path: Path, keep_bytes: int | None, writer: str = "", check: Callable[[], None] = lambda: None
    ) -> None:
        content = path.read_bytes() if path.exists() else b""
        content = content[: content.rfind(b"\n") + 1 if keep_bytes is None else keep_bytes]
        disk.replace(path, lambda file: file.write(content), writer, check)
        self._file, self._size = disk.open_to_append(path), len(content)

    def write(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record) + "\n").encode()
        disk.append(self._file, line)
        self._size += len(line)

    def sync(self) -> int:
        """Makes all lines durable, and returns their number of bytes."""
        disk.sync(self._file)
        return self._size

    def close(self) -> None:
        self._file.close()


class RunLog:
    """Writes metrics.jsonl, leases.jsonl and summary.json of a run, and feeds its tracker and progress bar.

    Only the leader of the team writes. Each new leader opens the files.

    Args:
        out: directory of the run.
        tracker: experiment tracking.
        progress_bar: the bar on the terminal.
        config: options of the run, for the tracker. A config.yaml in `out`, the whole configuration, replaces them.
    """

    def __init__(self, out: Path, tracker: Tracker, progress_bar: TrainingBar, config: Mapping[str, Any]) -> None:
        self.out, self.tracker, self.progress_bar, self._config = out, tracker, progress_bar, config
        self._is_open = False
        self._writer, self._check = "", lambda: None
        self._metrics: JsonLines
        self._leases: JsonLines

    def open(self, keep: tuple[int | None, int], writer: str = "", check: Callable[[], None] = lambda: None) -> None:
        """Opens the files, as a new leader.

        Args:
            keep: bytes of metrics.jsonl (None: all complete lines) and of leases.jsonl to keep.
            writer: see `disk.replace`.
            check: see `disk.replace`.
        """
        if self._is_open:
            self._metrics.close()
            self._leases.close()
        self._writer, self._check = writer, check
        self._metrics = JsonLines(self.out / "metrics.jsonl", keep[0], writer, check)
        self._leases = JsonLines(self.out / "leases.jsonl", keep[1], writer, check)
        if not self._is_open:
            self.tracker.start(self.out, saved_config(self.out) or self._config)
            self.progress_bar.start()
        self._is_open = True

    def sync(self) -> tuple[int, int]:
        """Makes metrics.jsonl and leases.jsonl durable, and returns their bytes."""
        return self._metrics.sync(), self._leases.sync()

    def metrics(self, record: Mapping[str, Any], step: int, curves: Mapping[str, float]) -> None:
        """Writes a record to metrics.jsonl and to the tracker.

        Args:
            record: the record.
            step: updates of the team so far.
            curves: further values for the tracker only.
        """
        self._metrics.write(record)
        self.tracker.log({**record, **curves}, step)

    def epoch(self, record: Mapping[str, Any], updates: int, curves: Mapping[str, float]) -> None:
        """Writes the metrics of a finished epoch, unless a leader that has died since has written them already.

        Args:
            record: last record of `TrainProgress.history`.
            updates: updates of the team so far.
            curves: further values for the tracker only, from `epoch_curves`.
        """
        line = {**record, "batch": updates}
        if json.dumps(line) not in (self.out / "metrics.jsonl").read_text().splitlines():
            self.metrics(line, updates, curves)
        loss, error = record["heldout_loss"], record["heldout_frame_error"]
        message = f"epoch {record['epoch']}: held-out loss {loss:.4f}, frame error {error:.2%}"
        log.info("%s, training loss %.4f", message, record["train_loss"])
        self.progress_bar.status(message)

    def leases(self, record: SegmentRecord, launch: str) -> None:
        """Writes the audited leases of a segment.

        Args:
            record: the leases.
            launch: identity of the launch, "" without one.
        """
        from asr_am.distributed.leases import record_to_json

        self._leases.write(record_to_json(record) | ({"launch": launch[:8]} if launch else {}))

    def summary(self, summary: Mapping[str, Any]) -> None:
        content = (json.dumps(summary, indent=1) + "\n").encode()
        disk.replace(self.out / "summary.json", lambda file: file.write(content), self._writer, self._check)
        best = summary["best_epoch"] - 1
        self.tracker.summarize({
            "best_epoch": summary["best_epoch"],
            "best_heldout_loss": summary["heldout_loss"][best],
            "best_heldout_frame_error": summary["heldout_frame_error"][best],
            "parameters": summary["parameters"],
            "training_seconds": summary["seconds"],
        })  # fmt: skip

    def close(self) -> None:
        if self._is_open:
            self.progress_bar.stop()
            self.tracker.finish()
            self._metrics.close()
            self._leases.close()
            self._is_open = False


def epoch_curves(progress: TrainProgress, metrics: CommMetrics, clock: str) -> dict[str, float]:
    """Returns the values that a tracker shows per epoch beside the record of the epoch.

    Counts, bytes and seconds are those since the start of the run. Names that end in /rank<rank> are for one rank.

    Args:
        progress: progress after the epoch.
        metrics: metrics of the team.
        clock: "wall" or "virtual".
    """
    bytes_by_rank: Counter[int] = Counter()
    for link, sent in metrics.bytes_per_link.items():
        bytes_by_rank[int(link.partition("-")[0])] += sent
    by_rank: dict[str, Mapping[int, float]] = {
        "idle_seconds": metrics.waiting_seconds,
        "bytes_sent": bytes_by_rank,
        "batches": progress.batches_per_learner,
    }
    curves: dict[str, float] = {
        "staleness_mean": metrics.mean_staleness,
        "idle_seconds": sum(metrics.waiting_seconds.values()),
        "bytes_sent": metrics.bytes_sent,
    }
    if clock == "virtual":
        curves |= {"modelled_bytes": metrics.modelled_bytes, "virtual_seconds": progress.seconds}
    for name, values in by_rank.items():
        curves |= {f"{name}/rank{rank}": value for rank, value in sorted(values.items())}
    return curves


def make_summary(
    options: TrainOptions, progress: TrainProgress, metrics: CommMetrics, provenance: Mapping[str, object], *,
    strategy: str, learners: int, clock: str, parameters: int, threads: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns the content of summary.json.

    Args:
        options: options of the run.
        progress: progress after the last finished epoch.
        metrics: metrics of the team.
        provenance: origin of the run, added as it is.
        strategy: name of the strategy.
        learners: number of learners.
        clock: "wall" or "virtual", for all seconds.
        parameters: number of weights.
        threads: threads of arithmetic of each learner.
    """
    best = min(progress.history, key=lambda record: record["heldout_loss"])
    return {
        "strategy": strategy,
        "learners": learners,
        "batch": options.batch_size,
        "epochs": options.epochs,
        "epochs_done": progress.epoch,
        "best_epoch": best["epoch"],
        "heldout_loss": [record["heldout_loss"] for record in progress.history],
        "heldout_frame_error": [record["heldout_frame_error"] for record in progress.history],
        "train_loss": [record["train_loss"] for record in progress.history],
        "seconds": round(progress.seconds, 3),
        "seconds_per_epoch": progress.seconds_per_epoch,
        "clock": clock,
        "frames_per_second": round(progress.frames / max(progress.seconds, 1e-9)),
        "batches_per_learner": progress.batches_per_learner,
        **asdict(metrics),
        "consensus_distance": [record["consensus_distance"] for record in progress.history],
        "parameters": parameters,
        "optimizer": options.optimizer.kind,
        "momentum": options.optimizer.momentum,
        "schedule": asdict(options.schedule),
        "seed": options.seed,
        "threads": threads,
        **provenance,
    }
