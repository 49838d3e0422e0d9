"""The options that a training run was made with, as text, read from its config.yaml and .done.

config.yaml is the resolved configuration of the run. It is read as plain YAML: nothing in it is imported or resolved.
An option that is off (null, false, 0 or empty) counts like one that is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from asr_am.data.checksums import digest
from asr_am.data.record import read_record
from asr_am.errors import InputError
from asr_am.options import flatten
from asr_am.report.results import GMM_SYSTEMS, corpus_of, explain, without_seed
from asr_am.train.identity import SPEED_ONLY

Settings = tuple[tuple[str, str], ...]  # option and value, sorted

CONFIG, DONE = "config.yaml", ".done"
REMEDY = "run stage 6 (train) again"
NO_CONFIG = (CONFIG, "missing")  # in `data` of a run without config.yaml
SHOWN_ELSEWHERE = ("train.batch_size", "train.epochs", "model.name", "schedule.name")
OFF_AT_ONE = ("train.accumulation", "schedule.batch_ratio")
NO_TRAINING_DATA = (  # options of the corpus for language models, the test set, sizes and where files are
    "name", "description", "lms", "subsets", "sets", "sizes", "size", "stamp", "inputs", "anneal_from", "cells",
    "dropout", "test_words",
    "prepare._target_", "prepare.data_dir", "prepare.test", "prepare.test_words", "prepare.text", "prepare.arpa",
    "prepare.audio_root", "prepare.allow_pipes", "prepare.max_words",
)  # fmt: skip


@dataclass(frozen=True)
class RunSettings:
    """Options of a run by what they decide.

    Attributes:
        data: what it was trained on: share of the utterances, corpus, features, alignment and examples.
        method: how it was trained, except what RunConfig has from summary.json.
        hardware: modelled cluster and workload, empty if no time is modelled.
    """

    data: Settings = (NO_CONFIG,)
    method: Settings = ()
    strategy: Settings = ()
    hardware: Settings = ()


def read_settings(folder: Path, seed: int | None) -> RunSettings:
    """Reads config.yaml and .done of a run. The name of the model that it starts from loses the seed.

    Raises:
        InputError: a file cannot be read, or has another size than when the run was finished.
    """
    done, path = _read_done(folder), folder / CONFIG
    config = read_record(path, yaml.safe_load, REMEDY) if path.exists() else None
    try:
        return _settings(folder, config, done, seed)
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: {CONFIG} or {DONE} {explain(error)}; {REMEDY}") from error


def is_trained_on_dev(folder: Path) -> bool:
    """Returns whether config.yaml of a run says so. Raises InputError if it cannot be read."""
    path = folder / CONFIG
    return path.exists() and bool(flatten(read_record(path, yaml.safe_load, REMEDY)).get("train.with_dev"))


def _settings(
    folder: Path, config: Mapping[str, Any] | None, done: Mapping[str, Any], seed: int | None
) -> RunSettings:  # fmt: skip
    if config is None:
        return RunSettings()
    options = flatten(config)
    data = {"train.subset": _text(options.get("train.subset") or 1)}
    init = options.get("train.init")
    data |= _select(options, _is_data(str(options.get("features.name", "")), str(options.get("align.system", ""))))
    data |= _examples(folder, done)
    masked = any(options.get(f"train.masking.{kind}") for kind in ("bands", "spans"))
    method = {
        option: value for option, value in _select(options, _is_method).items()
        if (masked or not option.startswith("train.masking.")) and not (option in OFF_AT_ONE and value == "1")
    }  # fmt: skip
    if init:
        run, model = os.path.split(init)
        method["train.init"] = os.path.join(without_seed(run, seed), model)
    modelled = "virtual" in (options.get("launcher.name"), options.get("launcher"))
    hardware = _select(options, _is_hardware) if modelled or options.get("workload.emulate") else {}
    strategy = {name.partition(".")[2]: value for name, value in _select(options, _is_strategy).items()}
    return RunSettings(_sorted(data), _sorted(method), _sorted(strategy), _sorted(hardware))


def differing(each: Sequence[Settings]) -> list[str]:
    """Returns the options that do not have the same value in all of `each`, sorted."""
    values: dict[str, set[str]] = {}
    for settings in each:
        for option, value in settings:
            values.setdefault(option, set()).add(value)
    return sorted(
        option for option, found in values.items()
        if len(found) > 1 or not all(option in dict(settings) for settings in each)
    )  # fmt: skip


def describe(settings: Settings, options: Iterable[str]) -> list[str]:
    """Formats the values of `options`: "train.subset=0.1", or "no train.init" if the option is off."""
    values = dict(settings)
    return [f"{option}={values[option]}" if option in values else f"no {option}" for option in options]


def describe_data(every: Sequence[Settings]) -> dict[Settings, str]:
    """Describes each of several training data by the options that tell them apart. Returns "" if all are equal."""
    kinds = list(dict.fromkeys(every))
    known = [data for data in kinds if NO_CONFIG not in data]
    options = differing(known) if known else differing(kinds)
    texts = {data: ", ".join(describe(data, options)) for data in kinds}
    if known and len(known) < len(kinds):
        texts |= {data: f"no {CONFIG}" for data in kinds if NO_CONFIG in data}
    return texts


def _read_done(folder: Path) -> dict[str, Any]:
    """Reads .done, {} if the run is not finished. Checks the sizes of the files that are read here."""
    path = folder / DONE
    if not path.exists():
        return {}
    done = read_record(path, remedy=REMEDY)
    files = done.get("files")
    if not isinstance(files, dict) or not isinstance(done.get("config", {}), dict):
        raise InputError(f"{path}: is not the record of a finished run; {REMEDY}")
    for name in (CONFIG, "summary.json"):
        if name in files and (not (folder / name).exists() or (folder / name).stat().st_size != files[name]):
            raise InputError(
                f"{folder / name}: is missing, or has another size than when the run was finished; {REMEDY}"
            )
    return done


def _select(options: Mapping[str, Any], wanted: Callable[[str], bool]) -> dict[str, str]:
    """Returns the options that are wanted and not off, as text."""
    return {option: _text(value) for option, value in options.items() if wanted(option) and value}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _sorted(options: Mapping[str, str]) -> Settings:
    return tuple(sorted(options.items()))


def _is_data(features: str, system: str) -> Callable[[str], bool]:
    """Returns the test for options that decide the training data, given the kind of features and the aligning GMM."""
    adapted = any(kind in features for kind in ("fmllr", "lda", "ivector"))
    unused = GMM_SYSTEMS[GMM_SYSTEMS.index(system) + 1 :] if system in GMM_SYSTEMS and not adapted else ()
    sections = {"features", "align", "egs", "corpus", "speed_perturb"}
    sections |= {"ivectors"} if "ivector" in features else set()
    sections |= {"speaker"} if adapted else set()

    def is_data(option: str) -> bool:
        section, _, name = option.partition(".")
        if section not in sections or option.endswith(".device"):
            return False
        if section == "corpus":
            return not any(name == other or name.startswith(f"{other}.") for other in NO_TRAINING_DATA)
        if name.startswith("kinds."):  # of features. The alignments are made with MFCCs
            kind = name.split(".")[1]
            return kind == "mfcc" or any(stream.startswith(kind) for stream in features.split("+"))
        return not (section == "align" and name.split(".")[0] in unused)

    return is_data


def _is_method(option: str) -> bool:
    section, _, name = option.partition(".")
    if section == "train":
        return name not in (*SPEED_ONLY, "subset", "init") and option not in SHOWN_ELSEWHERE
    return section in ("model", "schedule") and option not in SHOWN_ELSEWHERE


def _is_strategy(option: str) -> bool:
    section, _, name = option.partition(".")
    return section == "strategy" and name != "name" and not name.startswith("_")


def _is_hardware(option: str) -> bool:
    """Leaves out the number of hosts, which grows with the learners, and the faults, which RunConfig has."""
    section, _, name = option.partition(".")
    return section in ("cluster", "workload") and name not in ("name", "hosts") and not name.startswith("faults")


def _examples(folder: Path, done: Mapping[str, Any]) -> dict[str, str]:
    """Returns {"egs": "current"}, or "earlier" if the examples were made again since the run was finished."""
    inputs = [Path(path) for path in done.get("inputs", [])]
    egs = next((path for path in inputs if path.parent.name == "egs"), None)
    if egs is None:
        return {"egs": "current"}
    path = corpus_of(folder) / "egs" / egs.name / DONE
    record = read_record(path, remedy=REMEDY) if path.exists() else {}
    made, used = str(record.get("date", "")), str(done.get("date", ""))
    earlier = made > used and not _is_source(record, egs, inputs, done)
    return {"egs": "earlier" if earlier else "current"}


def _is_source(record: Mapping[str, Any], egs: Path, inputs: Sequence[Path], done: Mapping[str, Any]) -> bool:
    """Returns True if a run was made from the examples with this record, which were made again from the same sources.

    `asr_am.stages.target.Target` has the digests.
    """
    digests: list[str] = done.get("sources") or []
    files = {name: size for name, size in (record.get("files") or {}).items() if name not in (DONE, ".key")}
    return bool(digests) and digest([egs.name, [record.get("key"), files]]) == digests[inputs.index(egs)]
