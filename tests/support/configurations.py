"""Composes configurations as Hydra does for a stage, and runs stages in this process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from asr_am.stages.resolvers import composing
from asr_am.stages.sections import values

CONF = Path(__file__).resolve().parents[2] / "conf"
STAGES = ("data", "lang", "features", "align", "speaker", "egs", "train", "decode", "score")


def config(*overrides: str) -> DictConfig:
    """Returns the configuration with `overrides`.

    Composing takes 0.2 to 0.4 s, so it is done once for each choice of groups. Single values (model.layers=2) are then
    set in a copy.
    """
    groups, settings = [], []
    for override in overrides:
        key = override.partition("=")[0]
        (groups if key[0] in "+~" or "@" in key or (CONF / key).is_dir() else settings).append(override)
    cfg = copy.deepcopy(composed(*groups))
    for setting in OverridesParser.create().parse_overrides(settings):
        OmegaConf.update(cfg, setting.key_or_group, setting.value())
    return cfg


@cache
def composed(*overrides: str) -> DictConfig:
    with composing():
        return compose("config", overrides=list(overrides))


@cache
def cluster_config(*overrides: str) -> dict[str, Any]:
    """Returns the groups cluster, workload and strategy of a configuration as plain values."""
    cfg = config(*overrides)
    return {name: values(cfg[name]) for name in ("cluster", "workload", "strategy")}


def run_stages(*overrides: str, stages: Sequence[str] = STAGES) -> None:
    """Makes the targets of the stages, with a new configuration for each, as `run.sh` does."""
    for name in stages:
        for target in import_module(f"asr_am.stages.{name}").targets(config(*overrides)):
            target.run()
