"""Significance tests between systems, and the selection of training runs that may be compared.

Systems are compared in pairs, each with all its seeds. Accuracy is compared between runs with the same data and number
of epochs (equal `ACCURACY` fields). Their optimizers may differ, because each strategy has its own best one. Speed is
compared between runs timed alike (equal `SPEED` fields): the same clock, cluster, workload and total batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asr_am.errors import InputError
from asr_am.report.results import GMM_SYSTEMS, Family, mean
from asr_am.report.runs import RunGroup
from asr_am.score.significance import Comparison, paired_bootstrap


@dataclass(frozen=True)
class Versus:
    """Outcome of `system` (b) against `baseline` (a), both with the same LM."""

    system: Family
    baseline: Family
    outcome: Comparison


def against_gmm(families: Sequence[Family]) -> list[Versus]:
    """Compares each hybrid system with the last GMM of `families` that has the same LM, if there is one."""
    baselines = {family.lm: family for family in families if family.system in GMM_SYSTEMS}
    hybrids = [family for family in families if family.system not in GMM_SYSTEMS and family.lm in baselines]
    return [compare(hybrid, baselines[hybrid.lm]) for hybrid in hybrids]


def compare(system: Family, baseline: Family) -> Versus:
    """Runs a paired bootstrap over segments, with errors and words of each segment summed over the family's seeds.

    Raises:
        InputError: the runs are not all scored on the same segments.
    """
    names = sorted(baseline.scores[0].segments)
    errors_a, words_a = _per_segment(baseline, names)
    errors_b, words_b = _per_segment(system, names)
    return Versus(system, baseline, paired_bootstrap(errors_a, errors_b, words_a, words_b=words_b))


def _per_segment(family: Family, names: Sequence[str]) -> tuple[list[int], list[int]]:
    for score in family.scores:
        if sorted(score.segments) != names:
            raise InputError(
                f"score/{score.run}: scored on other segments than the other runs; run stage 9 (score) again"
            )
    errors = [sum(score.segments[name][0] for score in family.scores) for name in names]
    return errors, [sum(score.segments[name][1] for score in family.scores) for name in names]


ACCURACY = ("corpus", "model", "epochs", "batch")
SPEED = ("corpus", "model", "batch", "clock", "cluster", "workload")
BUT_BATCH = (
    "corpus", "model", "optimizer", "epochs", "strategy", "learners", "clock", "cluster", "workload", "faults",
)  # fmt: skip


def strategies(groups: Sequence[RunGroup]) -> list[str]:
    """Returns the names of the strategies in `groups`: `local` first, the others by name."""
    return sorted({group.config.strategy for group in groups}, key=lambda name: (name != "local", name))


def fault_kinds(groups: Sequence[RunGroup]) -> list[str]:
    """Returns the descriptions of faults in `groups`: "" first, then by the factor of the slowest learner."""
    return list(dict.fromkeys(group.config.faults for group in sorted(groups, key=_badness)))


def partition(groups: Sequence[RunGroup], fields: Sequence[str]) -> list[list[RunGroup]]:
    """Splits the groups by the values of `fields`, sorted by those values."""
    parts: dict[tuple[object, ...], list[RunGroup]] = {}
    for group in groups:
        parts.setdefault(tuple(getattr(group.config, field) for field in fields), []).append(group)
    return [parts[key] for key in sorted(parts, key=lambda key: [_ordered(value) for value in key])]


def by_strategy(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """Returns sets of groups with comparable accuracy, each with at least one group of several learners."""
    parts = [sorted(part, key=_distribution) for part in partition(groups, ACCURACY)]
    return [part for part in parts if len(part) > 1 and any(group.config.learners > 1 for group in part)]


def widest(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Returns each strategy at its largest number of learners, without faults unless all groups have faults."""
    shown = [group for group in groups if not group.config.faults] or groups
    most: dict[str, int] = {}
    for group in shown:
        most[group.config.strategy] = max(group.config.learners, most.get(group.config.strategy, 0))
    return [group for group in shown if group.config.learners == most[group.config.strategy]]


def by_batch(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """Returns sets of groups that differ only in batch size, smallest first, restricted to the seeds they share."""
    sets = []
    for part in partition([group for group in groups if not group.config.faults], BUT_BATCH):
        seeds = sorted(set.intersection(*(set(group.seeds) for group in part)))
        if seeds and len({group.config.batch for group in part}) > 1:
            sets.append([group.of_seeds(seeds) for group in sorted(part, key=lambda group: group.config.batch)])
    return sorted(sets, key=lambda part: _distribution(part[0]))


def single_learner(groups: Sequence[RunGroup]) -> RunGroup | None:
    """Returns the baseline of a set: one learner without faults, preferably strategy `local`.

    The lowest held-out loss decides between several.
    """
    single = [group for group in groups if group.config.learners == 1 and not group.config.faults]
    return min(single, key=lambda group: (group.config.strategy != "local", min(group.mean_loss_E())), default=None)


@dataclass(frozen=True)
class Timed:
    """Key of a timing: strategy, number of learners, and description of the faults."""

    strategy: str
    learners: int
    faults: str


@dataclass(frozen=True)
class Speeds:
    """Groups that were timed alike.

    Attributes:
        groups: sorted by strategy and number of learners.
        seconds: of one epoch, mean over the runs.
        reference: key that speed-ups are relative to.
    """

    groups: Sequence[RunGroup]
    seconds: Mapping[Timed, float]
    reference: Timed | None

    def speedup(self, timed: Timed) -> float | None:
        if self.reference is None or timed not in self.seconds:
            return None
        return self.seconds[self.reference] / self.seconds[timed]


def speeds(groups: Sequence[RunGroup]) -> list[Speeds]:
    """Returns every set of groups timed alike that has at least one group of several learners."""
    sets = []
    for part in partition(groups, SPEED):
        if any(group.config.learners > 1 for group in part):
            part = sorted(part, key=_distribution)
            seconds = _epoch_seconds(part)
            sets.append(Speeds(part, seconds, _reference(seconds)))
    return sets


def timed(group: RunGroup) -> Timed:
    return Timed(group.config.strategy, group.config.learners, group.config.faults)


def _epoch_seconds(groups: Sequence[RunGroup]) -> dict[Timed, float]:
    found: dict[Timed, list[float]] = {}
    for group in groups:
        for run in group.runs:
            if run.epoch_seconds is not None:
                found.setdefault(timed(group), []).append(run.epoch_seconds)
    return {key: mean(values) for key, values in found.items()}


def _reference(seconds: Mapping[Timed, float]) -> Timed | None:
    """Returns the fault-free key with the fewest learners, preferring `local`, then the fastest."""
    sound = [key for key in seconds if not key.faults]
    return min(sound, key=lambda key: (key.learners, key.strategy != "local", seconds[key]), default=None)


def _distribution(group: RunGroup) -> tuple:
    """Sort key: `local` first, then strategy, number of learners, and increasing faults."""
    config = group.config
    return config.strategy != "local", config.strategy, config.learners, *_badness(group), group.name


def _badness(group: RunGroup) -> tuple:
    slowest = max((factor for _, factor in group.config.slow), default=1.0)
    return group.config.faults != "", slowest, group.config.faults


def _ordered(value: object) -> tuple[bool, float, str]:
    """Sort key for a mix of numbers, texts and None."""
    number = float(value) if isinstance(value, int | float) else 0.0
    return value is not None, number, str(value)
