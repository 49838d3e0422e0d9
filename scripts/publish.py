"""Put results of finished runs where readers look: recipes/<corpus>/RESULTS.md and README.md.

    python scripts/publish.py [CORPUS ...]

exp/<corpus>/RESULTS.md is copied; the tables between the marks in the README are cut out of it. Plots stay in exp/.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: written by scripts/publish.py -->", "<!-- end of results -->"


def publish(corpus: str) -> None:
    """Copy a corpus' results, without the plots, into its recipe."""
    source = ROOT / "exp" / corpus / "RESULTS.md"
    if not source.exists():
        sys.exit(f"{source} does not exist; run recipes/{corpus}/run.sh first")
    text = "\n".join(line for line in source.read_text().splitlines() if not line.startswith("!["))
    (ROOT / "recipes" / corpus / "RESULTS.md").write_text(re.sub(r"\n{3,}", "\n\n", text) + "\n")


def tables(results: Path) -> str:
    """The tables of word error rates, under the corpus' name."""
    text = results.read_text()
    section = text.split("## Word error rate on the test set")[1].split("\n## ")[0]
    return f"### {results.parent.name}\n{section.replace('### ', '#### ').rstrip()}\n"


def main() -> None:
    for corpus in sys.argv[1:]:
        publish(corpus)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    _, after = rest.split(END)
    found = sorted(ROOT.glob("recipes/*/RESULTS.md"))
    readme.write_text(f"{before}{BEGIN}\n\n" + "\n".join(map(tables, found)) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
