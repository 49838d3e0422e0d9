"""Composes configurations as Hydra does for a stage."""

from __future__ import annotations

from pathlib import Path

from hydra import compose
from omegaconf import DictConfig

from asr_am.stages.resolvers import composing

CONF = Path(__file__).resolve().parents[2] / "conf"


def config(*overrides: str) -> DictConfig:
    """Returns the configuration with `overrides`."""
    with composing():
        return compose("config", overrides=list(overrides))
