"""The sections of a report about distributed training: figures and tables, each where there are runs for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.report import formatting
from asr_am.report import strategy_tables as tables
from asr_am.report.comparisons import (
    SPEED,
    Speeds,
    by_batch,
    by_strategy,
    partition,
    single_learner,
    speeds,
    strategies,
    widest,
)
from asr_am.report.plot_style import Style, save
from asr_am.report.psp_plots import draw_error, draw_pulls, draw_staleness
from asr_am.report.results import Score
from asr_am.report.runs import Group, TrainingRun, group_runs
from asr_am.report.strategy_plots import describe_reference, draw_batches, draw_loss, draw_speedup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Gallery:
    """Figures saved in `folder`, shown by Markdown links that begin with `link`."""

    def __init__(self, folder: Path, link: str) -> None:
        self._folder, self._link = folder, link
        self._names: set[str] = set()

    def add(self, figure: Figure, name: str, what: str) -> str:
        """The line that shows it. name: made a file name of its own."""
        stem = re.sub(r"[^\w.]+", "-", name).strip("-.")
        number = 1
        while (unique := stem if number == 1 else f"{stem}-{number}") in self._names:
            number += 1
        self._names.add(unique)
        save(figure, self._folder / f"{unique}.png")
        return f"![{what}]({self._link}{unique}.png)"


def strategy_sections(runs: Sequence[TrainingRun], scores: Sequence[Score], folder: Path, link: str) -> list[str]:
    """Write the figures into `folder` and return the Markdown that shows them; [] where nothing is to be compared."""
    groups, gallery = group_runs(runs), Gallery(folder, link)
    order = strategies(groups)
    sections = []
    for part in by_strategy(groups):
        sections += _accuracy(part, scores, order, gallery)
    for part in by_batch(groups):
        sections += _batches(part, gallery)
    for timed_alike in speeds(groups):
        sections += _speed(timed_alike, order, gallery)
    return ["## Strategies", *sections] if sections else []


def _accuracy(groups: Sequence[Group], scores: Sequence[Score], order: Sequence[str], gallery: Gallery) -> list[str]:
    """Figure 5a and table 2; nothing for runs of an epoch without a single learner's beside them."""
    setting, baseline = groups[0].setting, single_learner(groups)
    differ = [field for field in ("optimizer", "rate") if len({getattr(group.setting, field) for group in groups}) > 1]
    fields = ("strategy", "learners", *differ)
    sections = [
        f"### By strategy: {_heading(groups, ('corpus', 'model', 'optimizer', 'batch', 'epochs'))}",
        f"All: {formatting.shared(groups)}.",
    ]
    drawn = [group for group in widest(groups) if len(group.mean_loss_E()) > 1]
    if len(drawn) < 2 and baseline is None:
        return []
    if len(drawn) > 1:
        styles, labels = _styles(drawn, order), formatting.labels(drawn, fields)
        figure = draw_loss(drawn, labels, styles, f"{setting.corpus}: held-out loss by strategy")
        name = f"loss-by-strategy-b{setting.batch}"
        sections.append(gallery.add(figure, name, "Held-out loss by strategy"))
        if len({group.setting.clock for group in drawn}) == 1 and all(run.seconds_E for g in drawn for run in g.runs):
            figure = draw_error(drawn, labels, styles, f"{setting.corpus}: held-out frame error by strategy")
            sections.append(gallery.add(figure, f"error-by-strategy-b{setting.batch}", "Frame error by epoch and time"))
    title = "staleness and loss by number of learners"
    if by_learners := draw_staleness(groups, order, f"{setting.corpus}: {title}"):
        sections.append(gallery.add(by_learners, f"staleness-b{setting.batch}", title.capitalize()))
    labels = formatting.labels(groups, fields)
    against = "no run of a single learner to compare with"
    if baseline is not None:
        against = f"differences from {labels[groups.index(baseline)]} ({baseline.name}), over the seeds that both have"
    sections += [
        f"Held-out loss in nats per frame, mean over seeds; {against}.",
        tables.losses(groups, labels, baseline),
    ]
    if rates := tables.accuracy(groups, labels, baseline, scores):
        note = "WER in percent, mean over seeds; differences absolute, that of the whole test set by paired bootstrap."
        sections += [note, rates]
    return sections


def _styles(groups: Sequence[Group], order: Sequence[str]) -> list[Style]:
    """A colour for each strategy, a line style for the nth group with it."""
    kinds = [order.index(group.setting.strategy) for group in groups]
    return [Style.of(kind, kinds[:nth].count(kind)) for nth, kind in enumerate(kinds)]


def _batches(groups: Sequence[Group], gallery: Gallery) -> list[str]:
    """Figure 2b."""
    setting = groups[0].setting
    labels = formatting.labels(groups, ("batch",))
    styles = [Style.of(nth) for nth in range(len(groups))]
    figure = draw_loss(groups, labels, styles, f"{setting.corpus}: held-out loss by batch size (chunks)")
    name = f"loss-by-batch-{setting.strategy}-{setting.learners}"
    return [
        f"### By batch size: {_heading(groups, ('corpus', 'strategy', 'learners', 'model', 'optimizer'))}",
        f"All: {formatting.shared(groups)}.",
        gallery.add(figure, name, "Held-out loss by batch size"),
        "Held-out loss in nats per frame, mean over seeds; differences from the smallest batch.",
        tables.losses(groups, labels, groups[0]),
    ]


def _speed(part: Speeds, order: Sequence[str], gallery: Gallery) -> list[str]:
    """Figure 5b and tables 1 and 3, then figure 6 for each number of learners."""
    setting = part.groups[0].setting
    place = f"{setting.cluster or setting.clock}-b{setting.batch}"
    several = [group for group in part.groups if group.setting.learners > 1]
    sections = [f"### Speed: {_heading(part.groups, SPEED)}"]
    if figure := draw_speedup(part, order, f"{setting.corpus}: speed-up by number of learners"):
        sections.append(gallery.add(figure, f"speedup-{place}", "Speed-up by number of learners"))
    sections.append(f"Speed-up against {describe_reference(part)}.")
    if table := tables.speed(part, tables.sound_rows(part)):
        sections.append(table)
    if table := tables.speed(part, tables.faulty_rows(part)):
        sections += ["With slowed learners and other faults:", table]
    sections += [
        "What the strategies cost, as measured, means over seeds. Time waited: share of the learners' time. Sent: by "
        "all learners. Staleness: mean and largest, in updates. Consensus distance: root mean square over the learners "
        "of the distance of their weights from the mean, after the last epoch.",
        tables.measured(several, formatting.labels(several, ("strategy", "learners"))),
    ]
    if served := [group for group in several if any(group.pull_seconds)]:  # some took any time
        labels = formatting.labels(served, ("strategy", "learners"))
        figure = draw_pulls(served, labels, _styles(served, order), f"{setting.corpus}: how long pulls take")
        sections.append(gallery.add(figure, f"pulls-{place}", "Delays of pulls"))
    for members in partition(several, ("learners",)):
        if any(run.batches_per_learner for group in members for run in group.runs):
            figure = draw_batches(members, f"{setting.corpus}: batches per learner")
            name = f"batches-per-learner-{members[0].setting.learners}-{place}"
            sections.append(gallery.add(figure, name, "Batches per learner"))
    return sections


def _heading(groups: Sequence[Group], fields: Sequence[str]) -> str:
    """The values of those fields that all groups have in common, as far as a run names them."""
    setting = groups[0].setting
    common = [field for field in fields if len({getattr(group.setting, field) for group in groups}) == 1]
    return ", ".join(formatting.phrase(setting, field) for field in common if getattr(setting, field) is not None)
