"""Report sections on distributed training: figures and tables, each only if there are runs for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.report import comparisons, run_labels
from asr_am.report import strategy_tables as tables
from asr_am.report.comparisons import SPEED, VERDICT_RULE, Speeds
from asr_am.report.markup import literal
from asr_am.report.plot_style import Style, save
from asr_am.report.results import SystemScore
from asr_am.report.run_settings import describe, describe_data, differing
from asr_am.report.runs import FRAME_WISE, RunGroup, TrainingRun, group_runs
from asr_am.report.strategy_plots import describe_reference, draw_batches, draw_loss, draw_speedup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FigureWriter:
    """Saves figures in `folder` and returns Markdown links that begin with `link`."""

    def __init__(self, folder: Path, link: str) -> None:
        self._folder, self._link = folder, link
        self._names: set[str] = set()

    def add(self, figure: Figure, name: str, caption: str) -> str:
        """Saves a figure under a unique file name made from `name` and returns its Markdown line."""
        stem = re.sub(r"[^\w.]+", "-", name).strip("-.")
        number = 1
        while (unique := stem if number == 1 else f"{stem}-{number}") in self._names:
            number += 1
        self._names.add(unique)
        save(figure, self._folder / f"{unique}.png")
        return f"![{caption}]({self._link}{unique}.png)"


def strategy_sections(runs: Sequence[TrainingRun], scores: Sequence[SystemScore], folder: Path, link: str) -> list[str]:
    """Writes the figures into `folder` and returns the Markdown that shows them, empty without runs to compare.

    Links begin with `link`. Not all runs need a score.
    """
    groups, figures = group_runs(runs), FigureWriter(folder, link)
    order, apart = comparisons.strategies(groups), comparisons.unlike(groups)
    sections = []
    for part in comparisons.by_strategy(groups):
        sections += _accuracy(part, scores, order, figures, _data(part, apart))
    for part in comparisons.by_batch(groups):
        sections += _batches(part, figures, _data(part, apart))
    for timed_alike in comparisons.speeds(groups):
        further = [*_data(timed_alike.groups, apart), *_timing(timed_alike, groups)]
        sections += _speed(timed_alike, order, figures, further)
    notes = [
        f"Not compared with each other, because their training data differ: {literal(sets)}. To compare them, train "
        "with equal values of these options."
        for sets in ("; ".join(comparisons.describe_sets(part)) for part in apart)
    ]
    return ["## Strategies", *notes, *sections] if sections else []


def _data(part: Sequence[RunGroup], apart: Sequence[Sequence[RunGroup]]) -> list[str]:
    """Describes the training data of a part, if they keep it from being compared with others."""
    config = part[0].config
    data = [group.config.data for groups in apart for group in groups if group.config.corpus == config.corpus]
    text = describe_data(data).get(config.data)
    return [text] if text else []


def _timing(part: Speeds, groups: Sequence[RunGroup]) -> list[str]:
    """Describes what else was not timed alike in groups with the same values of `SPEED`."""
    config = part.groups[0].config
    alike = [group.config for group in groups
             if all(getattr(group.config, field) == getattr(config, field) for field in SPEED)]  # fmt: skip
    hardware = describe(config.hardware, differing([other.hardware for other in alike]))
    return hardware + describe(config.computation, differing([other.computation for other in alike]))


def _accuracy(
    groups: Sequence[RunGroup], scores: Sequence[SystemScore], order: Sequence[str], figures: FigureWriter,
    data: Sequence[str],
) -> list[str]:  # fmt: skip
    """Returns figure 5a and table 2. Runs of one epoch are shown only next to a single learner's."""
    config, baseline = groups[0].config, comparisons.single_learner(groups)
    differ = [field for field in ("optimizer", "rate") if len({getattr(group.config, field) for group in groups}) > 1]
    fields = ("strategy", "learners", *differ)
    sections = [
        f"### By strategy: {_heading(groups, ('corpus', 'model', 'optimizer', 'batch', 'epochs'), data)}",
        f"All: {literal(run_labels.shared(groups))}.",
    ]
    drawn = [group for group in comparisons.widest(groups) if len(group.mean_loss_E()) > 1]
    if len(drawn) < 2 and baseline is None:
        return []
    if len(drawn) > 1:
        styles, labels = _styles(drawn, order), run_labels.labels(drawn, fields, complete=True)
        figure = draw_loss(drawn, labels, styles, f"{config.corpus}: held-out loss by strategy")
        name = f"loss-by-strategy-b{config.batch}"
        sections.append(figures.add(figure, name, "Held-out loss by strategy"))
    labels = run_labels.labels(groups, fields, complete=True)
    against = "no run of a single learner to compare with"
    if baseline is not None:
        against = f"differences from {labels[groups.index(baseline)]} ({baseline.name}), over the seeds that both have"
    sections += [
        f"Held-out loss in nats per frame, mean over seeds; {literal(against)}.",
        tables.losses(groups, labels, baseline),
    ]
    if rates := tables.accuracy(groups, labels, baseline, scores):
        note = "WER in percent, mean over seeds; differences absolute, that of the whole test set by paired bootstrap."
        sections += [f"{note} {VERDICT_RULE}", rates]
    return sections


def _styles(groups: Sequence[RunGroup], order: Sequence[str]) -> list[Style]:
    """Assigns a colour to each strategy and a dash pattern to its nth group."""
    kinds = [order.index(group.config.strategy) for group in groups]
    return [Style.of(kind, kinds[:nth].count(kind)) for nth, kind in enumerate(kinds)]


def _batches(groups: Sequence[RunGroup], figures: FigureWriter, data: Sequence[str]) -> list[str]:
    """Returns figure 2b and its table."""
    config = groups[0].config
    differ = [field for field in ("rate",) if len({getattr(group.config, field) for group in groups}) > 1]
    labels = run_labels.labels(groups, ("batch", *differ), complete=True)
    styles = [Style.of(nth) for nth in range(len(groups))]
    figure = draw_loss(groups, labels, styles, f"{config.corpus}: held-out loss by batch size (chunks)")
    name = f"loss-by-batch-{config.strategy}-{config.learners}"
    return [
        f"### By batch size: {_heading(groups, ('corpus', 'strategy', 'learners', 'model', 'optimizer'), data)}",
        f"All: {literal(run_labels.shared(groups))}.",
        figures.add(figure, name, "Held-out loss by batch size"),
        "Held-out loss in nats per frame, mean over seeds; differences from the smallest batch.",
        tables.losses(groups, labels, groups[0]),
    ]


def _speed(part: Speeds, order: Sequence[str], figures: FigureWriter, further: Sequence[str]) -> list[str]:
    """Returns figure 5b, tables 1 and 3, and figure 6 for each number of learners."""
    config = part.groups[0].config
    place = f"{config.cluster or config.clock}-b{config.batch}"
    several = [group for group in part.groups if group.config.learners > 1]
    sections = [f"### Speed: {_heading(part.groups, SPEED, further)}"]
    if figure := draw_speedup(part, order, f"{config.corpus}: speed-up by number of learners"):
        sections.append(figures.add(figure, f"speedup-{place}", "Speed-up by number of learners"))
    sections.append(f"Speed-up against {literal(describe_reference(part))}.")
    if table := tables.speed(part, tables.sound_rows(part)):
        sections.append(table)
    if table := tables.speed(part, tables.faulty_rows(part)):
        sections += ["With slowed learners and other faults:", table]
    sections += [
        "What the strategies cost, as measured, means over seeds. Time waited: share of the learners' time. Sent: by "
        "all learners. Staleness: mean and largest, in updates. Consensus distance: root mean square over the learners "
        "of the distance of their weights from the mean, after the last epoch.",
        tables.measured(several, run_labels.labels(several, ("strategy", "learners"))),
    ]
    for members in comparisons.partition(several, ("learners",)):
        if any(run.batches_per_learner for group in members for run in group.runs):
            figure = draw_batches(members, f"{config.corpus}: batches per learner")
            name = f"batches-per-learner-{members[0].config.learners}-{place}"
            sections.append(figures.add(figure, name, "Batches per learner"))
    return sections


def _heading(groups: Sequence[RunGroup], fields: Sequence[str], further: Sequence[str]) -> str:
    """Lists the known values of `fields` that all groups have in common, and `further` words."""
    config = groups[0].config
    common = [field for field in fields if len({getattr(group.config, field) for group in groups}) == 1]
    words = [run_labels.phrase(config, field) for field in common if getattr(config, field) is not None]
    if config.criterion != FRAME_WISE:
        words.append(config.criterion)
    return literal(", ".join([*words, *further]))
