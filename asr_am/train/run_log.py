"""The output of a training run: metrics, lease log, summary and the progress bar."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from asr_am import disk
from asr_am.data.checksums import intact
from asr_am.errors import InputError
from asr_am.progress import ProgressBar
from asr_am.train.learner_view import LearnerView
from asr_am.train.tracking import Tracker

if TYPE_CHECKING:  # they import torch, which stage report does without
    from asr_am.distributed.leases import SegmentRecord
    from asr_am.train.checkpoint import TrainProgress
    from asr_am.train.comm_metrics import CommMetrics
    from asr_am.train.train_options import TrainOptions

log = logging.getLogger(__name__)
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
HELD_OUT = ("heldout_loss", "heldout_frame_error", "heldout_perplexity")


def saved_config(directory: Path) -> dict[str, Any]:
    """Returns the resolved configuration that stage train saved in a run's directory, {} if there is none."""
    path = directory / "config.yaml"
    if not path.exists():
        return {}
    config = yaml.load(intact(path).read_text(encoding="utf-8"), Loader=SAFE_LOADER)
    assert isinstance(config, dict)
    return {str(name): value for name, value in config.items()}


class TrainingBar:
    """The progress bar of a training run over all of its epochs. Only the leader of a team shows it.

    Args:
        epochs: number of epochs.

    Attributes:
        below: returns the lines to show below the bar.
    """

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self.below: Callable[[], Sequence[str]] = list
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
            self._bar = ProgressBar("training", total, done, below=self.below)
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

    Raises:
        InputError: the file is shorter than `keep_bytes`.
    """

    def __init__(
        self, path: Path, keep_bytes: int | None, writer: str = "", check: Callable[[], None] = lambda: None
    ) -> None:
        content = path.read_bytes() if path.exists() else b""
        if keep_bytes is not None and len(content) < keep_bytes:
            raise InputError(
                f"{path}: has {len(content)} bytes, and had {keep_bytes} at the checkpoint, so lines are lost; put the "
                f"whole file back, or remove {path.parent} to train anew"
            )
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

    Attributes:
        view: what the terminal shows of each learner.
    """

    def __init__(self, out: Path, tracker: Tracker, progress_bar: TrainingBar, config: Mapping[str, Any]) -> None:
        self.out, self.tracker, self.progress_bar, self._config = out, tracker, progress_bar, config
        self._is_open = False
        self._writer, self._check = "", lambda: None
        self.view: LearnerView | None = None
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

    def learner_view(self, learners: int, one_process: bool) -> LearnerView:
        """Returns the view of the team, which learners of one process share.

        Args:
            learners: number of learners.
            one_process: all of them are in this process.
        """
        if self.view is None:
            self.view = LearnerView(None if one_process else self.out / "checkpoints", learners)
            self.progress_bar.below = self.view.lines
        return self.view

    def metrics_bytes(self, begin: int, updates: int) -> int:
        """Returns the bytes of metrics.jsonl up to the line of `updates` updates, or the last one before it.

        Args:
            begin: bytes that are kept anyway. What follows is of one epoch.
        """
        path = self.out / "metrics.jsonl"
        for line in path.read_bytes()[begin:].splitlines(keepends=True) if path.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                break  # it was being written
            if "train_loss" in record or record["batch"] > updates or not line.endswith(b"\n"):
                break  # the epoch was not finished
            begin += len(line)
        return begin

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
        parts = [f"training loss {record['train_loss']:.4f}"]
        if (perplexity := record.get("heldout_perplexity")) is not None:
            parts.insert(0, f"perplexity {perplexity:.2f}")
        if (error := record.get("heldout_frame_error")) is not None:
            parts.insert(0, f"frame error {error:.2%}")
        if (loss := record.get("heldout_loss")) is not None:
            parts.insert(0, f"held-out loss {loss:.4f}")
        message = f"epoch {record['epoch']}: {', '.join(parts)}"
        log.info(message)
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
            **{f"best_{key}": summary[key][best] for key in HELD_OUT if key in summary},
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
        "waiting_seconds": metrics.waiting_seconds,
        "bytes_sent": bytes_by_rank,
        "batches": progress.batches_per_learner,
    }
    curves: dict[str, float] = {
        "staleness_mean": metrics.mean_staleness,
        "waiting_seconds": sum(metrics.waiting_seconds.values()),
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
    judged = "heldout_loss" if "heldout_loss" in progress.history[0] else "train_loss"
    best = min(progress.history, key=lambda record: record[judged])
    return {
        "strategy": strategy,
        "learners": learners,
        "teams": [{"updates": updates, "learners": size} for updates, size in progress.teams],
        "batch": options.batch_size,
        "epochs": options.epochs,
        "epochs_done": progress.epoch,
        "best_epoch": best["epoch"],
        **{key: [record[key] for record in progress.history] for key in HELD_OUT if key in best},
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
