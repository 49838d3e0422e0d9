"""Composes configurations as Hydra does for a stage."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

CONF = Path(__file__).resolve().parents[2] / "conf"


def config(*overrides: str) -> DictConfig:
    """Returns the configuration with `overrides`."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))
