"""The file with the last results of soaks, and the journal of one."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from scripts.soak.processes import Journal, Outcome, total
from scripts.soak.results import record


def test_a_row_replaces_that_of_its_name_and_all_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Soaks\n\nAll of them.\n\n## One\n\nAbout it.\n")
    for section, name, values in (
        ("One", "sync", {"seeds": 9}), ("Two", "psp", {"seeds": 1, "failed": 0}), ("One", "bmuf", {"seeds": 5}),
        ("One", "sync", {"seeds": 10}),
    ):  # fmt: skip
        record(section, name, values, path)
    text = path.read_text()
    assert text.startswith(
        "# Soaks\n\nAll of them.\n\n## One\n\nAbout it.\n\n| | seeds | commit | date |\n|:--|--:|:--|:--|\n"
    )
    one, two = text.split("## ")[1:]
    assert [line.split(" | ")[:2] for line in one.splitlines() if line[:1] == "|"][2:] == [
        ["| sync", "10"],
        ["| bmuf", "5"],
    ]
    assert "| psp | 1 | 0 |" in two
    record("One", "sync", {"failed": 0}, path)
    assert "| sync | 0 |" in path.read_text() and "bmuf" not in path.read_text()


def test_a_soak_that_was_killed_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    first = Outcome(0, 2, Counter({"a": 2, "b": 1}), [("a", 0.5), ("b", 1.5)], 4, 1, "3 epochs", 0.25)
    second = Outcome(1, 1, Counter({"b": 2}), problems=["no checkpoint"])
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.add("sync", first)
    journal.add("gtc", second)
    with path.open("a", encoding="utf-8") as file:
        file.write('["sync", {"seed": 2')
    assert journal.outcomes("sync") == [first]
    journal.add("sync", second)
    again = Journal(path)
    assert total(again.outcomes("sync")) == {"a": 2, "b": 3}
    assert math.isnan(again.outcomes("gtc")[0].loss) and again.outcomes("gtc")[0].problems == ["no checkpoint"]
    assert again.outcomes("bmuf") == [] == Journal(None).outcomes("sync")
