"""Reads and checks the results of scoring and language modelling in exp/<corpus>."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asr_am.data.record import read_record
from asr_am.errors import InputError
from asr_am.options import RESERVED

GMM_SYSTEMS = ("mono", "tri", "lda_mllt", "sat")  # systems without a training run, in table order


@dataclass(frozen=True)
class Subset:
    """Counts of one subset of the test set, and its WER in percent with a 95 % interval."""

    wer: float
    interval: tuple[float, float]
    words: int
    substitutions: int
    deletions: int
    insertions: int


@dataclass(frozen=True)
class SystemScore:
    """Score of one system with one LM: score/<run>/wer.json and segments.json.

    Attributes:
        reference: digest of the STM that it was scored against, None for old records.
        segments: name to (errors, words).
    """

    folder: Path
    system: str
    lm: str
    seed: int | None
    lm_weight: float
    insertion_penalty: float
    dev_wer: float
    commit: str
    date: str
    reference: str | None
    subsets: Mapping[str, Subset]
    segments: Mapping[str, tuple[int, int]]

    @property
    def run(self) -> str:
        return self.folder.name

    @property
    def family(self) -> str:
        """System name without the seed. Runs of one family differ only by seed."""
        return without_seed(self.system, self.seed)


@dataclass(frozen=True)
class Family:
    """Scores of one system with one LM over all its seeds.

    `other_data` are options by which its training data differ from those of the GMMs, "" if they are equal or unknown.
    """

    system: str
    lm: str
    scores: Sequence[SystemScore]
    other_data: str = ""

    def wer(self, subset: str) -> float:
        """Returns the mean WER over seeds in percent."""
        return mean([score.subsets[subset].wer for score in self.scores])

    def interval(self, subset: str) -> tuple[float, float]:
        """Returns the ends of the 95 % interval in percent, each averaged over seeds."""
        ends = [score.subsets[subset].interval for score in self.scores]
        return mean([low for low, _ in ends]), mean([high for _, high in ends])


@dataclass(frozen=True)
class LanguageModel:
    """Record lm/<name>/lm.json.

    Attributes:
        ngrams: number of n-grams of each order, empty for a recurrent model.
        parameters: of a recurrent model.
        dev_oov: dev words outside the vocabulary, out of `dev_words`.
    """

    name: str
    source: str
    ngrams: Sequence[int]
    parameters: int
    dev_perplexity: float
    dev_words: int
    dev_oov: int


def without_seed(name: str, seed: int | None) -> str:
    """Removes the trailing `-s<seed>` of a run's name."""
    return re.sub(rf"[-_.]?(?:seed|s){seed}$", "", name) if seed is not None else name


def corpus_of(run: Path) -> Path:
    """Returns the absolute path exp/<corpus> of exp/<corpus>/<stage>/<run>. Raises InputError without two parents."""
    parents = Path(os.path.abspath(run)).parents
    if len(parents) < 2:
        raise InputError(f"{run}: not the directory of a run; give exp/<corpus>/train/<run>")
    return parents[1]


def read_scores(corpus_dir: Path) -> list[SystemScore]:
    """Reads every score/<run>, GMM systems first.

    Raises:
        InputError: a wer.json is missing, broken or incomplete, or runs are scored on different subsets or references.
    """
    scores = [_read_score(folder) for folder in folders(corpus_dir / "score")]
    names = {tuple(score.subsets) for score in scores}
    if len(names) > 1:
        raise InputError(
            f"{corpus_dir / 'score'}: runs are scored on different subsets {sorted(names)}; score them again"
        )
    known = sorted((score for score in scores if score.reference), key=lambda score: score.date)
    if outdated := [score.folder for score in known if score.reference != known[-1].reference]:
        raise InputError(
            f"{outdated[0]}: scored against another reference than {known[-1].run}, the latest; run stage 9 "
            f"(score) for it again, or remove it ({len(outdated)} such)"
        )
    return sorted(scores, key=lambda score: (*_rank(score.family), score.seed or 0, score.lm))


def group_by_seed(scores: Sequence[SystemScore], names: Mapping[str, str] | None = None) -> list[Family]:
    """Groups scores that differ only by seed, in their order.

    `names` has the name without the seed of each system whose name alone does not tell.
    """
    groups: dict[tuple[str, str], list[SystemScore]] = {}
    for score in scores:
        groups.setdefault(((names or {}).get(score.system, score.family), score.lm), []).append(score)
    return [Family(system, lm, members) for (system, lm), members in groups.items()]


def read_language_models(corpus_dir: Path) -> list[LanguageModel]:
    """Reads every lm/<name>/lm.json, sorted by name."""
    return [_read_language_model(folder / "lm.json") for folder in folders(corpus_dir / "lm")]


def read_coverage(corpus_dir: Path) -> tuple[int, dict[str, int]] | None:
    """Reads from data/corpus.json how many utterances of test are scored, and how many are left out by reason.

    Returns None if nothing is left out.

    Raises:
        InputError: the file is malformed.
    """
    path = corpus_dir / "data" / "corpus.json"
    if not path.exists():
        return None
    content = read_record(path)
    try:
        left_out = content.get("left_out", {}).get("test", {})
        reasons = {str(reason): int(count) for reason, count in left_out.items()}
        return (int(content["utterances"]["test"]), reasons) if reasons else None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {explain(error)}; run stage 0 (data) again") from error


def folders(parent: Path) -> list[Path]:
    """Returns the finished directories in `parent`, sorted by name."""
    if not parent.is_dir():
        return []
    finished = (folder for folder in parent.iterdir() if folder.is_dir() and not RESERVED.search(folder.name))
    return sorted(folder for folder in finished if not folder.name.startswith("."))


def _rank(system: str) -> tuple[int, str]:
    return (GMM_SYSTEMS.index(system) if system in GMM_SYSTEMS else len(GMM_SYSTEMS)), system


def _read_score(folder: Path) -> SystemScore:
    path = folder / "wer.json"
    content = read_record(path)
    try:
        return SystemScore(
            folder=folder,
            system=str(content["system"]),
            lm=str(content["lm"]),
            seed=None if content["seed"] is None else int(content["seed"]),
            lm_weight=float(content["lm_weight"]),
            insertion_penalty=float(content["insertion_penalty"]),
            dev_wer=float(content["dev_wer"]),
            commit=str(content["commit"]),
            date=str(content["date"]),
            reference=str(content["reference"]) if "reference" in content else None,
            subsets={name: _subset(value) for name, value in content.items() if isinstance(value, dict)}
            | {"all": _subset(content["all"])},
            segments=_read_segments(folder / "segments.json"),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {explain(error)}; run stage 9 (score) again") from error


def _subset(value: Mapping[str, Any]) -> Subset:
    low, high = (float(end) for end in value["interval"])
    wer = float(value["wer"])
    if not all(map(math.isfinite, (wer, low, high))):
        raise ValueError(f"a WER or interval of {wer} [{low}, {high}]")
    counts = {name: int(value[name]) for name in ("words", "substitutions", "deletions", "insertions")}
    return Subset(wer=wer, interval=(low, high), **counts)


def _read_segments(path: Path) -> dict[str, tuple[int, int]]:
    try:
        return {name: (int(errors), int(words)) for name, (errors, words) in read_record(path).items()}
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f'{path}: is not {{"segment": [errors, words]}}; run stage 9 (score) again') from error


def _read_language_model(path: Path) -> LanguageModel:
    content = read_record(path)
    try:
        return LanguageModel(
            name=str(content["name"]),
            source=str(content["source"]),
            ngrams=[int(count) for count in content.get("ngrams", [])],
            parameters=int(content.get("parameters", 0)),
            dev_perplexity=float(content["dev_perplexity"]),
            dev_words=int(content["dev_words"]),
            dev_oov=int(content["dev_oov"]),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {explain(error)}; run stage 1 (lang) again") from error


def explain(error: Exception) -> str:
    """Describes a defect of a record from the exception that reading it raised."""
    return f"lacks {error.args[0]!r}" if isinstance(error, KeyError) else f"holds a wrong value ({error})"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
