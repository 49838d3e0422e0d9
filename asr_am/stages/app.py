"""The frame of every stage: Hydra, log files, config resolvers, and one clear line for a user's mistake.

A stage module has a function `targets(cfg)`, and `main = stage("name", targets)`. A target takes its part of the
configuration as plain values, `options = values(cfg.section)`, which are part of its key, and passes them to its build
function: `Target(out, inputs, options, partial(build_it, options))`. Only the build function imports torch and converts
the values, `asr_am.options.build(SectionOptions, options, "section")`, so a stage that is up to date ends at once.

OmegaConf resolvers for conf/corpus, for values that follow from the user's data:

    ${hours_of:DATA_DIR}         hours of training speech that stage data wrote to DATA_DIR/corpus.json
    ${row_for_hours:ROWS,HOURS}  the first of ROWS whose `hours` is not exceeded
    ${beside:FILE,NAME}          the file NAME in the directory of FILE, null if there is none
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import OmegaConf

from asr_am.errors import InputError
from asr_am.options import build

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from asr_am.stages.target import Target


@dataclass(frozen=True)
class RecipeOptions:
    """The options of conf/config.yaml that are in no section. They are explained there."""

    exp: str
    data_dir: str | None
    speed_perturb: list[float]
    nj: int
    learners: int
    seed: int
    systems: list[str]
    lms: list[str]
    rescore: bool
    log_likelihoods: bool
    run: str

    def __post_init__(self) -> None:
        """Raises InputError if a value is out of range."""
        for name, least in (("nj", 1), ("learners", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not self.run or "/" in self.run:
            raise InputError(f"run={self.run}: must be the name of a directory in exp/<corpus>/train, without a /")


def hours_of(data_dir: str) -> float:
    """Returns the hours of training speech, 0 before stage data has run. Raises InputError for a broken file.

    Without data, every later stage names the stage to run first.
    """
    path = Path(data_dir) / "corpus.json"
    if not path.exists():
        return 0.0
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["hours"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: has no hours of speech; run stage 0 (data) again") from error


def row_for_hours(rows: Sequence[Mapping[str, float]], hours: float) -> Mapping[str, float]:
    """Returns the first row with enough hours. Raises InputError if every row has fewer."""
    for row in rows:
        if hours <= row["hours"]:
            return row
    raise InputError(f"corpus.sizes: no row for {hours:g} hours of speech; add one with more hours")


def sibling(file: str | None, name: str) -> str | None:
    """Returns the file `name` in the directory of `file`. None if there is none, or no `file`."""
    path = Path(file).with_name(name) if file else None
    return str(path) if path and path.exists() else None


def register() -> None:
    """Registers the resolvers. May be called again."""
    OmegaConf.register_new_resolver("hours_of", hours_of, replace=True)
    OmegaConf.register_new_resolver("row_for_hours", row_for_hours, replace=True)
    OmegaConf.register_new_resolver("beside", sibling, replace=True)


# Before numpy is imported: two threads on contended cores are far slower than one. Training sets its own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
register()  # before a config is composed

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger(__name__)


def stage(name: str, targets: Callable[[DictConfig], list[Target]]) -> Callable[[], None]:
    """Returns the `main` of a stage module, which composes the configuration and makes the stage's targets in turn.

    A user's mistake (InputError) ends the process with exit status 1 and one line on stderr.

    Args:
        name: name of the stage and of its log file.
        targets: returns the targets of a configuration.
    """

    def run(cfg: DictConfig) -> None:
        try:
            check(cfg)
            log_file = corpus_dir(cfg) / "log" / f"{name}.log"
        except InputError as error:  # before there is a log
            print(f"ERROR stage {name}: {error}", file=sys.stderr)
            sys.exit(1)
        start_logging(log_file)
        begin = time.monotonic()
        try:
            made = [target.run() for target in targets(cfg)]
        except InputError as error:
            log.error("stage %s: %s (log: %s)", name, error, log_file)
            sys.exit(1)
        except Exception:
            log.exception("stage %s failed; log: %s", name, log_file)
            sys.exit(1)
        if any(made):
            log.info("stage %s: %.1f s, log: %s", name, time.monotonic() - begin, log_file)

    return hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")(run)


def corpus_dir(cfg: DictConfig) -> Path:
    """Returns `exp/<corpus>`, the directory of everything made from a corpus.

    Raises:
        InputError: corpus.name is missing or not text.
    """
    if OmegaConf.is_missing(cfg.corpus, "name"):
        raise InputError("corpus.name is needed: choose a name for this data")
    name = cfg.corpus.name
    if not isinstance(name, str):
        raise InputError(f"corpus.name is {name}, not text; quote it for Hydra and the shell: \"corpus.name='NAME'\"")
    return Path(cfg.exp) / name


def check(cfg: DictConfig) -> None:
    """Raises InputError if an option in no section is of another type or out of range."""
    top = {field.name: cfg[field.name] for field in fields(RecipeOptions)}
    lists = {name: OmegaConf.to_container(node, resolve=True) for name, node in top.items() if OmegaConf.is_list(node)}
    build(RecipeOptions, top | lists, "")


def values(node: DictConfig) -> dict[str, Any]:
    """Returns a config node as a plain dict, interpolations resolved."""
    plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def start_logging(path: Path, quiet: bool = False) -> None:
    """Starts logging: everything to a file, INFO to stdout in short lines, warnings and errors to stderr.

    Args:
        path: the log file, which is appended to.
        quiet: write nothing to stdout.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(logging.Formatter("  %(message)s"))
    console.addFilter(lambda record: logging.INFO <= record.levelno < logging.WARNING and not quiet)
    problems = logging.StreamHandler(sys.stderr)
    problems.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    problems.setLevel(logging.WARNING)
    for handler in (file, console, problems):
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    for ours in ("asr_am", "local"):  # details, such as each pass of the GMM training, go to the file only
        logging.getLogger(ours).setLevel(logging.DEBUG)
    for noisy in ("matplotlib", "wandb", "lhotse", "fontTools"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
