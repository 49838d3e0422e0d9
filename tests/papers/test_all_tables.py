"""The page of all tables of papers, on small ones in two trees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asr_am.data.ownership import SIGNED
from asr_am.errors import InputError
from asr_am.papers.all_tables import write_tables
from asr_am.papers.cells import Row
from asr_am.papers.table_plot import plot_table
from tests.support.report_files import write_run


def test_tables_of_all_trees_are_on_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus_dir, other = tmp_path / "exp/tiny", tmp_path / "exp/papers/tiny"
    with pytest.raises(InputError, match="has no tables"):
        write_tables(corpus_dir)
    for tree, cell in ((corpus_dir, "a"), (other, "b")):
        (tree / "tables/toy").mkdir(parents=True)
        (tree / "tables/toy/table.md").write_text(f"### A toy\n\n| cell | ours |\n|:--|--:|\n| {cell} | 1.5 |\n")
        rows = [
            Row(cell, "hours", 2.0, [1.5, 1.9], 1.3, None, True),
            Row("failed", "hours", None, [], None, None, False),
        ]
        record = {"title": "A toy", "unmet": ["too far"], "rows": [vars(row) | {"mean": 0} for row in rows]}
        (tree / "tables/toy/table.json").write_text(json.dumps(record))
        plot_table(rows, f"Toy {cell}", tree / "tables/toy/table.png")
    write_run(other, "toy-c-s1", 1, [2.0, 1.5])
    page = write_tables(corpus_dir).read_text()
    text = (corpus_dir / "TABLES.md").read_text()
    assert text.startswith(f"{SIGNED}\n# Tables of papers\n\n| table | values | not as published | predictions |")
    assert "| [A toy](#a-toy) | 1 | 1 | 1 of 1 |" in text and "\n\n### A toy\n\n| cell | ours |" in text
    for cell, plot in (("a", "tables/toy/table.png"), ("b", "../papers/tiny/tables/toy/table.png")):
        assert f"![Published values and ours]({plot})" in text
        assert f">{cell}</td>" in page and f">Toy {cell}</text>" in page
    assert "<summary>papers-toy-c-s1 " in page
    monkeypatch.chdir(corpus_dir)
    write_tables(Path())  # again, in place of its own
    assert (corpus_dir / "TABLES.md").read_text() == text
    (corpus_dir / "TABLES.md").write_text("mine\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"TABLES\.md: not made by this program"):
        write_tables(corpus_dir)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{}", "has no 'rows'; make the table again"),
        ("{", "cannot be read"),
        ('{"title": "A", "unmet": [], "rows": [{"cell": 1}]}', "has no 'measure'"),
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, record: str, message: str) -> None:
    folder = tmp_path / "exp/tiny/tables/toy"
    folder.mkdir(parents=True)
    (folder / "table.md").write_text("### A toy\n")
    (folder / "table.json").write_text(record)
    with pytest.raises(InputError, match=f"toy/table.json: {message}"):
        write_tables(tmp_path / "exp/tiny")
