"""Copies the results of finished runs to recipes/<corpus>/*.md, or prints a small table of them.

    python scripts/publish.py CORPUS ...      # copy from exp/ to recipes/
    python scripts/publish.py --table         # word error rates in recipes/*/RESULTS.md, as Markdown

These files are copied without their plots, as far as they exist:

    RESULTS.md        exp/<corpus>/RESULTS.md
    FUSION.md         the same of runs with exp=exp/fusion (conf/experiment/fusion.yaml)
    ABLATION.md       the same of runs with exp=exp/ablation (conf/features/fusion260.yaml)
    PROBS.md          the same of runs with exp=exp/probs
    NO_PROBS.md       the same of runs with exp=exp/no_probs lexicon_probs=false
    STRATEGIES.md, STRATEGIES_2.md, PSP.md, HTM.md
                      exp/<corpus>/NAME/COMPARE.md, with NAME in lower case, written by
                      python -m asr_am.report.compare exp/<corpus>/train/RUN ... --out exp/<corpus>/NAME

STRATEGIES_2.md has later runs with newer alignments, compared with a single learner of their own. The results of data
that recipes/kaldi took as NAME go to recipes/kaldi/NAME.md, in upper case, and e.g. NAME_NO_PROBS.md.

TABLES.md has the tables of papers that `python -m asr_am.stages.table` has written below exp/, which RESULTS.md leaves
out. Those of other titles stay as they are.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from asr_am.report.paper_table import table_files

ROOT = Path(__file__).resolve().parents[1]
NONE = "–"
RESULTS = "RESULTS.md"
TABLES_HEAD = """# Tables of papers

Published values beside ours, each table by its command: see [conf](../../conf/README.md#tables-of-papers). Cells on
which no constant was fitted are predictions."""

_SUBSET = re.compile(r"^### (?P<name>\S+) \((?P<words>[\d,]+) words\)\n\n(?P<table>(?:\|.*\n)+)", re.MULTILINE)
_TABLES = re.compile(r"^## Tables of papers\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ABSOLUTE_EXP = re.compile(r"^(    recipes/\S+.*?) exp=/\S+", re.MULTILINE)  # of one machine
_MEAN = re.compile(r"\*\*([\d.]+)\*\*")


def publish(corpus: str) -> None:
    """Copies the results of a corpus to its recipe, without the plots."""
    exp, folder = ROOT / "exp", ROOT / "recipes" / corpus
    own_data = not folder.exists()
    if own_data:
        folder = ROOT / "recipes/kaldi"
    sources = {
        RESULTS: exp / corpus / "RESULTS.md",
        "FUSION.md": exp / "fusion" / corpus / "RESULTS.md",
        "ABLATION.md": exp / "ablation" / corpus / "RESULTS.md",
        "PROBS.md": exp / "probs" / corpus / "RESULTS.md",
        "NO_PROBS.md": exp / "no_probs" / corpus / "RESULTS.md",
        "STRATEGIES.md": exp / corpus / "strategies/COMPARE.md",
        "STRATEGIES_2.md": exp / corpus / "strategies_2/COMPARE.md",
        "PSP.md": exp / corpus / "psp/COMPARE.md",
        "HTM.md": exp / corpus / "htm/COMPARE.md",
    }
    found = {name: source for name, source in sources.items() if source.exists()}
    tables = [path.read_text() for path in table_files(exp / corpus)]
    if tables:
        update_tables(folder / "TABLES.md", tables)
    if not found and not tables:
        sys.exit(f"{sources[RESULTS]} does not exist; run its recipe first")
    for name, source in found.items():
        if own_data:
            name = f"{corpus.upper()}.md" if name == RESULTS else f"{corpus.upper()}_{name}"
        text = _ABSOLUTE_EXP.sub(r"\1", _TABLES.sub("", source.read_text()))
        text = "\n".join(line for line in text.splitlines() if not line.startswith("!["))
        (folder / name).write_text(re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")


def update_tables(path: Path, tables: list[str]) -> None:
    """Puts tables of papers into TABLES.md, in place of those with the same titles."""
    old = re.split(r"^(?=### )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:] if path.exists() else []
    by_title = {text.partition("\n")[0]: text.strip() for text in [*old, *tables]}
    path.write_text(
        "\n\n".join([TABLES_HEAD, *(by_title[title] for title in sorted(by_title))]) + "\n", encoding="utf-8"
    )


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
    paths = {path.parent.name: path for path in recipes.glob("*/RESULTS.md")}
    own = [path for path in recipes.glob("kaldi/*.md") if not path.stem.endswith(("_FUSION", "_ABLATION", "_PROBS"))]
    paths |= {path.stem.lower(): path for path in own}
    corpora = {name: error_rates(path.read_text()) for name, path in sorted(paths.items())}
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
    for corpus in options.corpora:
        publish(corpus)
    if options.table:
        print(table(ROOT / "recipes"))


if __name__ == "__main__":
    main()
