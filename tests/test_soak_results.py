"""The file with the last results of soaks."""

from __future__ import annotations

from pathlib import Path

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
