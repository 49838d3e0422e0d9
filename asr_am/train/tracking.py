"""Experiment tracking beside metrics.jsonl: Weights & Biases, which may fail without failing the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

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
