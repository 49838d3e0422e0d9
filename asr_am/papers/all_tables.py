"""Puts the tables of papers on one page: `python -m asr_am.papers.all_tables exp/<corpus>`.

Writes exp/<corpus>/TABLES.md: a summary, and all tables that asr_am.papers.table has made in exp/<corpus> and in the
trees of experiments, exp/*/<corpus>. The page exp/<corpus>/tables/index.html shows it with plots and the curves of the
runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from asr_am.data.ownership import SIGNED, refuse_unsigned
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.papers.cells import MadeTable, count_predictions
from asr_am.report.markup import Formatted, literal, table
from asr_am.report.page import anchor, write_page
from asr_am.report.runs import TrainingRun, read_training_runs
from asr_am.stages.overrides import asks_help


def table_files(corpus_dir: Path) -> list[Path]:
    """Returns the table.md of all tables, in exp/<corpus> and in the trees of experiments."""
    exp, pattern = corpus_dir.parent, f"{corpus_dir.name}/tables/*/table.md"
    return sorted([*exp.glob(pattern), *exp.glob(f"*/{pattern}")])


def write_tables(corpus_dir: Path) -> Path:
    """Writes TABLES.md and the page. Returns the path of the page. Raises InputError if there are no tables."""
    corpus_dir = Path(os.path.abspath(corpus_dir))  # whose parent has the other trees
    rows, sections = [], []
    made = [(MadeTable.read(path.with_name("table.json")), path) for path in table_files(corpus_dir)]
    if not made:
        raise InputError(f"{corpus_dir}: has no tables; run asr_am.papers.table first")
    for each, path in sorted(made, key=lambda pair: pair[0].title):
        values = sum(row.published is not None for row in each.rows)
        independent, predictions = count_predictions(each.rows)
        title = Formatted(f"[{literal(each.title)}](#{anchor(each.title)})")
        rows.append([title, str(values), str(len(each.unmet)), f"{predictions} of {independent}"])
        sections.append(path.read_text(encoding="utf-8").strip())
        sections.append(
            f"![Published values and ours]({quote(os.path.relpath(path.with_name('table.png'), corpus_dir))})"
        )
    summary = table(["table", "values", "not as published", "predictions"], rows)
    text = "\n\n".join(["# Tables of papers", summary, *sections])
    refuse_unsigned(corpus_dir / "TABLES.md")
    write_lines(corpus_dir / "TABLES.md", [SIGNED, text])
    out = corpus_dir / "tables"
    out.mkdir(parents=True, exist_ok=True)
    return write_page(corpus_dir, out, text, _trained(corpus_dir, [path for _, path in made]), [])


def _trained(corpus_dir: Path, tables: Sequence[Path]) -> list[TrainingRun]:
    """Returns the training runs of the trees of experiments that have tables, named after their tree."""
    trees = sorted({path.parents[2] for path in tables} - {corpus_dir})
    return [replace(run, name=f"{tree.parent.name}-{run.name}") for tree in trees for run in read_training_runs(tree)]


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if asks_help(sys.argv[1:]) else 1
    try:
        print(write_tables(Path(sys.argv[1])))
    except InputError as error:
        print(f"ERROR tables: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
