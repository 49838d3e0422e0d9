"""Checks the overrides of a recipe before its first stage: `python -m asr_am.stages.check FIRST LAST OVERRIDE...`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from asr_am.stages.app import ends_on_signals, reports_errors
from asr_am.stages.option_checks import check_jobs
from asr_am.stages.overrides import TargetsFn, check_sweep, late_overrides, made_of_other_audio
from asr_am.stages.resolvers import composing

STAGES = ("data", "lang", "features", "align", "speaker", "egs", "train")  # those after it use the name of the run
TRAIN = STAGES.index("train")
log = logging.getLogger(__name__)


def check_recipe(first: int, last: int, overrides: Sequence[str]) -> None:
    """Checks the overrides of a recipe before its first stage.

    Raises:
        InputError: an option is wrong, or jobs of a sweep would overwrite each other's training.
    """
    functions: list[TargetsFn] = [import_module(f"asr_am.stages.{name}").targets for name in STAGES]
    with composing():
        check_jobs(overrides)
        if first <= TRAIN <= last:
            check_sweep(functions[TRAIN], overrides)
        earlier = functions[:first]
        if not earlier:
            return
        for override, number, out in late_overrides(earlier, overrides):
            log.warning(
                "%s has no effect: %s was made with another value by stage %d (%s); start with --stage %d",
                override, out, number, STAGES[number], number,
            )  # fmt: skip
        for out in made_of_other_audio(earlier, overrides):
            log.warning("%s: audio files have changed since it was made; start with --stage 0 to use them", out)


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    with ends_on_signals("recipe"), reports_errors("recipe", sys.argv[3:]):
        check_recipe(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
