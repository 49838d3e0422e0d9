"""Experiment tracking beside metrics.jsonl: Weights & Biases, which may fail without failing the run.

The progress line of a training run, on stderr, where that is a terminal.

The files that one learner, the coordinator, writes for the whole run: metrics, lease log, summary, best model."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asr_am.data.textfile import write_lines
from asr_am.distributed.leases import SegmentRecord, record_to_json

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics go, beside the files of the run."""

    def start(self, directory: Path, config: Mapping[str, Any]) -> None: ...
    def log(self, record: Mapping[str, Any], step: int) -> None: ...
    def finish(self) -> None: ...


class NoTracker:
    """The files of the run are enough."""

    def start(self, directory: Path, config: Mapping[str, Any]) -> None:
        pass

    def log(self, record: Mapping[str, Any], step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class WandbTracker:
    """Weights & Biases. mode: offline (files under the run's directory, `wandb sync` uploads them), online, disabled.

    The first failure becomes one warning and ends the tracking, never the run. wandb is imported on `start`.
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
        except Exception as error:  # whatever it is, training matters more
            log.warning("tracking with wandb ends here (%s: %s); metrics.jsonl goes on", type(error).__name__, error)
            self._run = None


class ProgressBar:
    """A bar for the current epoch with loss and frames per second behind it."""

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
        """Begin, or go on with, epoch `epoch` (from 0) of `batches` batches, `done` of which are done."""
        description = f"training, epoch {epoch + 1}/{self._epochs}"
        self._progress.reset(self._task, total=batches, completed=done, description=description)

    def done(self, batches: int) -> None:
        """Batches of the epoch done by all learners."""
        self._progress.update(self._task, completed=batches)

    def status(self, text: str) -> None:
        self._progress.update(self._task, status=text)


class JsonLines:
    """A file of one JSON object a line."""

    def __init__(self, path: Path, keep_bytes: int | None) -> None:
        """Keep the first `keep_bytes` of the file, or all: lines after the checkpoint a run resumes from are redone."""
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
    """metrics.jsonl, leases.jsonl, summary.json, the tracker and the progress line of the run in `out`.

    Only the coordinator writes; another learner that takes its place opens the journal then.
    """

    def __init__(self, out: Path, tracker: Tracker, progress_bar: ProgressBar, config: Mapping[str, Any]) -> None:
        self.out, self.tracker, self.progress_bar, self._config = out, tracker, progress_bar, config
        self._is_open = False

    def open(self, keep: tuple[int, int] | None) -> None:
        """Open for writing, once. keep: bytes of metrics.jsonl and leases.jsonl to keep; None: all."""
        if self._is_open:
            return
        self._metrics = JsonLines(self.out / "metrics.jsonl", keep[0] if keep else None)
        self._leases = JsonLines(self.out / "leases.jsonl", keep[1] if keep else None)
        self.tracker.start(self.out, self._config)
        self.progress_bar.start()
        self._is_open = True

    def sizes(self) -> tuple[int, int]:
        return self._metrics.size(), self._leases.size()

    def metrics(self, record: Mapping[str, Any], step: int) -> None:
        self._metrics.write(record)
        self.tracker.log(record, step)

    def leases(self, record: SegmentRecord) -> None:
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
