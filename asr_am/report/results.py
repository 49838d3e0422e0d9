"""What scoring and training left in exp/<corpus>, read and checked."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asr_am.errors import InputError

log = logging.getLogger(__name__)
UNFINISHED = (".partial", ".old", ".outdated")  # suffixes of directories that hold no result
GMM_SYSTEMS = ("mono", "tri")  # systems without a training run, in the order of tables


@dataclass(frozen=True)
class Subset:
    """Counts and WER of one subset of the test set. wer and interval (95 %) in percent."""

    wer: float
    interval: tuple[float, float]
    words: int
    substitutions: int
    deletions: int
    insertions: int


@dataclass(frozen=True)
class Score:
    """One system with one LM: score/<run>/wer.json, and segments.json as segment -> (errors, words)."""

    run: str
    system: str
    lm: str
    seed: int | None
    lm_weight: float
    insertion_penalty: float
    dev_wer: float
    commit: str
    date: str
    subsets: Mapping[str, Subset]
    segments: Mapping[str, tuple[int, int]]

    @property
    def family(self) -> str:
        """The system's name without its seed: runs of one family differ by nothing else."""
        return without_seed(self.system, self.seed)


@dataclass(frozen=True)
class Family:
    """Scores of one system with one LM over all its seeds."""

    system: str
    lm: str
    scores: Sequence[Score]

    def wer(self, subset: str) -> float:
        """Mean over seeds, percent."""
        return _mean([score.subsets[subset].wer for score in self.scores])

    def interval(self, subset: str) -> tuple[float, float]:
        """Mean over seeds of the ends of the 95 % interval, percent."""
        ends = [score.subsets[subset].interval for score in self.scores]
        return _mean([low for low, _ in ends]), _mean([high for _, high in ends])


@dataclass(frozen=True)
class TrainingRun:
    """One training run: train/<run>/summary.json, with the held-out loss and frame error rate after each epoch."""

    name: str
    seed: int | None
    summary: Mapping[str, Any]
    loss_E: Sequence[float]  # nats per frame
    frame_error_E: Sequence[float]  # percent

    @property
    def family(self) -> str:
        return without_seed(self.name, self.seed)

    @property
    def best_epoch(self) -> int:
        """The epoch (from 1) with the lowest held-out loss, whose weights are decoded with."""
        return 1 + min(range(len(self.loss_E)), key=lambda e: (math.isnan(self.loss_E[e]), self.loss_E[e]))


@dataclass(frozen=True)
class LanguageModel:
    """lm/<name>/lm.json. ngrams: how many of each order. dev_oov: of the dev_words, outside the model's vocabulary."""

    name: str
    source: str
    ngrams: Sequence[int]
    dev_perplexity: float
    dev_words: int
    dev_oov: int


def without_seed(name: str, seed: int | None) -> str:
    """A run's name without the `-s<seed>` at its end."""
    return re.sub(rf"[-_.]?(?:seed|s){seed}$", "", name) if seed is not None else name


def read_scores(corpus_dir: Path) -> list[Score]:
    """Every score/<run>, GMM systems first. InputError: none at all, or a wer.json missing, broken or incomplete."""
    scores = [_read_score(folder) for folder in _folders(corpus_dir / "score")]
    if not scores:
        raise InputError(f"{corpus_dir / 'score'}: holds no results; run stage score first")
    names = {tuple(score.subsets) for score in scores}
    if len(names) > 1:
        raise InputError(
            f"{corpus_dir / 'score'}: runs are scored on different subsets {sorted(names)}; score them again"
        )
    return sorted(scores, key=lambda score: (*_rank(score.family), score.seed or 0, score.lm))


def group_by_seed(scores: Sequence[Score]) -> list[Family]:
    """Scores that differ only by their seed put together, in the order of `scores`."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.family, score.lm), []).append(score)
    return [Family(system, lm, members) for (system, lm), members in groups.items()]


def read_training_runs(corpus_dir: Path) -> list[TrainingRun]:
    """Every train/<run> sorted by name; one without a summary.json is in its first epoch and left out."""
    runs = []
    for folder in _folders(corpus_dir / "train"):
        path = folder / "summary.json"
        if not path.exists():
            log.warning("%s: has no summary.json yet; left out of the report", folder)
            continue
        runs.append(_read_training_run(path))
    return runs


def read_language_models(corpus_dir: Path) -> list[LanguageModel]:
    """Every lm/<name>/lm.json, sorted by name."""
    return [_read_language_model(folder / "lm.json") for folder in _folders(corpus_dir / "lm")]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. InputError: missing, not UTF-8, not JSON, no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; run the stage that writes it again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error}); run the stage that writes it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: is not a JSON object; run the stage that writes it again")
    return value


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    finished = (folder for folder in parent.iterdir() if folder.is_dir() and not folder.name.endswith(UNFINISHED))
    return sorted(folder for folder in finished if not folder.name.startswith("."))


def _rank(system: str) -> tuple[int, str]:
    return (GMM_SYSTEMS.index(system) if system in GMM_SYSTEMS else len(GMM_SYSTEMS)), system


def _read_score(folder: Path) -> Score:
    path = folder / "wer.json"
    content = read_json(path)
    try:
        return Score(
            run=folder.name,
            system=str(content["system"]),
            lm=str(content["lm"]),
            seed=None if content["seed"] is None else int(content["seed"]),
            lm_weight=float(content["lm_weight"]),
            insertion_penalty=float(content["insertion_penalty"]),
            dev_wer=float(content["dev_wer"]),
            commit=str(content["commit"]),
            date=str(content["date"]),
            subsets={name: _subset(value) for name, value in content.items() if isinstance(value, dict)}
            | {"all": _subset(content["all"])},
            segments=_read_segments(folder / "segments.json"),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {_explain(error)}; run stage score again") from error


def _subset(value: Mapping[str, Any]) -> Subset:
    low, high = (float(end) for end in value["interval"])
    wer = float(value["wer"])
    if not all(map(math.isfinite, (wer, low, high))):
        raise ValueError(f"a WER or interval of {wer} [{low}, {high}]")
    counts = {name: int(value[name]) for name in ("words", "substitutions", "deletions", "insertions")}
    return Subset(wer=wer, interval=(low, high), **counts)


def _read_segments(path: Path) -> dict[str, tuple[int, int]]:
    try:
        return {name: (int(errors), int(words)) for name, (errors, words) in read_json(path).items()}
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f'{path}: is not {{"segment": [errors, words]}}; run stage score again') from error


def _read_training_run(path: Path) -> TrainingRun:
    summary = read_json(path)
    try:
        losses = [float(value) for value in summary["heldout_loss"]]
        rates = [100 * float(value) for value in summary["heldout_frame_error"]]
        seed = summary.get("seed")
        run = TrainingRun(path.parent.name, None if seed is None else int(seed), summary, losses, rates)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {_explain(error)}; run stage train again") from error
    if not losses or len(losses) != len(rates):
        raise InputError(f"{path}: {len(losses)} held-out losses and {len(rates)} frame error rates; train again")
    return run


def _read_language_model(path: Path) -> LanguageModel:
    content = read_json(path)
    try:
        return LanguageModel(
            name=str(content["name"]),
            source=str(content["source"]),
            ngrams=[int(count) for count in content["ngrams"]],
            dev_perplexity=float(content["dev_perplexity"]),
            dev_words=int(content["dev_words"]),
            dev_oov=int(content["dev_oov"]),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {_explain(error)}; run stage lang again") from error


def _explain(error: Exception) -> str:
    return f"lacks {error.args[0]!r}" if isinstance(error, KeyError) else f"holds a wrong value ({error})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
