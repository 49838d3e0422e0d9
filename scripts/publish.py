"""Copies the results of finished runs to recipes/, or prints a small table of them.

    python scripts/publish.py CORPUS ...      # copy from exp/ to recipes/
    python scripts/publish.py --table         # word error rates in recipes/*/RESULTS.md, as Markdown

exp/<corpus>/RESULTS.md is copied without plots to recipes/<corpus>/RESULTS.md, above its section "Further runs", which
is written by hand. The results of data that recipes/kaldi took as NAME go to recipes/kaldi/RESULTS.md. Tables of papers
that `python -m asr_am.papers.table` has written below exp/ go to recipes/<corpus>/TABLES.md, in place of those with the
same titles, without rows that restate another or that the paper shows in a figure only.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from asr_am.data.ownership import SIGNED
from asr_am.papers.all_tables import table_files

ROOT = Path(__file__).resolve().parents[1]
NONE = "–"
TABLES_HEAD = """# Tables of papers

Published values beside ours, each table by its command: see [conf](../../conf/README.md#tables-of-papers). Cells on
which no constant was fitted are predictions. Rows that restate another, or that the paper shows in a figure only, are
left out. The commands make them, too."""

_FURTHER = re.compile(r"^## Further runs\s*$", re.MULTILINE)
_SUBSET = re.compile(r"^### (?P<name>\S+) \((?P<words>[\d,]+) words\)\n\n(?P<table>(?:\|.*\n)+)", re.MULTILINE)
_COMMAND = re.compile(r"^    recipes/.*", re.MULTILINE)
_ABSOLUTE_EXP = re.compile(r"exp='?/")  # of one machine
_MEAN = re.compile(r"\*\*([\d.]+)\*\*")


def publish_all(corpora: Sequence[str]) -> None:
    """Copies the results of corpora. Ends the program if two of them would go to the same recipe."""
    owners: dict[Path, str] = {}
    for corpus in corpora:
        folder = recipe_of(corpus)
        if owners.setdefault(folder, corpus) != corpus:
            sys.exit(f"{owners[folder]} and {corpus}: the results of both go to {folder}; give one of them")
    for corpus in corpora:
        publish(corpus)


def recipe_of(corpus: str) -> Path:
    """Returns the folder in recipes that gets the results of a corpus."""
    if not corpus or Path(corpus).name != corpus:
        sys.exit(f"{corpus!r} is no name of a corpus; give that of a folder in exp")
    folder = ROOT / "recipes" / corpus
    return folder if folder.exists() else ROOT / "recipes/kaldi"


def publish(corpus: str) -> None:
    """Copies the results of a corpus to its recipe, without the plots."""
    folder = recipe_of(corpus)
    source = ROOT / "exp" / corpus / "RESULTS.md"
    report = source.read_text(encoding="utf-8") if source.exists() else ""
    if report and not report.removeprefix(SIGNED).lstrip().startswith("# Results"):
        sys.exit(f"{source}: is no report of a recipe; make it by stage 10")
    if folder.name != corpus and "recipes/kaldi/run.sh" not in report:
        sys.exit(f"{source}: is not of a recipe here, nor of data for recipes/kaldi")
    tables = read_tables(table_files(ROOT / "exp" / corpus))
    if not report and not tables:
        sys.exit(f"{source} does not exist; run its recipe first")
    if tables:
        update_tables(folder / "TABLES.md", tables)
    if report:
        update_results(folder / "RESULTS.md", report)


def update_results(path: Path, results: str) -> None:
    """Puts a report into RESULTS.md, above the runs that were added by hand."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    found = _FURTHER.search(old)
    further = old[found.start() :] if found else ""
    text = _COMMAND.sub(lambda found: _elsewhere(found[0]), results).removeprefix(SIGNED)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("!["))
    path.write_text(
        "\n\n".join(filter(None, [re.sub(r"\n{3,}", "\n\n", text).strip(), further.strip()])) + "\n", encoding="utf-8"
    )


def _elsewhere(command: str) -> str:
    """Returns the command of a report without the folder of this machine."""
    words = shlex.split(command)
    kept = [word for word in words if not _ABSOLUTE_EXP.match(word)]
    return command if kept == words else f"    {shlex.join(kept)}"


def read_tables(paths: Sequence[Path]) -> list[str]:
    """Returns the texts of tables of papers. Ends the program if two have the same title."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    owners: dict[str, Path] = {}
    for path, text in zip(paths, texts, strict=True):
        title = _title(text)
        if title in owners:
            sys.exit(f"{owners[title]} and {path}: have the same title; remove one of them, or give it another title")
        owners[title] = path
    return texts


def _title(text: str) -> str:
    return text.partition("\n")[0]


def update_tables(path: Path, tables: list[str]) -> None:
    """Puts tables of papers into TABLES.md, in place of those with the same titles."""
    old = re.split(r"^(?=### )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:] if path.exists() else []
    by_title = {_title(text): shorten(text) for text in [*old, *tables]}
    path.write_text(
        "\n\n".join([TABLES_HEAD, *(by_title[title] for title in sorted(by_title))]) + "\n", encoding="utf-8"
    )


def shorten(table: str) -> str:
    """Returns a table without rows that restate another or that have no published value, if any other is left."""
    kept = [line for line in table.strip().splitlines() if not _left_out(line)]
    text = "\n".join(kept)
    return re.sub(r"\n\|[^\n]*\n\|:--[^\n]*\n(?!\|)", "", text + "\n").strip()  # a heading without rows


def _left_out(line: str) -> bool:
    cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
    return len(cells) > 2 and ("restates" in cells[-1] or cells[2] == NONE)


def error_rates(results: str) -> dict[tuple[str, str], dict[str, str]]:
    """Parses the word error rates of a RESULTS.md, means over seeds: (system, LM) to subset to percent."""
    rates: dict[tuple[str, str], dict[str, str]] = {}
    for section in _SUBSET.finditer(results):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")]
                            for line in section["table"].splitlines()]  # fmt: skip
        for system, *cells in rows:
            for lm, cell in zip(header[1:], cells, strict=True):
                if mean := _MEAN.match(cell):
                    rates.setdefault((system, lm), {})[section["name"]] = mean[1]
    return rates


def table(recipes: Path) -> str:
    """Returns a Markdown table: a row per corpus, system and LM, a column per subset of the test sets."""
    texts = [path.read_text() for path in sorted(recipes.glob("*/RESULTS.md"))]
    corpora = {_title(text).removeprefix("# Results: "): error_rates(text) for text in texts}
    subsets = list(dict.fromkeys(name for rates in corpora.values() for by in rates.values() for name in by))
    lines = ["| corpus | system | LM | " + " | ".join(subsets) + " |", "|:--|:--|:--|" + "--:|" * len(subsets)]
    for corpus, rates in corpora.items():
        for (system, lm), by_subset in rates.items():
            cells = [corpus, system, lm, *(by_subset.get(name, NONE) for name in subsets)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="*", metavar="CORPUS", help="corpus to copy results of")
    parser.add_argument("--table", action="store_true", help="print the table of word error rates")
    options = parser.parse_args()
    if not (options.corpora or options.table):
        parser.error("give a CORPUS, or --table")
    publish_all(options.corpora)
    if options.table:
        print(table(ROOT / "recipes"))


if __name__ == "__main__":
    main()
