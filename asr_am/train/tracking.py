"""Experiment tracking: Weights & Biases, TensorBoard, or none. It can fail, and the run goes on."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, Protocol, runtime_checkable

from asr_am.data.ownership import begun_key
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.train.wandb_segments import PointJournal

log = logging.getLogger(__name__)


@runtime_checkable
class Tracker(Protocol):
    """Experiment tracking beside the files of the run. Stages score and report continue the tracking of a run.

    If `start` imports a module that takes long, an attribute `module` may name it. It is then imported before learners
    are forked.
    """

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
    "heldout_loss", "heldout_frame_error", "heldout_perplexity", "train_loss", "train_frame_accuracy",
    "consensus_distance", "staleness_mean", "waiting_seconds", "bytes_sent", "modelled_bytes", "waiting_seconds/*",
    "bytes_sent/*", "batches/*",
)  # fmt: skip
UPDATE_CURVES = ("loss", "frame_accuracy", "lr", "frames_per_second")
WANDB_TIMEOUTS = {"init_timeout": 30, "login_timeout": 10, "finish_timeout": 120}  # seconds, for mode=online


class WandbTracker:
    """Weights & Biases. Its first failure becomes one warning and ends the tracking, never the run.

    A thread makes all calls of W&B in their order, as its start takes seconds, or half a minute if its server does not
    answer. The training goes on meanwhile, and `finish` waits.

    A run directory belongs to one W&B run, whose id is in wandb/run-id. Each process that continues it, such as a
    resumed training or stage score, adds a segment offline, and `wandb sync` merges the segments. Points that a killed
    process has logged and W&B has not written are added to the next segment. wandb is imported on `start`.

    Args:
        project: name of the project.
        mode: offline (files in the run's directory, uploaded by `wandb sync`), online or disabled. None: disabled if
            WANDB_DISABLED is true, else that of WANDB_MODE, else offline.
        dir: folder of W&B's files, in its subfolder wandb. None: that of WANDB_DIR, else the run's directory.
        name: name of the run, by default that of its directory.
        entity: user or team that owns the project, by default that of the account.
        group: runs with the same group are shown together.
        tags: labels of the run.

    Raises:
        InputError: WANDB_MODE is none of W&B's modes.
    """

    module = "wandb"

    def __init__(
        self, project: str = "asr_am", mode: Literal["offline", "online", "disabled"] | None = None,
        name: str | None = None, entity: str | None = None, group: str | None = None, tags: list[str] | None = None,
        dir: str | None = None,
    ) -> None:  # fmt: skip
        self.project, self.mode, self.name = project, mode or wandb_mode(os.environ), name
        self.entity, self.group, self.dir = entity, group, dir or os.environ.get("WANDB_DIR")
        self.tags = [tag[:64] for tag in tags or []]  # W&B refuses longer tags
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None ends the thread
        self._thread: Thread | None = None
        self._run: Any = None  # None again after a failure
        self._journal: PointJournal | None = None

    def start(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._directory = directory
        if self.mode != "disabled" and attempt("wandb", self._find_segments):
            self._calls = SimpleQueue()
            self._calls.put(lambda: self._init(config))
            self._thread = Thread(target=self._make_calls, name="wandb", daemon=True)
            self._thread.start()

    def _find_segments(self) -> None:
        files = self._files(self._directory)
        files.mkdir(parents=True, exist_ok=True)
        pattern = f"wandb/offline-run-*-{wandb_id(self._directory)}/*.wandb"
        self._segments = sorted(files.glob(pattern)) if self.mode == "offline" else []

    def _make_calls(self) -> None:
        """Makes all calls until the last one, or until one fails."""
        while (call := self._calls.get()) is not None:
            if not attempt("wandb", call):
                self._run = None
                break

    def _init(self, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        directory = self._directory
        with _without_logging_errors():
            self._run = wandb.init(
                entity=self.entity, project=self.project, name=self.name or directory.name, group=self.group,
                job_type="train", tags=self.tags, id=wandb_id(directory), resume="allow",
                dir=str(self._files(directory)), config=dict(config), mode=self.mode, settings=WANDB_TIMEOUTS,
            )  # fmt: skip
        axes = dict.fromkeys(EPOCH_CURVES, "epoch")
        if config.get("launcher", {}).get("name") == "virtual":
            axes |= dict.fromkeys(UPDATE_CURVES, "virtual_seconds")
        for axis in sorted(set(axes.values())):
            self._run.define_metric(axis)
        for name, axis in axes.items():
            self._run.define_metric(name, step_metric=axis)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        point = dict(record)

        def note() -> None:
            if self._journal is None:
                self._journal = PointJournal(self._directory / "wandb" / "points.jsonl", self._segments)
            self._journal.note(point, step)

        def add() -> None:
            assert self._journal is not None
            for at, due in self._journal.due(point, step):
                self._run.log(due, step=at)

        self._calls.put(add if attempt("wandb", note) else None)

    def summarize(self, values: Mapping[str, Any]) -> None:
        summary = dict(values)
        self._calls.put(lambda: self._run.summary.update(summary))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        def add() -> None:
            import wandb

            self._run.summary[name] = wandb.Table(columns=list(columns), data=[list(row) for row in rows])

        self._calls.put(add)

    def save(self, path: Path, kind: str, copy: bool) -> None:
        def add() -> None:
            import wandb

            artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
            artifact.add_file(str(path), skip_cache=True, policy="mutable" if copy else "immutable")
            self._run.log_artifact(artifact)

        self._calls.put(add)

    def finish(self) -> None:
        failed = sys.exception() is not None  # called while an exception ends the run
        if self._thread is not None:
            self._calls.put(lambda: self._run.finish(exit_code=int(failed)))
            self._calls.put(None)
            self._thread.join()
            self._thread = None
        if self._journal is not None:
            self._journal.close()
        if self._run is not None and self._journal is not None and self.mode == "offline":
            final = self._directory.with_name(self._directory.name.removesuffix(".new"))  # renamed when it is finished
            files = self._files(final) / "wandb"
            own = f"/offline-run-*-{wandb_id(self._directory)}" if self.dir else ""
            log.info("W&B offline run: wandb sync %s%s", files, own)
        self._run = self._journal = None

    def _files(self, directory: Path) -> Path:
        return Path(self.dir) if self.dir else directory


class TensorboardTracker:
    """TensorBoard, with the same names. Its first failure becomes one warning and ends the tracking, never the run.

    The files are in tensorboard/ of the run's directory. On a virtual cluster, times are virtual seconds.

    Raises:
        InputError: tensorboard is not installed.
    """

    module = "torch.utils.tensorboard"

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


@contextmanager
def _without_logging_errors() -> Iterator[None]:
    """Lets a full disk cut W&B's own log file short. Else each of its messages prints a traceback, then and later."""
    printed, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        for handler in logging.getLogger("wandb").handlers:
            handler.handleError = lambda record: None  # type: ignore[method-assign]
        logging.raiseExceptions = printed


def wandb_mode(environment: Mapping[str, str]) -> Literal["offline", "online", "disabled"]:
    """Returns the mode that W&B's variables ask for, offline without any."""
    if environment.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"
    match mode := environment.get("WANDB_MODE", "").lower():
        case "" | "offline" | "dryrun":
            return "offline"
        case "online" | "run":
            return "online"
        case "disabled":
            return "disabled"
    raise InputError(f"WANDB_MODE={mode}: must be offline, online or disabled; change it, or give logger.mode")


def wandb_id(directory: Path) -> str:
    """Returns the W&B id of the run in `directory`, made on the first call and stored there.

    It begins with the run's key. The rest is random: a run that is deleted and trained again is another W&B run.
    """
    path = directory / "wandb" / "run-id"
    if not path.exists():
        parts = [key] if (key := begun_key(directory)) else []
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, ["-".join([*parts, secrets.token_hex(4)])])
    return path.read_text().strip()
