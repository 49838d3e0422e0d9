"""Makes what installed packages declare (`asr_am.extensions`) a choice of a config group: `strategy=mine`.

The options of a choice are in a file beside the module of the class, named as its entry point: mine.yaml. Without a
file, options are given as +strategy.option=value. The module is not imported, so that a stage that is up to date still
ends at once.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore

from asr_am.errors import InputError
from asr_am.extensions import declared
from asr_am.stages.recipe_files import CONF

GROUPS = {
    "strategy": "asr_am.strategies", "model": "asr_am.models", "schedule": "asr_am.schedules",
    "features": "asr_am.features", "corpus": "asr_am.corpora",
}  # fmt: skip


def register_installed() -> None:
    """Registers the choices. Call it before a configuration is composed. May be called again."""
    for group, points in GROUPS.items():
        for name, target in declared(points).items():
            if (CONF / group / f"{name}.yaml").is_file():
                raise InputError(f"{group}={name}: is in conf already, and {target} declares it; rename it")
            package = "_global_" if group == "corpus" else None  # as files in conf/corpus
            ConfigStore.instance().store(name, _choice(group, name, target), group, package, "an installed package")


def _choice(group: str, name: str, target: str) -> dict[str, Any]:
    """Returns the configuration of a choice, as a file of conf/<group> would have it."""
    options = _options(name, target)
    if group == "corpus":
        return options
    if group == "features":  # beside those of the GMMs
        kinds = {name: {"_target_": target, **options}}
        return {"defaults": ["logmel", "_self_"], "name": name, "kinds": kinds}
    named = {} if group == "schedule" else {"name": name}
    return {**named, "_target_": target, **options}


def _options(name: str, target: str) -> dict[str, Any]:
    """Returns what `name`.yaml beside the module of `target` has, {} without a file."""
    try:
        spec = find_spec(target.rpartition(".")[0])
    except ImportError:
        spec = None
    path = Path(spec.origin).with_name(f"{name}.yaml") if spec and spec.origin else None
    if path is None or not path.is_file():
        return {}
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())}); correct it") from error
    if not isinstance(options, dict):
        raise InputError(f"{path}: must be a mapping of options to values")
    return options
