"""Composed cluster and workload configurations."""

from __future__ import annotations

from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir

from asr_am.stages.recipe_files import ROOT
from asr_am.stages.sections import values


@cache
def config(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        cfg = compose("config", list(overrides))
    return {name: values(cfg[name]) for name in ("cluster", "workload", "strategy")}
