"""Significance tests between systems, and the selection of training runs that may be compared.

Systems are compared in pairs, each with all its seeds. Accuracy is compared between runs with the same training data,
criterion, batch and number of epochs (equal `ACCURACY` fields). Their optimizers and other options may differ, because
each strategy has its own best ones: the labels of the rows show what differs. Speed is compared between runs timed
alike (equal `SPEED` and `TIMED` fields): the same training data, criterion, clock, cluster, workload and total batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asr_am.errors import InputError
from asr_am.report.results import GMM_SYSTEMS, Family, mean
from asr_am.report.run_settings import describe_data
from asr_am.report.runs import RunGroup
from asr_am.score.significance import Comparison, paired_bootstrap


@dataclass(frozen=True)
class Versus:
    """Outcome of `system` (b) against `baseline` (a), both with the same LM."""

    system: Family
    baseline: Family
    outcome: Comparison


MIN_WORDS, MIN_SEGMENTS, MIN_SEEDS = 5000, 20, 2
VERDICT_RULE = (
    f"Verdict: by the 95 % interval, if the test set has at least {MIN_WORDS:,} words in {MIN_SEGMENTS} segments and "
    f"there are at least {MIN_SEEDS} seeds of each system that has seeds (a GMM has none)."
)


def verdict(pair: Versus) -> str:
    """Returns the verdict on the system against its baseline.

    A verdict needs a test set of at least 5,000 words in 20 segments, and at least two seeds of each system. A GMM is
    trained without a seed and counts as it is. Where this holds, the system is "better" or "worse" if the 95 % interval
    of the difference excludes zero, else "not significant". Where it does not, the reasons are returned: "too few words
    (773)", "too few segments (1)", "one seed".
    """
    scores = [*pair.baseline.scores, *pair.system.scores]
    words = min(sum(words for _, words in score.segments.values()) for score in scores)
    seeds = [{score.seed for score in family.scores} for family in (pair.baseline, pair.system)]
    reasons = [f"too few words ({words:,})"] if words < MIN_WORDS else []
    segments = min(len(score.segments) for score in scores)
    reasons += [f"too few segments ({segments})"] if segments < MIN_SEGMENTS else []
    reasons += ["one seed"] if any(each != {None} and len(each) < MIN_SEEDS for each in seeds) else []
    if reasons:
        return ", ".join(reasons)
    if not pair.outcome.significant:
        return "not significant"
    return "better" if pair.outcome.difference.value < 0 else "worse"


def shared_seeds(system: Family, baseline: Family) -> tuple[Family, Family] | None:
    """Restricts both families to the seeds they share. Returns None if there are none."""
    seeds = {score.seed for score in system.scores} & {score.seed for score in baseline.scores}
    if not seeds:
        return None
    own, other = (
        replace(each, scores=[score for score in each.scores if score.seed in seeds]) for each in (system, baseline)
    )
    return own, other


def same_test_set(system: Family, baseline: Family) -> bool:
    """Returns True if all scores are of the same segments, and of the same reference where it is recorded."""
    scores = [*system.scores, *baseline.scores]
    references = {score.reference for score in scores if score.reference is not None}
    return len(references) < 2 and len({frozenset(score.segments) for score in scores}) == 1


def against_gmm(families: Sequence[Family]) -> list[Versus]:
    """Compares each hybrid system with the last GMM of `families` that has the same LM, if there is one.

    Leaves out systems that were trained on other data than the GMMs.
    """
    baselines = {family.lm: family for family in families if family.system in GMM_SYSTEMS}
    hybrids = [family for family in families if family.system not in GMM_SYSTEMS and family.lm in baselines]
    return [compare(hybrid, baselines[hybrid.lm]) for hybrid in hybrids if not hybrid.other_data]


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


ACCURACY = ("corpus", "criterion", "model", "epochs", "batch", "data")
SPEED = ("corpus", "model", "batch", "clock", "cluster", "workload")
TIMED = ("criterion", "data", "hardware", "computation")
BUT_BATCH = (
    "corpus", "criterion", "model", "optimizer", "epochs", "strategy", "learners", "clock", "cluster", "workload",
    "faults", "data", "hardware",
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


def describe_sets(groups: Sequence[RunGroup]) -> list[str]:
    """Lists the training data of the groups and the runs on each: "train.subset=0.1 (a-s1, a-s2)"."""
    corpora = {group.config.corpus for group in groups}
    listed = []
    for part in partition(groups, ("corpus", "data")):
        config = part[0].config
        alike = [group.config.data for group in groups if group.config.corpus == config.corpus]
        words = [f"corpus {config.corpus}"] if len(corpora) > 1 else []
        words += [text] if (text := describe_data(alike)[config.data]) else []
        listed.append(f"{', '.join(words)} ({', '.join(run.name for group in part for run in group.runs)})")
    return listed


def unlike(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """Returns, for each corpus, the groups that only their training data keep from being compared."""
    found: dict[int, RunGroup] = {}
    for fields in (ACCURACY, BUT_BATCH, (*SPEED, *TIMED)):
        for part in partition(groups, [field for field in fields if field != "data"]):
            other_batches = fields is BUT_BATCH and len({group.config.batch for group in part}) > 1
            several = fields is not BUT_BATCH and any(group.config.learners > 1 for group in part)
            if len({group.config.data for group in part}) > 1 and (several or other_batches):
                found |= {id(group): group for group in part}
    return partition(list(found.values()), ("corpus",))


def widest(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Returns each strategy at its largest number of learners, without faults unless all groups have faults."""
    shown = [group for group in groups if not group.config.faults] or groups
    most: dict[str, int] = {}
    for group in shown:
        most[group.config.strategy] = max(group.config.learners, most.get(group.config.strategy, 0))
    return [group for group in shown if group.config.learners == most[group.config.strategy]]


def by_batch(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """Returns sets of groups that differ in batch size, smallest first, restricted to the seeds they share.

    Their learning rates and other options of training and model may differ, which their labels have to show.
    """
    sets = []
    for part in partition([group for group in groups if not group.config.faults], BUT_BATCH):
        seeds = sorted(set.intersection(*(set(group.seeds) for group in part)))
        if seeds and len({group.config.batch for group in part}) > 1:
            sets.append([group.of_seeds(seeds) for group in sorted(part, key=lambda group: group.config.batch)])
    return sorted(sets, key=lambda part: _distribution(part[0]))


def single_learner(groups: Sequence[RunGroup]) -> RunGroup | None:
    """Returns the baseline of a set: one learner from beginning to end without faults, preferably strategy `local`.

    The lowest held-out loss decides between several.
    """
    single = [group for group in groups if group.config.learners == 1 and not group.config.faults]
    single = [group for group in single if not any(run.resized for run in group.runs)]
    return min(single, key=lambda group: (group.config.strategy != "local", min(group.mean_loss_E())), default=None)


@dataclass(frozen=True)
class Timed:
    """Key of a timing: strategy, number of learners, and description of the faults."""

    strategy: str
    learners: int
    faults: str


@dataclass(frozen=True)
class Speeds:
    """Groups that were timed alike, by strategy and number of learners, and mean seconds of an epoch over the runs."""

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
    for part in partition(groups, (*SPEED, *TIMED)):
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
