"""Figures of Zhang et al. (ICASSP 2019) for our runs: held-out loss (2b, 5a), speed-up (5b), batches (6)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from asr_am.report import formatting, run_labels
from asr_am.report.comparisons import Speeds, Timed, fault_kinds, strategies, timed
from asr_am.report.plot_style import COLOURS, HATCHES, Style, new_figure, tidy, whole_numbers
from asr_am.report.results import mean
from asr_am.report.runs import RunGroup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINEAR_UP_TO = 32  # learners; speed-up axes are logarithmic above
SOUND, SLOWED = COLOURS[0], COLOURS[4]


def draw_loss(groups: Sequence[RunGroup], labels: Sequence[str], styles: Sequence[Style], title: str) -> Figure:
    """Plots held-out loss by epoch: a thick line for the mean over a group's seeds, thin lines for the seeds."""
    figure = new_figure(7.6, 4.6)
    axes = figure.subplots()
    for group, label, style in zip(groups, labels, styles, strict=True):
        several = len(group.runs) > 1
        for run in group.runs if several else ():
            axes.plot(range(1, run.epochs_done + 1), run.loss_E, style.line, color=style.colour, lw=0.8, alpha=0.4)
        mean_E = group.mean_loss_E()
        best = group.mean(lambda run: run.best_loss)
        summary = ", ".join(filter(None, (formatting.seeds(group.seeds), f"best {best:.4f}")))
        axes.plot(
            range(1, len(mean_E) + 1), mean_E, style.line, color=style.colour, marker=style.marker, markersize=4,
            lw=1.8, label=f"{label} ({summary})",
        )  # fmt: skip
    axes.set_xlabel("epoch")
    axes.set_ylabel("held-out loss (nats per frame)")
    whole_numbers(axes.xaxis)
    tidy(axes, "both")
    losses = [run.loss_E for group in groups for run in group.runs]
    low = min(0, *map(min, losses))  # those of MMI and chain may be negative
    top = low + 2 * (median(map(max, losses)) - low)
    if max(map(max, losses)) > top:  # clip diverged runs so that the others stay legible
        axes.set_ylim(low, top)
    note = "mean over seeds; thin: each seed" if any(len(group.runs) > 1 for group in groups) else None
    legend = axes.legend(fontsize=8.5, frameon=False, title=note, title_fontsize=8.5, loc="upper right")
    legend.set_alignment("left")
    add_title(figure, title, run_labels.shared(groups))
    return figure


def draw_speedup(speeds: Speeds, order: Sequence[str], title: str) -> Figure | None:
    """Plots speed-up by number of learners, a line per strategy, and the ideal.

    `order` has all strategies of the report, so that each keeps its colour in every figure. Returns None without a
    reference, or for a single number of learners.
    """
    reference = speeds.reference
    if reference is None:
        return None
    figure = new_figure(6.4, 5.0)
    axes = figure.subplots()
    ticks = {reference.learners}
    for nth, name in enumerate(order):
        points = sorted(key.learners for key in speeds.seconds if key.strategy == name and not key.faults)
        ups = [speeds.speedup(Timed(name, learners, "")) or 0.0 for learners in points]
        if points and points[-1] > reference.learners:
            style = Style.of(nth)
            axes.plot(points, ups, style.line, color=style.colour, marker=style.marker, lw=1.8, label=name)
            ticks |= set(points)
    if len(ticks) == 1:
        return None
    ends = [min(ticks), max(ticks)]
    axes.plot(ends, [end / reference.learners for end in ends], ":", color="0.45", lw=1.2, label="ideal", zorder=1)
    if max(ticks) > LINEAR_UP_TO:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.set_xlabel("learners")
    axes.set_ylabel("speed-up (times as fast)")
    tidy(axes, "both")
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    add_title(figure, title, run_labels.shared(speeds.groups), f"speed-up 1: {describe_reference(speeds)}")
    return figure


def describe_reference(speeds: Speeds) -> str:
    """Describes the run that speed-ups are relative to, with its time per epoch."""
    reference = speeds.reference
    if reference is None:
        return "nothing: every run here has faults, or was not timed"
    learners = f"{reference.learners} learner{'s' if reference.learners > 1 else ''}"
    return f"{reference.strategy} with {learners}, {formatting.duration(speeds.seconds[reference])} per epoch"


def draw_batches(groups: Sequence[RunGroup], title: str) -> Figure:
    """Plots batches of each learner per epoch: a row of panels per strategy, a column per kind of fault."""
    rows = strategies(groups)
    columns = fault_kinds(groups)
    figure = new_figure(max(5.4, 1.2 + 3.3 * len(columns)), 1.6 + 1.5 * len(rows))
    panels = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    for row, strategy in enumerate(rows):
        for column, faults in enumerate(columns):
            axes = panels[row, column]
            shown = [group for group in groups if (timed(group).strategy, timed(group).faults) == (strategy, faults)]
            _draw_bars(axes, shown)
            tidy(axes, "y")
        panels[row, 0].set_ylabel(f"{strategy}\nbatches")
    for column, faults in enumerate(columns):
        panels[0, column].set_title(faults or "no faults", loc="left", fontsize=9)
        panels[-1, column].set_xlabel("learner")
        whole_numbers(panels[-1, column].xaxis)
    whole_numbers(panels[0, 0].yaxis)
    several = any(len(group.runs) > 1 for group in groups)
    note = "batches per epoch, mean over seeds (dots: each seed)" if several else "batches per epoch"
    slow = "; hatched: slowed learners" if any(group.config.slow for group in groups) else ""
    add_title(figure, title, run_labels.shared(groups, without=("strategy",)), f"{note}{slow}")
    return figure


def _draw_bars(axes: Axes, groups: Sequence[RunGroup]) -> None:
    """Draws the means over runs, slowed learners hatched, with a dot for each run if they differ."""
    runs = [run for group in groups for run in group.runs if run.batches_per_learner]
    if not runs:
        axes.annotate("no such run", (0.5, 0.5), xycoords="axes fraction", ha="center", color="0.5", fontsize=8)
        return
    slowed = dict(groups[0].config.slow)
    axes.set_xlim(-0.7, groups[0].config.learners - 0.3)
    for learner in range(groups[0].config.learners):
        each = [run.batches_per_learner.get(learner, 0) / run.epochs_done for run in runs]
        slow = learner in slowed
        colour, hatch = (SLOWED, HATCHES[1]) if slow else (SOUND, HATCHES[0])
        axes.bar(learner, mean(each), 0.8, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        if len(set(each)) > 1:
            axes.scatter([learner] * len(each), each, s=7, facecolor="white", edgecolor="black", lw=0.6, zorder=3)


def add_title(figure: Figure, title: str, *notes: str) -> None:
    """Sets the title with wrapped notes below it."""
    width = int(13 * figure.get_figwidth())  # characters of a line
    lines = [title, *(line for note in notes for line in textwrap.wrap(note, width))]
    figure.suptitle("\n".join(lines), fontsize=10)
