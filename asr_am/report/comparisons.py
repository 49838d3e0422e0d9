"""Is a system's WER lower than another's, or was it the choice of the test set? Families of seeds compared in pairs.

Which groups of runs may be compared with each other, and with what.

Accuracy is compared between runs on the same data for as long (`ACCURACY` is equal); optimizers may differ, as what is
best for one strategy is not for another. Speed is compared between runs timed alike (`SPEED` is equal): the same clock,
cluster and workload, and the same total batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asr_am.errors import InputError
from asr_am.report.results import GMM_SYSTEMS, Family, mean
from asr_am.report.runs import Group
from asr_am.score.significance import Comparison, paired_bootstrap


@dataclass(frozen=True)
class Versus:
    """The outcome for `system` (b) against `baseline` (a), which use the same LM."""

    system: Family
    baseline: Family
    outcome: Comparison


def against_gmm(families: Sequence[Family]) -> list[Versus]:
    """Each system that is no GMM against the last GMM of `families` with the same LM, where there is one."""
    baselines = {family.lm: family for family in families if family.system in GMM_SYSTEMS}
    hybrids = [family for family in families if family.system not in GMM_SYSTEMS and family.lm in baselines]
    return [compare(hybrid, baselines[hybrid.lm]) for hybrid in hybrids]


def compare(system: Family, baseline: Family) -> Versus:
    """Paired bootstrap over segments, in each of which errors and words are summed over the family's seeds.

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
                f"score/{score.run}: its segments are not those of the runs beside it; run stage 9 (score) again"
            )
    errors = [sum(score.segments[name][0] for score in family.scores) for name in names]
    return errors, [sum(score.segments[name][1] for score in family.scores) for name in names]


ACCURACY = ("corpus", "model", "epochs", "batch")
SPEED = ("corpus", "model", "batch", "clock", "cluster", "workload")
BUT_BATCH = (
    "corpus", "model", "optimizer", "epochs", "strategy", "learners", "clock", "cluster", "workload", "faults",
)  # fmt: skip


def strategies(groups: Sequence[Group]) -> list[str]:
    """The strategies of the groups: one learner's first, the others by name."""
    return sorted({group.setting.strategy for group in groups}, key=lambda name: (name != "local", name))


def fault_kinds(groups: Sequence[Group]) -> list[str]:
    """The faults of the groups in words: "" first, the least slowed next."""
    return list(dict.fromkeys(group.setting.faults for group in sorted(groups, key=_badness)))


def partition(groups: Sequence[Group], fields: Sequence[str]) -> list[list[Group]]:
    """The groups that have the values of `fields` in common, put together, in order of those values."""
    parts: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        parts.setdefault(tuple(getattr(group.setting, field) for field in fields), []).append(group)
    return [parts[key] for key in sorted(parts, key=lambda key: [_ordered(value) for value in key])]


def by_strategy(groups: Sequence[Group]) -> list[list[Group]]:
    """Sets of groups that accuracy is compared between, at least one of them over several learners."""
    parts = [sorted(part, key=_distribution) for part in partition(groups, ACCURACY)]
    return [part for part in parts if len(part) > 1 and any(group.setting.learners > 1 for group in part)]


def widest(groups: Sequence[Group]) -> list[Group]:
    """Those without faults, or all where all have some, each strategy at its largest number of learners."""
    shown = [group for group in groups if not group.setting.faults] or groups
    most: dict[str, int] = {}
    for group in shown:
        most[group.setting.strategy] = max(group.setting.learners, most.get(group.setting.strategy, 0))
    return [group for group in shown if group.setting.learners == most[group.setting.strategy]]


def by_batch(groups: Sequence[Group]) -> list[list[Group]]:
    """Sets of groups that differ in their batch only, smallest first, over the seeds that all of them have."""
    sets = []
    for part in partition([group for group in groups if not group.setting.faults], BUT_BATCH):
        seeds = sorted(set.intersection(*(set(group.seeds) for group in part)))
        if seeds and len({group.setting.batch for group in part}) > 1:
            sets.append([group.of_seeds(seeds) for group in sorted(part, key=lambda group: group.setting.batch)])
    return sorted(sets, key=lambda part: _distribution(part[0]))


def single_learner(groups: Sequence[Group]) -> Group | None:
    """What the others of a set are measured against: one learner without faults, by preference of strategy `local`.

    Of several the best, by held-out loss.
    """
    single = [group for group in groups if group.setting.learners == 1 and not group.setting.faults]
    return min(single, key=lambda group: (group.setting.strategy != "local", min(group.mean_loss_E())), default=None)


@dataclass(frozen=True)
class Timed:
    """One way of running: a strategy, its learners, and what went wrong meanwhile."""

    strategy: str
    learners: int
    faults: str


@dataclass(frozen=True)
class Speeds:
    """Groups that are timed alike. seconds: of an epoch, mean over the runs. reference: what speed-ups are against."""

    groups: Sequence[Group]
    seconds: Mapping[Timed, float]
    reference: Timed | None

    def speedup(self, timed: Timed) -> float | None:
        if self.reference is None or timed not in self.seconds:
            return None
        return self.seconds[self.reference] / self.seconds[timed]


def speeds(groups: Sequence[Group]) -> list[Speeds]:
    """Of each set of groups timed alike, at least one of them with several learners."""
    sets = []
    for part in partition(groups, SPEED):
        if any(group.setting.learners > 1 for group in part):
            part = sorted(part, key=_distribution)
            seconds = _epoch_seconds(part)
            sets.append(Speeds(part, seconds, _reference(seconds)))
    return sets


def timed(group: Group) -> Timed:
    return Timed(group.setting.strategy, group.setting.learners, group.setting.faults)


def _epoch_seconds(groups: Sequence[Group]) -> dict[Timed, float]:
    found: dict[Timed, list[float]] = {}
    for group in groups:
        for run in group.runs:
            if run.epoch_seconds is not None:
                found.setdefault(timed(group), []).append(run.epoch_seconds)
    return {key: mean(values) for key, values in found.items()}


def _reference(seconds: Mapping[Timed, float]) -> Timed | None:
    """One learner, `local` before others; without one the fastest of those with the fewest learners. No faults."""
    sound = [key for key in seconds if not key.faults]
    return min(sound, key=lambda key: (key.learners, key.strategy != "local", seconds[key]), default=None)


def _distribution(group: Group) -> tuple:
    """One learner first, then by strategy and learners; those without faults first, the least slowed next."""
    setting = group.setting
    return setting.strategy != "local", setting.strategy, setting.learners, *_badness(group), group.name


def _badness(group: Group) -> tuple:
    slowest = max((factor for _, factor in group.setting.slow), default=1.0)
    return group.setting.faults != "", slowest, group.setting.faults


def _ordered(value: object) -> tuple[bool, float, str]:
    """A key that numbers, texts and None can be sorted by together."""
    number = float(value) if isinstance(value, int | float) else 0.0
    return value is not None, number, str(value)
