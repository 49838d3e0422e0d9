"""The progress line of a training run, on stderr, where that is a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
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
