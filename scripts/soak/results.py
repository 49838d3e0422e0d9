"""Keeps the last results of what runs for hours in RESULTS.md beside this file: a table for each part."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

from asr_am.stages.target import git_commit

RESULTS = Path(__file__).with_name("RESULTS.md")
COMMIT = git_commit()  # before RESULTS.md itself is a change


def record(section: str, name: str, values: Mapping[str, object], path: Path = RESULTS) -> None:
    """Puts a row into the table of a section, in place of the row with this name.

    A table with other columns begins anew.
    """
    parts = (path.read_text(encoding="utf-8") if path.exists() else "# Soaks\n").split("\n## ")
    headings = [part.partition("\n")[0] for part in parts]
    number = headings.index(section, 1) if section in headings[1:] else len(parts)
    lines = parts[number].rstrip().splitlines() if number < len(parts) else [section, ""]
    header = f"| | {' | '.join([*values, 'commit', 'date'])} |"
    rule = f"|:--|{'--:|' * len(values)}:--|:--|"
    cells = [name, *map(str, values.values()), COMMIT, str(datetime.date.today())]
    text = [line for line in lines if not line.startswith("|")]
    rows = [line for line in lines if line.startswith("|")][2:] if header in lines else []
    mine = f"| {' | '.join(cells)} |"
    same = [row.startswith(f"| {name} |") for row in rows]
    rows = [mine if old else row for row, old in zip(rows, same, strict=True)] + ([] if any(same) else [mine])
    parts[number : number + 1] = ["\n".join(["\n".join(text).rstrip(), "", header, rule, *rows, ""])]
    path.write_text("\n## ".join(part.rstrip() + "\n" for part in parts), encoding="utf-8")
