"""Counts of the issues found while a corpus is read, with an example of each: the summary of noisy data."""

from __future__ import annotations

from collections.abc import Mapping


class IssueCounter:
    """How often each kind of issue was found in a set, and its first place."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def add(self, what: str, where: str, times: int = 1) -> None:
        """Counts `times` issues of kind `what`. `where` is kept if it is the first place."""
        self.counts[what] = self.counts.get(what, 0) + times
        self.first.setdefault(what, where)


def summary_table(counters: Mapping[str, IssueCounter]) -> str:
    """Returns a table with a row per kind and a column per set with issues, and the first place. "" if none."""
    counters = {name: counter for name, counter in counters.items() if counter.counts}
    kinds = list(dict.fromkeys(kind for counter in counters.values() for kind in counter.counts))
    if not kinds:
        return ""
    rows = [["", *counters, "first"]]
    for kind in kinds:
        first = next(counter.first[kind] for counter in counters.values() if kind in counter.first)
        rows.append([kind, *(str(counter.counts.get(kind, "")) for counter in counters.values()), first])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for kind, *counts, first in rows:
        cells = [count.rjust(width) for count, width in zip(counts, widths[1:], strict=True)]
        lines.append("  ".join([kind.ljust(widths[0]), *cells, first]).rstrip())
    return "\n".join(lines)
