"""Draws the two pictures of README.md as SVG files that need no fonts, scripts or network.

    python scripts/figures.py architecture asr_am/architecture.svg
    python scripts/bench/ibm_table3.py --json table3.json
    python scripts/figures.py stragglers table3.json scripts/bench/stragglers.svg

The first shows how a recipe, the trainer, a strategy and a team fit together. The second shows the hours per epoch
of Zhang et al. (ICASSP 2019), Table 3, beside those of the virtual cluster.
"""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path

WIDTH = 860
STYLE = """
text { font-family: Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328; }
.head { font-weight: bold; font-size: 14px; }
.small { font-size: 11.5px; fill: #57606a; }
.box { stroke: #8c959f; stroke-width: 1; }
.line { stroke: #57606a; stroke-width: 1.5; fill: none; }
.grid { stroke: #d0d7de; stroke-width: 1; }
"""
COLORS = {"recipe": "#ddf4ff", "train": "#dafbe1", "strategy": "#fff8c5", "team": "#fbefff", "paper": "#ffffff"}
BARS = {"sync": "#0969da", "hybrid": "#bf8700", "adpsgd": "#1a7f37"}
LABELS = {"sync": "SYNC", "hybrid": "HYBRID", "adpsgd": "ADPSGD"}
ROW = re.compile(r"ibm_a (\w+) +(\d+)x  hours per epoch")


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
                "0 data · 1 lang · 2 features · 3 align · 4 speaker · 5 egs · 6 train · 7 decode · 8 rescore · 9 score · "
                "10 report", "Each stage checks its inputs, is skipped when up to date, and goes on after a kill.")  # fmt: skip
    parts += arrow(430, 98, 430, 128, "stage 6, configured by conf/ (Hydra)")
    parts += box(20, 130, 820, 78, COLORS["train"], "asr_am/train: Trainer",
                 "For every segment of an epoch: leases batches, calls strategy.step(gradient), validates, "
                 "writes a checkpoint.", "The gradient is a closure: lease a batch, forward, backward.")  # fmt: skip
    parts += arrow(430, 208, 430, 238, "step(gradient) → StepResult")
    parts += box(20, 240, 820, 78, COLORS["strategy"], "asr_am/distributed/strategies: one file per algorithm",
                 "local · sync · hybrid · dpsgd · adpsgd · gtc · bmuf · htm · ps_sync · ps_async · psp · parallax",
                 "Owns the update. Reads like its paper. Sees other learners only through a Team.")  # fmt: skip
    parts += arrow(430, 318, 430, 348, "collectives, messages, tasks, leases")
    parts += [text(20, 366, "Team (asr_am/distributed/team.py): the same strategy code runs on each of", "head")]
    parts += box(20, 376, 200, 96, COLORS["team"], "SingleProcess", "one learner, in this process", "launcher=alone")
    parts += box(240, 376, 290, 96, COLORS["team"], "runtime: ProcessTeam", "real processes and hosts",
                 "torch.distributed + ZeroMQ messages", "launcher=process, torchrun")  # fmt: skip
    parts += box(550, 376, 290, 96, COLORS["team"], "simulator: SimTeam", "many virtual learners in one process",
                 "real arithmetic, modelled time, same bits", "launcher=virtual")  # fmt: skip
    return svg(490, "From a recipe to an update: recipe, trainer, strategy, team", parts)


def stragglers(rows: list[dict]) -> str:
    """Returns bars of the hours per epoch by slowdown of one GPU, with the published values as lines across them.

    Args:
        rows: of `ibm_table3.py --json`: name, published, ours.
    """
    cells = {(m[1], int(m[2])): row for row in rows if (m := ROW.match(row["name"]))}
    slowdowns = sorted({slowdown for _, slowdown in cells})
    left, bottom, height, most = 60, 260, 200, 7.0
    parts = [text(20, 24, "Hours per epoch, 16 GPUs, one of them slower (Zhang et al., 2019, Table 3)", "head")]
    for hours in range(0, 8):
        y = bottom - height * hours / most
        parts.append(f'<path d="M{left} {y:g} L{WIDTH - 20} {y:g}" class="grid"/>')
        parts.append(text(left - 8, y + 4, str(hours), "small", "end"))
    group = (WIDTH - 20 - left) / len(slowdowns)
    for i, slowdown in enumerate(slowdowns):
        for k, strategy in enumerate(BARS):
            row = cells[strategy, slowdown]
            x, width = left + i * group + 20 + k * 55, 46
            top = bottom - height * min(row["ours"], most) / most
            parts.append(f'<rect x="{x:g}" y="{top:g}" width="{width}" height="{bottom - top:g}" fill="{BARS[strategy]}"/>')
            line = bottom - height * min(row["published"], most) / most
            parts.append(f'<path d="M{x - 3:g} {line:g} L{x + width + 3:g} {line:g}" stroke="#1f2328" stroke-width="2.5"/>')
            parts.append(text(x + width / 2, top - 8, f"{row['ours']:.2f}", "small", "middle"))
        parts.append(text(left + i * group + 98, bottom + 20, f"one GPU {slowdown}x slower" if slowdown > 1 else
                          "all GPUs alike", "", "middle"))  # fmt: skip
    for k, (strategy, color) in enumerate(BARS.items()):
        parts.append(f'<rect x="{left + 130 * k}" y="298" width="14" height="14" fill="{color}"/>')
        parts.append(text(left + 20 + 130 * k, 310, LABELS[strategy]))
    parts.append(f'<path d="M{left + 395} 305 L{left + 425} 305" stroke="#1f2328" stroke-width="2.5"/>')
    parts.append(text(left + 432, 310, "published; bars: virtual cluster. At 100x two bars leave the scale."))
    return svg(325, "Hours per epoch of SYNC, HYBRID and ADPSGD with one slow GPU, published and simulated", parts)


def main() -> None:
    match sys.argv[1:]:
        case ["architecture", out]:
            Path(out).write_text(architecture())
        case ["stragglers", source, out]:
            Path(out).write_text(stragglers(json.loads(Path(source).read_text())["rows"]))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
