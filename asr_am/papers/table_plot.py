"""Plot of a paper's table beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.papers.cells import Row
from asr_am.report.plot_style import COLOURS, new_figure, save, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_table(rows: Sequence[Row], title: str, path: Path) -> None:
    """Plots the rows of a paper's table: a panel per measure, a line per cell with the published value and ours.

    A grey bar is what counts as published, a small dot is one seed. The axis is logarithmic where values differ by more
    than a factor of 20. Rows whose run has failed have no dot.
    """
    measures = list(dict.fromkeys(row.measure for row in rows))
    by_measure = [[row for row in rows if row.measure == measure] for measure in measures]
    heights = [len(own) + 2.5 for own in by_measure]
    figure = new_figure(9, 0.8 + 0.21 * sum(heights))
    panels = figure.subplots(len(measures), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, measure, own in zip(panels, measures, by_measure, strict=True):
        _draw_rows(axes, own)
        axes.set_xlabel(measure.replace("_", " "))
    handles = {label: bar for axes in panels for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower right", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def _draw_rows(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws the rows of one measure, the first on top."""
    for y, row in enumerate(rows):
        if row.published is not None and row.limit is not None:
            low, high = row.published / row.limit, row.published * row.limit
            axes.barh(y, high - low, 0.8, low, color="0.9", label="counts as published")
        if row.published is not None:
            axes.plot(row.published, y, "|", color="black", markersize=13, markeredgewidth=1.8, label="published")
        if len(row.ours) > 1:
            axes.plot(row.ours, [y] * len(row.ours), ".", color=COLOURS[1], markersize=5, label="each seed")
        if row.mean is not None:
            axes.plot(row.mean, y, "o", color=COLOURS[0], markersize=6, label="ours")
    values = [value for row in rows for value in (row.published, row.mean) if value is not None]
    axes.use_sticky_edges = False  # bars keep their distance from the edges, too
    if values and max(values) > 20 * min(values) > 0:
        _log_axis(axes)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_yticks(range(len(rows)), [row.cell for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    tidy(axes, "both")


def _log_axis(axes: Axes) -> None:
    """Makes the x axis logarithmic, with ticks at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.margins(x=0.03)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
