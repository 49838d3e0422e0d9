"""Draws the two pictures of README.md as SVG files that need no scripts and no network.

    python scripts/figures.py architecture asr_am/architecture.svg
    python scripts/figures.py stragglers recipes/minicts/TABLES.md scripts/bench/stragglers.svg

The first shows how a recipe, the trainer, a strategy and a team fit together. The second shows the hours per epoch
of Zhang et al. (ICASSP 2019), Table 3, beside those of the virtual cluster, from the record of experiment
ibm_table3.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

import matplotlib.pyplot as plt

WIDTH = 860
STYLE = """
text { font-family: Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328; }
.head { font-weight: bold; font-size: 14px; }
.small { font-size: 11.5px; fill: #57606a; }
.box { stroke: #8c959f; stroke-width: 1; }
.line { stroke: #57606a; stroke-width: 1.5; fill: none; }
"""
COLORS = {"recipe": "#ddf4ff", "train": "#dafbe1", "strategy": "#fff8c5", "team": "#fbefff", "paper": "#ffffff"}
COLOR_OF = {"sync": "#0969da", "hybrid": "#bf8700", "adpsgd": "#1a7f37"}
ROW = re.compile(r"\| ibm_a (\w+) (\d+)x \| hours \| ([\d.]+) \| ([\d.]+) \|")


def svg(height: int, title: str, parts: list[str]) -> str:
    """Returns a complete SVG document on a white background."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#57606a"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Returns one line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, color: str, head: str, *lines: str) -> list[str]:
    """Returns a rounded box with a heading and lines of small text."""
    parts = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{color}" class="box"/>']
    parts.append(text(x + 12, y + 22, head, "head"))
    return parts + [text(x + 12, y + 41 + 17 * k, line, "small") for k, line in enumerate(lines)]


def arrow(x1: float, y1: float, x2: float, y2: float, label: str = "") -> list[str]:
    """Returns an arrow, with a label beside its middle."""
    parts = [f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" class="line" marker-end="url(#arrow)"/>']
    return parts + ([text((x1 + x2) / 2 + 8, (y1 + y2) / 2 + 4, label, "small")] if label else [])


def architecture() -> str:
    """Returns the picture of the layers from a recipe to the three kinds of team."""
    parts = box(20, 20, 820, 78, COLORS["recipe"], "recipes/<corpus>/run.sh  →  asr_am/stages",
                "0 data · 1 lang · 2 features · 3 align · 4 speaker · 5 egs · 6 train · 7 decode · 8 rescore · "
                "9 score · 10 report", 
                "Each stage checks its inputs, is skipped when up to date, and goes on after a kill.")  # fmt: skip
    parts += arrow(430, 98, 430, 128, "stage 6, configured by conf/ (Hydra)")
    parts += box(20, 130, 820, 78, COLORS["train"], "asr_am/train: Trainer",
                 "For every segment of an epoch: leases batches, calls strategy.step(gradient), validates, "
                 "writes a checkpoint.", "The gradient is a closure: lease a batch, forward, backward.")  # fmt: skip
    parts += arrow(430, 208, 430, 238, "step(gradient) → StepResult")
    parts += box(20, 240, 820, 78, COLORS["strategy"], "asr_am/distributed/strategies: one file per algorithm",
                 "local · sync · hybrid · dpsgd · adpsgd · gtc · bmuf · htm · diloco · slowmo · powersgd · topk · "
                 "ps_sync · ps_async · psp · parallax",
                 "Owns the update. Reads like its paper. Sees other learners only through a Team.")  # fmt: skip
    parts += arrow(430, 318, 430, 348, "collectives, messages, tasks, leases")
    parts += [text(20, 366, "Team (asr_am/distributed/team.py): the same strategy code runs on each of", "head")]
    parts += box(20, 376, 200, 96, COLORS["team"], "SingleProcess", "one learner, in this process", "launcher=alone")
    parts += box(240, 376, 290, 96, COLORS["team"], "runtime: ProcessTeam", "real processes and hosts",
                 "torch.distributed + ZeroMQ messages", "launcher=process, torchrun")  # fmt: skip
    parts += box(550, 376, 290, 96, COLORS["team"], "simulator: SimTeam", "many virtual learners in one process",
                 "real arithmetic, modelled time, same bits", "launcher=virtual")  # fmt: skip
    return svg(490, "From a recipe to an update: recipe, trainer, strategy, team", parts)


def stragglers(record: str, out: Path) -> None:
    """Draws the hours per epoch in TABLES.md by slowdown of one GPU, with the published values as lines across bars."""
    cells = {(m[1], int(m[2])): (float(m[3]), float(m[4])) for m in ROW.finditer(record)}
    slowdowns = sorted({slowdown for _, slowdown in cells})
    plt.rcParams |= {"svg.hashsalt": "asr_am", "font.size": 9}
    figure, axes = plt.subplots(figsize=(8.6, 3.4), layout="constrained")
    for k, (strategy, color) in enumerate(COLOR_OF.items()):
        places = [i + 0.27 * (k - 1) for i in range(len(slowdowns))]
        published, ours = zip(*(cells[strategy, slowdown] for slowdown in slowdowns), strict=True)
        bars = axes.bar(places, ours, 0.24, color=color, label=f"{strategy}, virtual cluster")
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.hlines(published, [x - 0.14 for x in places], [x + 0.14 for x in places], color="black", linewidth=2,
                    label="published" if k == 2 else None)  # fmt: skip
    axes.set(yscale="log", ylim=(0.5, 120), ylabel="hours per epoch (log scale)")
    axes.set_title("16 GPUs, one of them slower (Zhang et al., 2019, Table 3)", loc="left")
    axes.set_xticks(range(len(slowdowns)), [f"one GPU {n}x slower" if n > 1 else "all GPUs alike" for n in slowdowns])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    match sys.argv[1:]:
        case ["architecture", out]:
            Path(out).write_text(architecture(), encoding="utf-8")
        case ["stragglers", source, out]:
            stragglers(Path(source).read_text(encoding="utf-8"), Path(out))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
