"""A table of a paper beside ours: what its cells are, which values agree, and how many of them are predictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from asr_am.data.record import read_record
from asr_am.errors import InputError
from asr_am.options import build
from asr_am.report.markup import table


@dataclass(frozen=True)
class Cell:
    """A cell of a table, or several that one run gives.

    Attributes:
        published: the paper's value of each measure. None: the paper shows it in a figure only, so ours stands alone.
        relative_to: another cell. Ours is divided by its value, and the published value by its published one, if any.
        fits: a constant that was fitted on this cell, as file.constant. Without one the cell is a prediction.
        restates: other cells have the same information, so this is no independent one.
        judged: False if the table's `within` does not apply.
    """

    options: list[str] = field(default_factory=list)
    work: dict[str, Any] = field(default_factory=dict)
    published: dict[str, float | None] = field(default_factory=dict)
    relative_to: str | None = None
    fits: str | None = None
    restates: bool = False
    judged: bool = True


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, the section `table` of conf/experiment. `work` has options of its runs, see members.py.

    Attributes:
        member: how a cell is run: an `epoch` of a strategy or steps of `parallax` on a virtual cluster, both without a
            model, or `train`, the recipe.
        within: largest factor between a published value and ours, above 1.
        seeds: each cell is run with these, and has their mean.
        restates: measures that say the same as another one of their cell.
        rising: lists of cells in which a measure must rise with every seed, by measure.
        first: cells that run before the others, which need them.
    """

    title: str
    member: Literal["epoch", "parallax", "train"]
    within: float
    cells: dict[str, Cell]
    work: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [1])
    restates: list[str] = field(default_factory=list)
    rising: dict[str, list[list[str]]] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    note: str = ""

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> PaperTable:
        """Builds a table from plain values. Raises InputError for an unknown option or a cell that does not exist."""
        cells = {name: build(Cell, cell, f"table.cells.{name}") for name, cell in values.get("cells", {}).items()}
        table = build(cls, {**values, "cells": cells}, "table")
        named = [name for lists in table.rising.values() for names in lists for name in names] + table.first
        for name in [*named, *(cell.relative_to for cell in cells.values() if cell.relative_to)]:
            if name not in cells:
                raise InputError(f"table: there is no cell {name!r}")
        if not table.within > 1:
            raise InputError(f"table.within={table.within}: must be above 1")
        return table

    def needed(self, name: str) -> list[str]:
        """Returns the measures that the runs of a cell must have: its own, and those that others compare with it."""
        relative = [measure for cell in self.cells.values() if cell.relative_to == name for measure in cell.published]
        ordered = [measure for measure, lists in self.rising.items() if any(name in names for names in lists)]
        return list(dict.fromkeys([*self.cells[name].published, *relative, *ordered]))


Measures = Mapping[str, float]  # of one run, by name


@dataclass(frozen=True)
class Row:
    """A published value and ours.

    Attributes:
        published: the paper's value, None if the paper prints none.
        ours: with each seed. Empty if a run has failed, or the value to divide by is 0.
        limit: largest factor between both, None if it is not judged.
        independent: no other row says the same.
    """

    cell: str
    measure: str
    published: float | None
    ours: Sequence[float]
    limit: float | None
    fits: str | None
    independent: bool

    @property
    def mean(self) -> float | None:
        return sum(self.ours) / len(self.ours) if self.ours else None

    @property
    def ratio(self) -> float | None:
        """Ours divided by the published value."""
        return self.mean / self.published if self.mean is not None and self.published else None

    @property
    def met(self) -> bool:
        """False if a value is judged and too far away. A published 0 must be met exactly."""
        if self.limit is None or self.published is None or self.mean is None:
            return True
        return self.mean == 0 if self.ratio is None else 1 / self.limit <= self.ratio <= self.limit


def rows(table: PaperTable, found: Mapping[str, Sequence[Measures]]) -> list[Row]:
    """Returns the rows of a table, given the measures of each cell by seed. Cells with a failed run are missing.

    Raises:
        InputError: a run lacks a measure that the table needs.
    """
    for name, runs in found.items():
        for run in runs:
            check_measures(table, name, run)
    made = []
    for name, cell in table.cells.items():
        for measure, published in cell.published.items():
            base = table.cells[cell.relative_to] if cell.relative_to else None
            if published is not None and base is not None:
                divisor = base.published.get(measure)
                published = None if divisor == 0 else published / (divisor or 1.0)
            repeated = cell.restates or measure in table.restates or cell.relative_to == name
            independent = published is not None and not repeated
            limit = table.within if cell.judged else None
            fits = cell.fits if measure not in table.restates else None
            ours = _ours(found, name, cell, measure)
            made.append(Row(name, measure, published, ours, limit, fits, independent))
    return made


def check_measures(table: PaperTable, name: str, known: Collection[str]) -> None:
    """Raises InputError if the runs of a cell have only the measures `known`, and the table needs another one."""
    for measure in table.needed(name):
        if measure not in known:
            raise InputError(f"table.cells.{name}: its runs have no {measure}, only {', '.join(known)}")


def _ours(found: Mapping[str, Sequence[Measures]], name: str, cell: Cell, measure: str) -> list[float]:
    own, base = found.get(name, []), found.get(cell.relative_to or name, [])
    if not own or not base:
        return []
    if cell.relative_to is None:
        return [run[measure] for run in own]
    if any(other[measure] == 0 for other in base):
        return []
    return [run[measure] / other[measure] for run, other in zip(own, base, strict=True)]


def unmet(table: PaperTable, found: Mapping[str, Sequence[Measures]]) -> list[str]:
    """Returns a message for each value that is too far from the published one and each order that does not hold."""
    made = rows(table, found)
    messages = [
        f"{row.cell}, {row.measure}: {number(row.mean)} is not within {row.limit:g} of {number(row.published)}"
        for row in made
        if not row.met
    ]
    for measure, lists in table.rising.items():
        for names in lists:
            for lower, upper in pairwise(names):
                if lower not in found or upper not in found:
                    continue
                low, high = ([run[measure] for run in found[name]] for name in (lower, upper))
                if max(low) >= min(high):
                    messages.append(f"{measure} does not rise from {lower} to {upper}")
    return messages


@dataclass(frozen=True)
class MadeTable:
    """A table that was made, as table.json has it."""

    title: str
    rows: list[Row]
    unmet: list[str]

    @classmethod
    def read(cls, path: Path) -> MadeTable:
        """Reads a table.json. Raises InputError if it is missing or damaged."""
        record = read_record(path)
        try:
            kept = [{each.name: row[each.name] for each in fields(Row)} for row in record["rows"]]
            found = {"title": record["title"], "unmet": record["unmet"]}
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}: has no {error}; make the table again (python -m asr_am.papers.table)") from error
        return build(cls, found | {"rows": [build(Row, row, f"{path}: rows") for row in kept]}, str(path))


def count_predictions(made: Sequence[Row]) -> tuple[int, int]:
    """Returns the numbers of independent rows and of those on which no constant was fitted."""
    independent = [row for row in made if row.independent]
    return len(independent), sum(row.fits is None for row in independent)


def format_rows(made: Sequence[Row]) -> str:
    """Returns the rows as Markdown."""
    several = any(len(row.ours) > 1 for row in made)
    header = ["cell", "measure", "published", "ours", *(["each seed"] if several else []), "ours / published", "remark"]
    lines = []
    for row in made:
        cells = [row.cell, row.measure.replace("_", " "), number(row.published), number(row.mean)]
        cells += [", ".join(map(number, row.ours))] if several else []
        lines.append([*cells, number(row.ratio, 3), _remark(row)])
    return table(header, lines)


def _remark(row: Row) -> str:
    if row.published is None:
        return ""
    remarks = {
        "constant fitted": row.fits is not None, "restates": not row.independent, "not judged": row.limit is None,
        "too far": not row.met,
    }  # fmt: skip
    return ", ".join(remark for remark, applies in remarks.items() if applies)


def number(value: float | None, digits: int = 4) -> str:
    """Formats a number with some significant digits, a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
