"""Runs stages of a recipe in this process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from tests.support.configurations import config

STAGES = ("data", "lang", "features", "align", "speaker", "egs", "train", "decode", "score")


def run_stages(*overrides: str, stages: Sequence[str] = STAGES) -> None:
    """Makes the targets of the stages, with a new configuration for each, as `run.sh` does."""
    for name in stages:
        for target in import_module(f"asr_am.stages.{name}").targets(config(*overrides)):
            target.run()
