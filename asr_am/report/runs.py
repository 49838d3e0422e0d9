"""Training runs read from their files, and groups of runs that differ only by seed. E: epochs."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from asr_am.data.record import read_record
from asr_am.distributed.cluster_config import Faults
from asr_am.errors import InputError
from asr_am.report.formatting import describe_faults
from asr_am.report.results import corpus_of, explain, folders, mean, without_seed
from asr_am.report.run_settings import RunSettings, Settings, is_trained_on_dev, read_settings

log = logging.getLogger(__name__)
Value = TypeVar("Value")


FRAME_WISE = "cross-entropy"
CRITERIA = {"mmi": "MMI", "chain": "chain", "ctc": "CTC"}  # others, by section of `train`
WITHOUT_ZERO = ("MMI", "chain")  # losses that may be negative, so that no percentages of them mean anything


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run without its seed. None for a field that its record lacks.

    Equal configurations mean that runs differ only by seed, in everything that changes a result.

    Attributes:
        batch: chunks of all learners together.
        strategy: name. `group_runs` appends the options in which runs with the same strategy differ.
        rate: base learning rate, before warm-up and annealing.
        faults: description, "" for none.
        slow: (learner, factor) of the slowed learners.
        method: options of model, training and schedule without an own field here.
        hardware: options of the modelled cluster and workload without an own field here.
    """

    corpus: str
    model: str | None
    optimizer: str | None
    rate: float | None
    batch: int
    epochs: int | None
    strategy: str
    learners: int
    launcher: str | None
    clock: str | None
    cluster: str | None
    workload: str | None
    options: tuple[tuple[str, str], ...]
    faults: str
    slow: tuple[tuple[int, float], ...]
    data: Settings = ()
    method: Settings = ()
    hardware: Settings = ()

    @property
    def criterion(self) -> str:
        """What the losses are of. Those of different criteria do not compare."""
        sections = {option.split(".")[1] for option, _ in self.method if option.startswith("train.")}
        return next((label for section, label in CRITERIA.items() if section in sections), FRAME_WISE)

    @property
    def computation(self) -> Settings:
        """Options that change the time of a batch, empty if this time is that of a modelled workload."""
        if self.clock == "virtual" and self.workload != "self":
            return ()
        timed = ("train.precision", "train.accumulation")
        return tuple((option, value) for option, value in self.method
                     if option in timed or (option.startswith("model.") and option != "model.dropout"))  # fmt: skip


@dataclass(frozen=True)
class TrainingRun:
    """Records of train/<run>, totals of the whole run over all learners. None or empty if unknown.

    Attributes:
        loss_E: held-out loss, nats per frame.
        frame_error_E: held-out frame error rate, percent.
        teams: learners of each team that has done a part of it, empty in old records.
        seconds: of training, on the clock named in `config`.
        seconds_E: the same by epoch.
        staleness: number of updates by staleness.
        bytes_sent: actual bytes.
        modelled_bytes: bytes of a simulated workload.
        waiting_seconds: summed over all learners.
        pull_latency: number of pulled shards by delay in seconds.
    """

    name: str
    folder: Path
    seed: int | None
    config: RunConfig
    loss_E: Sequence[float]
    frame_error_E: Sequence[float]
    teams: Sequence[int]
    seconds: float | None
    seconds_E: Sequence[float]
    frames_per_second: float | None
    batches_per_learner: Mapping[int, int]
    staleness: Mapping[int, int]
    bytes_sent: float | None
    modelled_bytes: float | None
    waiting_seconds: float | None
    pull_latency: Mapping[float, int]
    consensus_distance_E: Sequence[float]
    config_hash: str | None
    commit: str | None

    @property
    def family(self) -> str:
        return without_seed(self.name, self.seed)

    @property
    def corpus_dir(self) -> Path:
        return corpus_of(self.folder)

    @property
    def resized(self) -> bool:
        """Whether the number of learners changed."""
        return len(set(self.teams)) > 1

    @property
    def epochs_done(self) -> int:
        return len(self.loss_E)

    @property
    def best_epoch(self) -> int:
        """Epoch (from 1) with the lowest held-out loss. Its weights are used for decoding."""
        return 1 + min(range(len(self.loss_E)), key=lambda e: (math.isnan(self.loss_E[e]), self.loss_E[e]))

    @property
    def best_loss(self) -> float:
        return self.loss_E[self.best_epoch - 1]

    @property
    def epoch_seconds(self) -> float | None:
        """Seconds of training per epoch. None if unknown or not timed, or if the number of learners changed."""
        return self.seconds / self.epochs_done if self.seconds and not self.resized else None


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only by seed: equal configuration, name without seed, and directory."""

    name: str
    config: RunConfig
    runs: Sequence[TrainingRun]

    @property
    def seeds(self) -> list[int]:
        return sorted(run.seed for run in self.runs if run.seed is not None)

    @property
    def pull_latency(self) -> Counter[float]:
        """Pull delays of all runs together."""
        return sum((Counter(run.pull_latency) for run in self.runs), Counter())

    def of_seeds(self, seeds: Sequence[int]) -> RunGroup:
        return RunGroup(self.name, self.config, [run for run in self.runs if run.seed in seeds])

    def mean_loss_E(self) -> list[float]:
        """Returns the held-out loss, mean over seeds, of the epochs that all runs have finished."""
        return self.mean_E(lambda run: run.loss_E)

    def mean_E(self, figures: Callable[[TrainingRun], Sequence[float]]) -> list[float]:
        """Averages a per-epoch value over the runs, for the epochs that all runs have finished."""
        return [mean(values) for values in zip(*map(figures, self.runs), strict=False)]

    def mean(self, figure: Callable[[TrainingRun], float | None]) -> float | None:
        """Averages a value over the runs that have it. Returns None if none has."""
        values = [value for run in self.runs if (value := figure(run)) is not None]
        return mean(values) if values else None


def group_runs(runs: Sequence[TrainingRun]) -> list[RunGroup]:
    """Groups runs by name without seed. Groups are sorted by name, their runs by seed."""
    groups: dict[tuple[RunConfig, str, Path], list[TrainingRun]] = {}
    for run in sorted(_with_options(runs), key=lambda run: (run.family, run.seed or 0)):
        groups.setdefault((run.config, run.family, run.folder.parent), []).append(run)
    return [RunGroup(family, config, members) for (config, family, _), members in groups.items()]


def _with_options(runs: Sequence[TrainingRun]) -> list[TrainingRun]:
    """Appends to strategy names the options in which runs of that strategy differ."""
    values: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for option, value in run.config.options:
            values.setdefault((run.config.strategy, option), set()).add(value)
    named = []
    for run in runs:
        name = run.config.strategy
        differing = [f"{option}={value}" for option, value in run.config.options if len(values[name, option]) > 1]
        named.append(replace(run, config=replace(run.config, strategy=" ".join([name, *differing]))))
    return named


def read_training_runs(corpus_dir: Path) -> list[TrainingRun]:
    """Reads every train/<run>, sorted by name, but those of `trained_on_dev`.

    Skips runs still in their first epoch, without summary.json.
    """
    runs, on_dev = [], trained_on_dev(corpus_dir)
    for folder in folders(corpus_dir / "train"):
        if not (folder / "summary.json").exists():
            log.warning("%s: no summary.json yet; left out of the report", folder)
        elif folder.name not in on_dev:
            runs.append(read_training_run(folder))
    return runs


def trained_on_dev(corpus_dir: Path) -> list[str]:
    """Returns the names of the runs that were trained on dev, too, and have no held-out loss (`train.with_dev`)."""
    return [folder.name for folder in folders(corpus_dir / "train") if is_trained_on_dev(folder)]


def read_training_run(folder: Path) -> TrainingRun:
    """Reads summary.json, config.yaml and .done of train/<run>. Keys of times and counts may be missing.

    Raises:
        InputError: the directory or its summary.json is missing, or a file is malformed.
    """
    path = folder / "summary.json"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory; give that of a run, exp/<corpus>/train/<run>")
    if not path.exists():
        raise InputError(f"{folder}: has no summary.json; give a run of stage 6 (train) that has finished an epoch")
    summary = read_record(path)
    try:
        run = _run(folder, summary)
    except (AttributeError, InputError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {explain(error)}; run stage 6 (train) again") from error
    run = replace(run, config=_with_settings(run.config, read_settings(folder, run.seed), summary))
    if run.resized:  # told apart from runs whose team stayed the same
        change = ("change of learners", ", then ".join(map(str, run.teams)))
        run = replace(run, config=replace(run.config, method=(*run.config.method, change)))
    losses, rates = len(run.loss_E), len(run.frame_error_E)
    if losses == 0 or losses != rates:
        raise InputError(f"{path}: {losses} held-out losses and {rates} frame error rates; train again")
    if len(run.seconds_E) not in (0, losses):
        raise InputError(f"{path}: {losses} held-out losses and seconds of {len(run.seconds_E)} epochs; train again")
    return run


def _run(folder: Path, summary: Mapping[str, Any]) -> TrainingRun:
    return TrainingRun(
        name=folder.name,
        folder=folder,
        seed=_optional(summary, "seed", _count),
        config=_run_config(folder, summary),
        loss_E=[float(value) for value in summary["heldout_loss"]],
        frame_error_E=[100 * float(value) for value in summary["heldout_frame_error"]],
        teams=_optional(summary, "teams", lambda teams: [_count(team["learners"]) for team in teams]) or [],
        seconds=_optional(summary, "seconds", _amount),
        seconds_E=_optional(summary, "seconds_per_epoch", _amounts) or [],
        frames_per_second=_optional(summary, "frames_per_second", _amount),
        batches_per_learner=_optional(summary, "batches_per_learner", _counts) or {},
        staleness=_optional(summary, "staleness", _counts) or {},
        bytes_sent=_optional(summary, "bytes_sent", _amount),
        modelled_bytes=_optional(summary, "modelled_bytes", _amount),
        waiting_seconds=_optional(summary, "waiting_seconds", lambda value: sum(_amounts(value))),
        pull_latency=_optional(summary, "pull_latency", _delays) or {},
        consensus_distance_E=_optional(summary, "consensus_distance", _amounts) or [],
        config_hash=_optional(summary, "config_hash", str),
        commit=_optional(summary, "commit", str),
    )


def _run_config(folder: Path, summary: Mapping[str, Any]) -> RunConfig:
    """Reads the configuration. The corpus is named by the directory above train/."""
    faults = _optional(summary, "faults", Faults.build) or Faults()
    return RunConfig(
        corpus=corpus_of(folder).name,
        model=_optional(summary, "model", _text),
        optimizer=_optimizer(summary),
        rate=_optional(summary, "schedule", lambda schedule: _amount(schedule["base"])),
        batch=_count(summary["batch"]),
        epochs=_optional(summary, "epochs", _count),
        strategy=_text(summary["strategy"]),
        learners=_count(summary["learners"]),
        launcher=_optional(summary, "launcher", _text),
        clock=_optional(summary, "clock", _text),
        cluster=_optional(summary, "cluster", _text),
        workload=_optional(summary, "workload", _text),
        options=_optional(summary, "strategy_options", _options) or (),
        faults=describe_faults(faults),
        slow=tuple(sorted((learner, factor) for learner, factor in faults.slow.items() if factor != 1)),
    )


def _with_settings(config: RunConfig, settings: RunSettings, summary: Mapping[str, Any]) -> RunConfig:
    """Adds the settings. Leaves out those that summary.json has."""
    recorded = {
        "train.optimizer.kind": "optimizer",
        "train.optimizer.momentum": "momentum",
        "schedule.base": "schedule",
    }
    method = tuple(pair for pair in settings.method if summary.get(recorded.get(pair[0], "")) is None)
    options = config.options or settings.strategy
    return replace(config, options=options, data=settings.data, method=method, hardware=settings.hardware)


def _optimizer(summary: Mapping[str, Any]) -> str | None:
    """Returns the optimizer with its momentum, if recorded."""
    kind, momentum = _optional(summary, "optimizer", _text), _optional(summary, "momentum", _amount)
    return kind if kind is None or momentum is None else f"{kind}, momentum {momentum:g}"


def _optional(summary: Mapping[str, Any], key: str, read: Callable[[Any], Value]) -> Value | None:
    """Returns `read(value)`, or None if the key is missing or null. The ValueError raised names the key."""
    value = summary.get(key)
    try:
        return None if value is None else read(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error


def _text(value: Any) -> str:
    """Returns a name as it is, and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _count(value: Any) -> int:
    count = int(value)
    if count != float(value) or count < 0:
        raise ValueError(f"{value!r} is not a count")
    return count


def _amount(value: Any) -> float:
    amount = float(value)
    if not (math.isfinite(amount) and amount >= 0):
        raise ValueError(f"{value!r} is not a finite non-negative number")
    return amount


def _counts(value: Mapping[str, Any]) -> dict[int, int]:
    return {_count(key): _count(count) for key, count in value.items()}


def _delays(value: Mapping[str, Any]) -> dict[float, int]:
    return {_amount(key): _count(count) for key, count in value.items()}


def _options(value: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((option, _text(choice)) for option, choice in value.items())


def _amounts(value: Any) -> list[float]:
    """Reads a list, or a mapping by rank or epoch."""
    values = value.values() if isinstance(value, Mapping) else value
    return [_amount(each) for each in values]
