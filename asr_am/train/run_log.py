"""The output of a training run: metrics, lease log, summary, experiment tracking and the progress bar."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asr_am.data.textfile import write_lines
from asr_am.distributed.leases import SegmentRecord, record_to_json
from asr_am.train.checkpoint import TrainProgress
from asr_am.train.comm_metrics import CommMetrics
from asr_am.train.train_options import TrainOptions

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Experiment tracking beside the files of the run."""

    def start(self, directory: Path, config: Mapping[str, Any]) -> None: ...
    def log(self, record: Mapping[str, Any], step: int) -> None: ...
    def finish(self) -> None: ...


class NoTracker:
    """Tracks nothing. The files of the run are enough."""

    def start(self, directory: Path, config: Mapping[str, Any]) -> None:
        pass

    def log(self, record: Mapping[str, Any], step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class WandbTracker:
    """Weights & Biases. Its first failure becomes one warning and ends the tracking, never the run.

    wandb is imported on `start`.

    Args:
        project: name of the project.
        mode: offline (files in the run's directory, uploaded by `wandb sync`), online or disabled.
        name: name of the run, by default that of its directory.
    """

    def __init__(self, project: str = "asr_am", mode: str = "offline", name: str | None = None) -> None:
        self.project, self.mode, self.name = project, mode, name
        self._run: Any = None

    def start(self, directory: Path, config: Mapping[str, Any]) -> None:
        def init() -> None:
            os.environ.setdefault("WANDB_SILENT", "true")
            import wandb

            self._run = wandb.init(
                project=self.project, name=self.name or directory.name, group=directory.name, dir=str(directory),
                config=dict(config), mode=self.mode, resume="allow",  # type: ignore[arg-type]
            )  # fmt: skip

        self._try(init)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        if self._run is not None:
            self._try(lambda: self._run.log(dict(record), step=step))

    def finish(self) -> None:
        if self._run is not None:
            self._try(lambda: self._run.finish())

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever failed, the training continues
            log.warning(
                "wandb failed (%s: %s): the run continues without it; metrics.jsonl has all metrics",
                type(error).__name__, error,
            )  # fmt: skip
            self._run = None


class ProgressBar:
    """A progress bar on stderr for the current epoch, with a status text behind it. Off unless stderr is a terminal."""

    def __init__(self, epochs: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, TextColumn("{task.fields[status]}"), console=Console(stderr=True), transient=True,
            disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._epochs = epochs
        self._task = self._progress.add_task("training", total=None, status="")

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def epoch(self, epoch: int, batches: int, done: int) -> None:
        """Starts or resumes epoch `epoch` (from 0) of `batches` batches, `done` of which are finished."""
        description = f"training, epoch {epoch + 1}/{self._epochs}"
        self._progress.reset(self._task, total=batches, completed=done, description=description)

    def done(self, batches: int) -> None:
        """Sets the number of finished batches of the epoch, counted over all learners."""
        self._progress.update(self._task, completed=batches)

    def status(self, text: str) -> None:
        self._progress.update(self._task, status=text)


class JsonLines:
    """A file with one JSON object per line.

    Args:
        path: the file, created if there is none.
        keep_bytes: keep only so many bytes of it. A resumed run writes the lines after its checkpoint again. None: all.
    """

    def __init__(self, path: Path, keep_bytes: int | None) -> None:
        self._file = path.open("ab")
        if keep_bytes is not None:
            self._file.truncate(min(keep_bytes, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()

    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class RunLog:
    """Writes metrics.jsonl, leases.jsonl and summary.json of a run, and feeds its tracker and progress bar.

    Only the leader of the team writes. If it dies, the next leader opens the files.

    Args:
        out: directory of the run.
        tracker: experiment tracking.
        progress_bar: the bar on the terminal.
        config: options of the run, for the tracker.
    """

    def __init__(self, out: Path, tracker: Tracker, progress_bar: ProgressBar, config: Mapping[str, Any]) -> None:
        self.out, self.tracker, self.progress_bar, self._config = out, tracker, progress_bar, config
        self._is_open = False

    def open(self, keep: tuple[int, int] | None) -> None:
        """Opens the files. Later calls do nothing.

        Args:
            keep: bytes of metrics.jsonl and leases.jsonl to keep. None: all.
        """
        if self._is_open:
            return
        self._metrics = JsonLines(self.out / "metrics.jsonl", keep[0] if keep else None)
        self._leases = JsonLines(self.out / "leases.jsonl", keep[1] if keep else None)
        self.tracker.start(self.out, self._config)
        self.progress_bar.start()
        self._is_open = True

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of metrics.jsonl and leases.jsonl."""
        return self._metrics.size(), self._leases.size()

    def metrics(self, record: Mapping[str, Any], step: int) -> None:
        self._metrics.write(record)
        self.tracker.log(record, step)

    def epoch(self, record: Mapping[str, Any], updates: int) -> None:
        """Writes the metrics of a finished epoch, unless a leader that has died since has written them already.

        Args:
            record: last record of `TrainProgress.history`.
            updates: updates of the team so far.
        """
        line = {**record, "batch": updates}
        if json.dumps(line) not in (self.out / "metrics.jsonl").read_text().splitlines():
            self.metrics(line, updates)
        loss, error = record["heldout_loss"], record["heldout_frame_error"]
        message = f"epoch {record['epoch']}: held-out loss {loss:.4f}, frame error {error:.2%}"
        log.info("%s, training loss %.4f", message, record["train_loss"])
        self.progress_bar.status(message)

    def leases(self, record: SegmentRecord) -> None:
        """Writes the audited leases of a segment."""
        self._leases.write(record_to_json(record))

    def summary(self, summary: Mapping[str, Any]) -> None:
        write_lines(self.out / "summary.json", [json.dumps(summary, indent=1)])

    def close(self) -> None:
        if self._is_open:
            self.progress_bar.stop()
            self.tracker.finish()
            self._metrics.close()
            self._leases.close()
            self._is_open = False


def make_summary(
    options: TrainOptions, progress: TrainProgress, metrics: CommMetrics, provenance: Mapping[str, object], *,
    strategy: str, learners: int, clock: str, parameters: int,
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
        **provenance,
    }
