"""The plots of a report: held-out loss by epoch, and WER by system.

The colours are Okabe and Ito's, which the colour-blind can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from asr_am.report.results import Family, TrainingRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")  # so that bars differ in grey, too
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LEGEND_LINES = 12  # more runs than that are named by their family


def plot_heldout(runs: Sequence[TrainingRun], corpus: str, path: Path) -> None:
    """Held-out loss and frame error rate by epoch, a line per run: a colour per system, a line style per seed."""
    figure = _figure(10, 4.4)
    loss_axes, error_axes = figure.subplots(1, 2)
    families = list(dict.fromkeys(run.family for run in runs))
    seen: dict[str, int] = {}
    for run in runs:
        kind = families.index(run.family)
        nth = seen[run.family] = seen.get(run.family, -1) + 1
        label = run.name if len(runs) <= LEGEND_LINES else (run.family if nth == 0 else None)
        epochs = range(1, len(run.loss_E) + 1)
        for axes, values in ((loss_axes, run.loss_E), (error_axes, run.frame_error_E)):
            axes.plot(
                epochs, values, STYLES[nth % len(STYLES)], color=COLOURS[kind % len(COLOURS)],
                marker=MARKERS[kind % len(MARKERS)], markersize=3.5, linewidth=1.5, label=label,
            )  # fmt: skip
    for axes, what in ((loss_axes, "held-out loss (nats per frame)"), (error_axes, "held-out frame error rate (%)")):
        axes.set_xlabel("epoch")
        axes.set_ylabel(what)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _tidy(axes, "both")
    loss_axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{corpus}: held-out loss and frame error rate by epoch")
    _save(figure, path)


def plot_wer(families: Sequence[Family], corpus: str, path: Path) -> None:
    """WER by system, a bar per LM with its 95 % interval and a dot per seed; a panel per subset."""
    subsets = list(families[0].scores[0].subsets)
    systems = list(dict.fromkeys(family.system for family in families))
    lms = sorted({family.lm for family in families})
    figure = _figure(max(7.0, 1.6 + len(systems) * max(1.6, 0.75 * len(lms))), 1.2 + 3.0 * len(subsets))
    panels = figure.subplots(len(subsets), 1, sharex=True, squeeze=False)[:, 0]
    for axes, subset in zip(panels, subsets, strict=True):
        _draw_wer(axes, families, subset, systems, lms)
    crowded = len(systems) > 5
    rotation, side = (20, "right") if crowded else (0, "center")
    panels[-1].set_xticks(range(len(systems)), systems, fontsize=9, rotation=rotation, ha=side)
    bars, labels = panels[0].get_legend_handles_labels()
    of_lm = dict(zip(labels, bars, strict=True))
    legend_bars = [of_lm[lm] for lm in lms]
    figure.legend(legend_bars, lms, title="LM", frameon=False, loc="outside right upper", fontsize=9)
    seeds = max(len(family.scores) for family in families)
    note = f"; bars are means of up to {seeds} seeds, dots the seeds" if seeds > 1 else ""
    figure.suptitle(f"{corpus}: word error rate by system\n(whiskers: 95 % bootstrap interval{note})", fontsize=11)
    _save(figure, path)


def _draw_wer(axes: Axes, families: Sequence[Family], subset: str, systems: list[str], lms: list[str]) -> None:
    """One panel: the bars of one subset."""
    width = 0.8 / len(lms)
    for family in families:
        nth = lms.index(family.lm)
        x = systems.index(family.system) + (nth - (len(lms) - 1) / 2) * width
        wer, (low, high) = family.wer(subset), family.interval(subset)
        colour, hatch = COLOURS[nth % len(COLOURS)], HATCHES[nth % len(HATCHES)]
        axes.bar(x, wer, 0.92 * width, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=family.lm)
        axes.errorbar(x, wer, [[max(wer - low, 0)], [max(high - wer, 0)]], color="black", capsize=3, linewidth=1)
        each = [score.subsets[subset].wer for score in family.scores]
        if len(each) > 1:
            axes.scatter([x] * len(each), each, s=14, facecolor="white", edgecolor="black", linewidth=0.8, zorder=3)
        top = max(high, *each)
        axes.annotate(f"{wer:.1f}", (x, top), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    words = families[0].scores[0].subsets[subset].words
    axes.set_title(f"{subset} ({words:,} words)", loc="left", fontsize=10)
    axes.set_ylabel("WER (%)")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    _tidy(axes, "y")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no display, no pyplot state
    return figure


def _tidy(axes: Axes, grid: Literal["both", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(f"tmp.{path.name}")
    figure.savefig(temporary, dpi=150, metadata={"Software": None})
    temporary.replace(path)
