"""Text from data in Markdown: names of runs, systems, LMs and corpora, commits and options are shown as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# what begins markup within a line of CommonMark: a backslash, code, emphasis, a cell, HTML, an entity, a link
SPECIAL = re.compile(r"[\\`*<|]|&(?=[#\w])|\](?=\()|(?<![^\W_])_|_(?![^\W_])")


class Formatted(str):
    """A cell that is Markdown already."""


def literal(text: str) -> str:
    """Escapes text for use within a line of Markdown."""
    return SPECIAL.sub(r"\\\g<0>", re.sub(r"\s", " ", text))


def code(text: str) -> str:
    """Returns text as a block of code."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table, the first column left-aligned and the others right-aligned.

    Cells are shown as they are, except for those that are `Formatted`.
    """
    lines = [_row(header), "|" + "|".join([":--"] + ["--:"] * (len(header) - 1)) + "|"]
    return "\n".join([*lines, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell if isinstance(cell, Formatted) else literal(cell) for cell in cells) + " |"
