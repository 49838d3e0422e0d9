"""`python -m asr_am.cluster measure|predict|check OVERRIDE...`: see the package."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

import asr_am.cluster
from asr_am.errors import InputError
from asr_am.options import check_name, choices
from asr_am.stages.app import ends_on_signals, reports_errors
from asr_am.stages.option_checks import compose_job
from asr_am.stages.overrides import asks_help
from asr_am.stages.recipe_files import CONF
from asr_am.stages.resolvers import composing

COMMANDS = ("measure", "predict", "check")


def main(arguments: Sequence[str]) -> None:
    """Runs a command. Ends the process with one line and status 1 after a user's mistake."""
    if asks_help(arguments) or not arguments:
        print(asr_am.cluster.__doc__)
        return
    command, *overrides = arguments
    with ends_on_signals(f"cluster {command}"), reports_errors("cluster", overrides):
        if command not in COMMANDS:
            raise InputError(f"there is no command {command!r}{choices(command, COMMANDS)}")
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        if command == "measure":
            from asr_am.cluster.measure import measure

            name, rest = taken(overrides, "name")
            if len(name) != 1 or not name[0].isidentifier():
                raise InputError("cluster measure: name=NAME is missing, a word of letters, digits and _")
            with composing():
                cfg = compose_job(rest)
            measure(cfg, name[0])
            return
        cfgs, first = configurations(overrides, "virtual" if command == "predict" else "process")
        if command == "check":
            from asr_am.cluster.real_rounds import HEAD, check

            for number, found in enumerate(check(cfgs)):
                print(*([HEAD] if number == 0 else []), found, sep="\n", flush=True)
            return
        from asr_am.cluster import predict as prediction

        folder = Path(first.exp) / "cluster" / check_name("cluster.name", first.cluster.name)
        predicted = prediction.predict(cfgs, int(first.nj))
        prediction.write(predicted, folder)
        lines = [*prediction.table(predicted), *prediction.assumed(first)]
        print("\n".join(lines), prediction.recommend(predicted), folder / "scaling.png", sep="\n")


def configurations(overrides: Sequence[str], launcher: str) -> tuple[dict[tuple[str, int], DictConfig], DictConfig]:
    """Returns the configuration for each strategy and number of learners that the overrides list, and one of them."""
    sizes, rest = taken(overrides, "learners")
    names, rest = taken(rest, "strategy")
    names = names or sorted(path.stem for path in (CONF / "strategy").glob("*.yaml") if path.stem != "local")
    if not sizes or not all(size.isdecimal() and int(size) > 1 for size in sizes):
        raise InputError("cluster: give learners=, one number above 1 or several with commas")
    with composing():
        found = {
            (name, int(size)): compose_job([f"launcher={launcher}", *rest, f"strategy={name}", f"learners={size}"])
            for name in names for size in sizes
        }  # fmt: skip
    return found, next(iter(found.values()))


def taken(overrides: Sequence[str], key: str) -> tuple[list[str], list[str]]:
    """Returns the values of the override of an option, which commas divide, and the other overrides."""
    values = [override.partition("=")[2].split(",") for override in overrides if override.startswith(f"{key}=")]
    return (values[-1] if values else []), [override for override in overrides if not override.startswith(f"{key}=")]


if __name__ == "__main__":
    main(sys.argv[1:])
