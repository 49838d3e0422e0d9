"""What was met while a corpus was read, counted by kind, with the first place of each: the summary of noisy data."""

from __future__ import annotations

from collections.abc import Mapping


class IssueCounter:
    """Counts of one set."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def add(self, what: str, where: str, times: int = 1) -> None:
        """`what` was met `times` times; `where` is kept if it is the first place."""
        self.counts[what] = self.counts.get(what, 0) + times
        self.first.setdefault(what, where)


def summary_table(counters: Mapping[str, IssueCounter]) -> str:
    """A row for each kind, a column for each set that has any, and the first place; "" where nothing was met."""
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
