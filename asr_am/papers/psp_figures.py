"""Figures of PSP-SGD (2018) for our runs: `python -m asr_am.papers.psp_figures RUN RUN ... --out DIR`.

RUN is the directory of a run, exp/<corpus>/train/<run>. Writes these figures to DIR, where there are runs for them:

    pulls       delays between a push and the shard that answers it (figure 2)
    error       held-out frame error by epoch and by time (figures 3 and 4)
    staleness   staleness and loss by the number of learners, of asynchronous SGD
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asr_am.data.ownership import check_own_dir, mark_own_dir
from asr_am.report import run_labels
from asr_am.report.comparisons import strategies
from asr_am.report.plot_style import Style, new_figure, save, tidy, whole_numbers
from asr_am.report.runs import RunGroup, group_runs, read_training_run
from asr_am.report.strategy_plots import add_title
from asr_am.report.strategy_tables import mean_staleness
from asr_am.score.cli import CommandLineParser, exit_code

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMAND = "asr_am.papers.psp_figures"
BINS = 60  # of the histogram of delays


def draw_error(groups: Sequence[RunGroup], labels: Sequence[str], styles: Sequence[Style], title: str) -> Figure:
    """Plots held-out frame error by epoch and by time on the clock of the runs, means over seeds."""
    figure = new_figure(9.0, 4.2)
    by_epoch, by_time = figure.subplots(1, 2, sharey=True)
    longest = max(sum(group.mean_E(lambda run: run.seconds_E)) for group in groups)
    unit, name = (3600.0, "hours") if longest > 7200 else (60.0, "minutes") if longest > 120 else (1.0, "seconds")
    for group, label, style in zip(groups, labels, styles, strict=True):
        error_E = group.mean_E(lambda run: run.frame_error_E)
        time_E = [seconds / unit for seconds in accumulate(group.mean_E(lambda run: run.seconds_E))]
        for axes, x_E in ((by_epoch, range(1, len(error_E) + 1)), (by_time, time_E)):
            axes.plot(
                x_E, error_E, style.line, color=style.colour, marker=style.marker, markersize=3.5, lw=1.6, label=label
            )
    by_epoch.set_xlabel("epoch")
    whole_numbers(by_epoch.xaxis)
    by_epoch.set_ylabel("held-out frame error (%)")
    by_time.set_xlabel(f"{name} of training")
    by_time.legend(fontsize=8.5, frameon=False)
    for axes in (by_epoch, by_time):
        tidy(axes, "both")
    add_title(figure, title, run_labels.shared(groups))
    return figure


def draw_pulls(groups: Sequence[RunGroup], labels: Sequence[str], styles: Sequence[Style], title: str) -> Figure:
    """Plots the probability density of the delay between a push and the arrival of the shard that answers it."""
    figure = new_figure(6.8, 4.2)
    axes = figure.subplots()
    edges = np.linspace(0.0, 1.02 * max(max(group.pull_latency) for group in groups), BINS + 1)
    for group, label, style in zip(groups, labels, styles, strict=True):
        pulls = group.pull_latency
        counts, _ = np.histogram(list(pulls), edges, weights=list(pulls.values()))
        density = counts / np.diff(edges) / counts.sum()
        density[density == 0] = np.nan
        axes.stairs(density, edges, color=style.colour, ls=style.line, lw=1.6, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("seconds from push to pull, answers of other ranks")
    axes.set_ylabel("probability density (1/s)")
    tidy(axes, "both")
    axes.legend(fontsize=8.5, frameon=False)
    add_title(figure, title, run_labels.shared(groups))
    return figure


def draw_staleness(groups: Sequence[RunGroup], order: Sequence[str], title: str) -> Figure | None:
    """Plots mean staleness and held-out loss by number of learners.

    Of groups that differ in another field, such as the learning rate, only the one with the lowest loss is drawn.
    Returns None unless some strategy ran with several numbers of learners.
    """
    sound = [group for group in groups if not group.config.faults]
    sound.sort(key=lambda group: -min(group.mean_loss_E()))  # the dict below keeps the last one, the lowest loss
    lines = {strategy: {g.config.learners: g for g in sound if g.config.strategy == strategy} for strategy in order}
    lines = {strategy: points for strategy, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    figure = new_figure(9.0, 4.0)
    stale, loss = figure.subplots(1, 2)
    ticks = sorted(set().union(*lines.values()))
    for axes, quantity, value in (
        (stale, "mean staleness (updates)", lambda group: group.mean(mean_staleness)),
        (loss, "held-out loss, best epoch and rate (nats per frame)", lambda group: min(group.mean_loss_E())),
    ):
        for strategy, points in lines.items():
            learners, style = sorted(points), Style.of(order.index(strategy))
            values = np.array(
                [value(points[number]) for number in learners], dtype=float
            )  # None becomes NaN, which is not drawn
            axes.plot(learners, values, style.line, color=style.colour, marker=style.marker, lw=1.6, label=strategy)
        axes.set_xticks(ticks, [str(number) for number in ticks])
        axes.set_xlabel("learners")
        axes.set_ylabel(quantity)
        tidy(axes, "both")
    stale.legend(fontsize=8.5, frameon=False)
    add_title(figure, title, run_labels.shared(groups, without=("strategy", "learners")))
    return figure


def draw_all(groups: Sequence[RunGroup], out: Path) -> list[Path]:
    """Writes the figures for which there are runs into the folder `out`. Returns their paths."""
    order = strategies(groups)
    timed = [group for group in groups if all(run.seconds_E for run in group.runs)]
    trained = [group for group in timed if len(group.mean_loss_E()) > 1]
    served = [group for group in groups if any(group.pull_latency)]  # some delay is above 0
    figures: dict[str, Figure | None] = {"staleness": draw_staleness(groups, order, "staleness and loss by learners")}
    if trained:
        figures["error"] = draw_error(trained, _labels(trained), _styles(trained), "held-out frame error")
    if served:
        figures["pulls"] = draw_pulls(served, _labels(served), _styles(served), "how long pulls take")
    drawn = {out / f"{name}.png": figure for name, figure in figures.items() if figure is not None}
    for path, figure in drawn.items():
        save(figure, path)
    return list(drawn)


def _labels(groups: Sequence[RunGroup]) -> list[str]:
    return run_labels.labels(groups, ("strategy", "learners"))


def _styles(groups: Sequence[RunGroup]) -> list[Style]:
    return [Style.of(nth) for nth in range(len(groups))]


def write_figures(folders: Sequence[Path], out: Path) -> list[Path]:
    """Writes the figures of runs. Returns their paths.

    Raises:
        InputError: a folder is no finished run, or `out` has files that are not of this command, or is in the output of
            a stage.
    """
    check_own_dir(out, COMMAND)
    runs = [read_training_run(folder) for folder in folders]
    mark_own_dir(out, COMMAND)
    return draw_all(group_runs(runs), out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 1 after one line on stderr about bad input."""

    def work() -> None:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        print(*write_figures(options.runs, options.out), sep="\n")

    return exit_code(COMMAND, work)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandLineParser(
        prog=f"python -m {COMMAND}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory, with its summary.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
