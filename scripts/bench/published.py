"""Common parts of programs that reproduce a paper's results: configuration, table, verdict."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig

from asr_am.errors import InputError
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.target import git_commit


@dataclass(frozen=True)
class Row:
    """A published value and ours.

    Attributes:
        name: what it is.
        published: the paper's value.
        ours: the virtual cluster's.
        restates: another row has the same information, so that this one is no independent cell.
    """

    name: str
    published: float
    ours: float
    restates: bool = False

    @property
    def difference(self) -> float:
        return self.ours / self.published - 1


def config(options: Sequence[str], overrides: Sequence[str]) -> DictConfig:
    """Composes conf/ with a program's options and the user's overrides. Raises InputError if they are invalid."""
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
            return compose("config", [*options, *overrides])
    except HydraException as error:
        raise InputError(f"overrides {' '.join(overrides)}: {error}") from error


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the common options."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--json", type=Path, help="write the values here")
    made.add_argument("overrides", nargs="*", help="of the configuration")
    return made


def show(title: str, rows: Sequence[Row], digits: int) -> None:
    width = max(len(title), *(len(row.name) for row in rows))
    print(f"{title:{width}} published      ours  difference")
    for row in rows:
        print(f"{row.name:{width}} {row.published:9.{digits}f} {row.ours:9.{digits}f} {row.difference:+10.1%}")


def fitted(*files: str) -> list[str]:
    """Returns the constants that were fitted, as file.constant.

    Args:
        files: such as cluster/ibm_a, below conf/.
    """
    lines = [(file, line) for file in files for line in (ROOT / "conf" / f"{file}.yaml").read_text().splitlines()]
    found = [(file, re.match(r" *(\w+):.*# \[fitted\]", line)) for file, line in lines]
    return [f"{file.partition('/')[2]}.{match[1]}" for file, match in found if match]


def count(rows: Sequence[Row], constants: Sequence[str]) -> None:
    """Prints how many constants were fitted, each on one cell, and how many other independent cells are predictions."""
    cells = sum(not row.restates for row in rows)
    predicted = max(cells - len(constants), 0)
    print(
        f"{len(constants)} constants fitted ({', '.join(constants)}); {predicted} of {cells} independent cells are "
        "predictions"
    )


def keep(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Writes the file of --json, if given."""
    if arguments.json is not None:
        options = {name: value for name, value in vars(arguments).items() if name not in ("json", "jobs")}
        record = {"commit": git_commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"), **options}
        record["rows"] = [{**vars(row), "difference": row.difference} for row in rows]
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def judge(rows: Sequence[Row], tolerance: float, others: Sequence[str] = ()) -> None:
    """Exits with 1 if a difference is above `tolerance` or there are `others`, messages about further violations."""
    worst = max(rows, key=lambda row: abs(row.difference))
    print(f"largest difference {worst.difference:+.1%}: {worst.name}")
    for other in others:
        print(f"not met: {other}")
    sys.exit(int(abs(worst.difference) > tolerance or bool(others)))
