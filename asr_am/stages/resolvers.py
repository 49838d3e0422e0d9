"""OmegaConf resolvers for conf/corpus, for values that follow from the user's data, and for conf/logger.

${hours_of:DATA_DIR}         hours of training speech that stage data wrote to DATA_DIR/corpus.json
${row_for_hours:ROWS,HOURS}  the first of ROWS whose `hours` is not exceeded
${frame_wise:CHOICE}         CHOICE, but false for chain models, CTC and features that join frames
${beside:FILE,NAME}          the file NAME in the directory of FILE, null if there is none
${experiment_or:NAME}        the name of the file that +experiment= chose, NAME without an experiment
${temporary_dir:}            a directory that exists until the process ends
"""

from __future__ import annotations

import atexit
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from asr_am import disk
from asr_am.errors import InputError
from asr_am.features.fusion import stack_of
from asr_am.stages.installed import register_installed
from asr_am.stages.layout import has_phone_states
from asr_am.stages.recipe_files import CONF


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
    """Returns the first row with enough hours. Raises InputError for negative hours or unfit rows."""
    if hours < 0:
        raise InputError(f"corpus.hours={hours:g}: must not be negative")
    for number, row in enumerate(rows):
        limit = row.get("hours") if isinstance(row, Mapping) else None
        if not isinstance(limit, int | float) or isinstance(limit, bool):
            raise InputError(f"corpus.sizes[{number}]: hours is {limit!r}; give each row its hours of speech, a number")
        if hours <= limit:
            return row
    raise InputError(f"corpus.sizes: no row for {hours:g} hours of speech; add one with more hours")


def frame_wise(choice: bool, *, _root_: DictConfig) -> bool:
    """Returns a choice, such as that of MMI. False if the network's states are of phones, or its features join frames.

    Args:
        choice: of the corpus' size.
        _root_: the configuration, which OmegaConf gives.
    """
    return choice and not has_phone_states(_root_) and stack_of(_root_.features.name) == 1


def sibling(file: str | None, name: str) -> str | None:
    """Returns the file `name` in the directory of `file`. None if there is none, or no `file`."""
    path = Path(file).with_name(name) if file else None
    return str(path) if path and path.exists() else None


def experiment_or(name: str) -> str:
    """Returns the choice of the group `experiment` on the command line, `name` if there is none."""
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return str(choices.get("experiment") or name)


def temporary_dir() -> str:
    """Returns a directory that is removed at the end of the process. Outputs may be on a read-only disk."""
    folder = tempfile.mkdtemp(prefix="asr_am-")
    atexit.register(disk.remove, Path(folder))
    return folder


@contextmanager
def composing() -> Iterator[None]:
    """Lets configurations be composed, with these resolvers and the choices of installed packages."""
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def register_resolvers() -> None:
    """Registers the resolvers, and the choices of installed packages. May be called again."""
    register_installed()
    OmegaConf.register_new_resolver("hours_of", hours_of, replace=True)
    OmegaConf.register_new_resolver("row_for_hours", row_for_hours, replace=True)
    OmegaConf.register_new_resolver("frame_wise", frame_wise, replace=True)
    OmegaConf.register_new_resolver("beside", sibling, replace=True)
    OmegaConf.register_new_resolver("experiment_or", experiment_or, replace=True)
    OmegaConf.register_new_resolver("temporary_dir", temporary_dir, replace=True, use_cache=True)
