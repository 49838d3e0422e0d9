"""Put results of finished runs where readers look: recipes/<corpus>/*.md and README.md.

    python scripts/publish.py [CORPUS ...]

Copied are, as far as they are there: exp/<corpus>/RESULTS.md; those of runs with exp=exp/fusion (conf/experiment) and
exp=exp/ablation (conf/features/fusion260.yaml); and what `python -m asr_am.report.compare exp/<corpus>/train/RUN ...
--out exp/<corpus>/NAME` leaves for the NAMEs strategies, strategies_2 (later runs, against a single learner of their
own), psp and htm. The tables between the marks in the README are cut out of them. Plots stay in exp/.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: written by scripts/publish.py -->", "<!-- end of results -->"


def publish(corpus: str) -> None:
    """Copy what is known of a corpus, without the plots, into its recipe."""
    exp = ROOT / "exp"
    sources = {
        "RESULTS.md": exp / corpus / "RESULTS.md",
        "FUSION.md": exp / "fusion" / corpus / "RESULTS.md",
        "ABLATION.md": exp / "ablation" / corpus / "RESULTS.md",
        "STRATEGIES.md": exp / corpus / "strategies/COMPARE.md",
        "STRATEGIES_2.md": exp / corpus / "strategies_2/COMPARE.md",
        "PSP.md": exp / corpus / "psp/COMPARE.md",
        "HTM.md": exp / corpus / "htm/COMPARE.md",
    }
    found = {name: source for name, source in sources.items() if source.exists()}
    if not found:
        sys.exit(f"{sources['RESULTS.md']} does not exist; run recipes/{corpus}/run.sh first")
    for name, source in found.items():
        text = "\n".join(line for line in source.read_text().splitlines() if not line.startswith("!["))
        (ROOT / "recipes" / corpus / name).write_text(re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")


def tables(recipe: Path) -> str:
    """The tables of word error rates and of strategies, under the corpus' name."""
    shown = [f"### {recipe.name}"]
    if (results := recipe / "RESULTS.md").exists():
        shown.append(error_rates(results))
    if (results := recipe / "FUSION.md").exists():
        shown += ["#### With i-vectors and speech at three speeds, `+experiment=fusion`", error_rates(results)]
    if (results := recipe / "ABLATION.md").exists():
        shown += [
            "#### What parts of the input bring, as runs are named; blstm-local-b64 has fMLLR and log-mel",
            error_rates(results).split("#### Against")[0].strip(),
        ]
    for name, title in (("STRATEGIES.md", ""), ("STRATEGIES_2.md", "Later runs, with newer alignments. ")):
        if (strategies := recipe / name).exists():
            parts = strategies.read_text().split("\n### ")
            shown += [f"#### {title}{part.strip()}" for part in parts if part.startswith("By ")]
    return "\n\n".join(shown) + "\n"


def error_rates(results: Path) -> str:
    """The section on the test set."""
    section = results.read_text().split("## Word error rate on the test set")[1].split("\n## ")[0]
    return section.replace("### ", "#### ").strip()


def main() -> None:
    for corpus in sys.argv[1:]:
        publish(corpus)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    _, after = rest.split(END)
    found = sorted({path.parent for path in ROOT.glob("recipes/*/*.md")})
    readme.write_text(f"{before}{BEGIN}\n\n" + "\n".join(map(tables, found)) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
