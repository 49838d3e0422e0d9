"""Plots of held-out loss by epoch and WER by system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.report.plot_style import COLOURS, HATCHES, Style, new_figure, save, tidy, whole_numbers
from asr_am.report.results import Family
from asr_am.report.runs import TrainingRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

LEGEND_LINES = 12  # more runs are labelled by family, more families get a legend outside


def plot_heldout(runs: Sequence[TrainingRun], corpus: str, path: Path) -> None:
    """Plots held-out loss and frame error rate by epoch: line per run, colour per system, dashes per seed."""
    families = list(dict.fromkeys(run.family for run in runs))
    figure = new_figure(10, 4.4 if len(families) <= LEGEND_LINES else max(4.4, 0.6 + 0.15 * len(families)))
    loss_axes, error_axes = figure.subplots(1, 2)
    seen: dict[str, int] = {}
    for run in runs:
        kind = families.index(run.family)
        nth = seen[run.family] = seen.get(run.family, -1) + 1
        label = run.name if len(runs) <= LEGEND_LINES else (run.family if nth == 0 else None)
        style = Style.of(kind, nth)
        epochs = range(1, len(run.loss_E) + 1)
        for axes, values in ((loss_axes, run.loss_E), (error_axes, run.frame_error_E)):
            axes.plot(
                epochs, values, style.line, color=style.colour, marker=style.marker, markersize=3.5, linewidth=1.5,
                label=label,
            )  # fmt: skip
    for axes, quantity in (
        (loss_axes, "held-out loss (nats per frame)"),
        (error_axes, "held-out frame error rate (%)"),
    ):
        axes.set_xlabel("epoch")
        axes.set_ylabel(quantity)
        whole_numbers(axes.xaxis)
        tidy(axes, "both")
    if len(families) > LEGEND_LINES:
        figure.legend(*loss_axes.get_legend_handles_labels(), loc="outside right upper", fontsize=6.5, frameon=False)
    else:
        loss_axes.legend(fontsize=9, frameon=False)
    figure.suptitle(f"{corpus}: held-out loss and frame error rate by epoch")
    save(figure, path)


def plot_wer(families: Sequence[Family], corpus: str, path: Path) -> None:
    """Plots WER by system: a bar per LM with its 95 % interval, a dot per seed, a panel per subset."""
    subsets = list(families[0].scores[0].subsets)
    systems = list(dict.fromkeys(family.system for family in families))
    lms = sorted({family.lm for family in families})
    figure = new_figure(max(7.0, 1.6 + len(systems) * max(1.6, 0.75 * len(lms))), 1.2 + 3.0 * len(subsets))
    panels = figure.subplots(len(subsets), 1, sharex=True, squeeze=False)[:, 0]
    for axes, subset in zip(panels, subsets, strict=True):
        bars = _draw_wer(axes, families, subset, systems, lms)
    crowded = len(systems) > 5
    rotation, side = (20, "right") if crowded else (0, "center")
    panels[-1].set_xticks(range(len(systems)), systems, fontsize=9, rotation=rotation, ha=side)
    figure.legend([bars[lm] for lm in lms], lms, title="LM", frameon=False, loc="outside right upper", fontsize=9)
    seeds = max(len(family.scores) for family in families)
    note = f"; bars are means of up to {seeds} seeds, dots the seeds" if seeds > 1 else ""
    figure.suptitle(f"{corpus}: word error rate by system\n(whiskers: 95 % bootstrap interval{note})", fontsize=11)
    save(figure, path)


def _draw_wer(
    axes: Axes, families: Sequence[Family], subset: str, systems: list[str], lms: list[str]
) -> dict[str, Rectangle]:
    """Draws the bars of one subset. Returns a bar of each LM, for the legend."""
    width, bars = 0.8 / len(lms), {}
    for family in families:
        nth = lms.index(family.lm)
        x = systems.index(family.system) + (nth - (len(lms) - 1) / 2) * width
        wer, (low, high) = family.wer(subset), family.interval(subset)
        colour, hatch = COLOURS[nth % len(COLOURS)], HATCHES[nth % len(HATCHES)]
        bars[family.lm] = axes.bar(x, wer, 0.92 * width, color=colour, hatch=hatch, edgecolor="white", linewidth=0)[0]
        axes.errorbar(x, wer, [[max(wer - low, 0)], [max(high - wer, 0)]], color="black", capsize=3, linewidth=1)
        each = [score.subsets[subset].wer for score in family.scores]
        if len(each) > 1:
            axes.scatter([x] * len(each), each, s=14, facecolor="white", edgecolor="black", linewidth=0.8, zorder=3)
        top = max(high, *each)
        axes.annotate(f"{wer:.1f}", (x, top), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    words = families[0].scores[0].subsets[subset].words
    axes.set_title(f"{subset} ({words:,} words)", loc="left", fontsize=10)
    axes.set_ylabel("WER (%)")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    tidy(axes, "y")
    return bars
