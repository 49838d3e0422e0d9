"""Runs stages of a recipe in this process."""

from __future__ import annotations

from importlib import import_module

from tests.support.configurations import config

STAGES = ("data", "lang", "features", "align", "speaker", "egs", "train", "decode", "rescore", "score", "report")


def run_stages(*overrides: str, first: int = 0, last: int = 9) -> None:
    """Makes the targets of the stages, with a new configuration for each, as `run.sh` does."""
    for name in STAGES[first : last + 1]:
        for target in import_module(f"asr_am.stages.{name}").targets(config(*overrides)):
            target.run()
