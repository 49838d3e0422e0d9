"""Tables 1 to 3 of Zhang et al. (ICASSP 2019) for our runs: cost of communication, accuracy, stragglers."""

from __future__ import annotations

from collections.abc import Sequence

from asr_am.report import comparisons, formatting
from asr_am.report.comparisons import Speeds, Timed, same_test_set, shared_seeds
from asr_am.report.markup import table
from asr_am.report.results import Family, SystemScore, corpus_of
from asr_am.report.runs import WITHOUT_ZERO, RunGroup, TrainingRun
from asr_am.report.tables import signed_interval


def measured(groups: Sequence[RunGroup], labels: Sequence[str]) -> str:
    """Returns table 1 as measured: waiting time, bytes, staleness and consensus distance, means over seeds."""
    header = ["strategy", "seeds", "time waited", "sent per epoch", "modelled per epoch", "staleness", "most stale"]
    rows = []
    for group, label in zip(groups, labels, strict=True):
        waited, stale, apart = (group.mean(figure) for figure in (waited_share, mean_staleness, last_distance))
        most = max((max(run.staleness, default=0) for run in group.runs if run.staleness), default=None)
        row = [label, formatting.spans(group.seeds), "–" if waited is None else f"{100 * waited:.1f} %"]
        row += [formatting.size(group.mean(lambda run: _per_epoch(run, run.bytes_sent)))]
        row += [formatting.size(group.mean(_modelled_per_epoch))]
        row += ["–" if stale is None else f"{stale:.2f}", "–" if most is None else str(most)]
        rows.append([*row, "–" if apart is None else f"{apart:.3g}"])
    return table([*header, "consensus distance"], rows)


def waited_share(run: TrainingRun) -> float | None:
    """Returns the share of the learners' time spent waiting for each other."""
    if run.waiting_seconds is None or not run.seconds:
        return None
    return run.waiting_seconds / (run.config.learners * run.seconds)


def mean_staleness(run: TrainingRun) -> float | None:
    updates = sum(run.staleness.values())
    return sum(staleness * count for staleness, count in run.staleness.items()) / updates if updates else None


def last_distance(run: TrainingRun) -> float | None:
    return run.consensus_distance_E[-1] if run.consensus_distance_E else None


def _per_epoch(run: TrainingRun, total: float | None) -> float | None:
    return None if total is None else total / run.epochs_done


def _modelled_per_epoch(run: TrainingRun) -> float | None:
    """Returns the bytes of the simulated workload, None for real processes."""
    return _per_epoch(run, run.modelled_bytes) if run.config.clock == "virtual" else None


def losses(groups: Sequence[RunGroup], labels: Sequence[str], baseline: RunGroup | None) -> str:
    """Returns a table of held-out losses of the best and the last epoch, with the difference from `baseline`.

    Losses are means over seeds. A difference covers the seeds that both groups have. It is omitted if these runs have
    different numbers of epochs. It is relative, but for criteria whose losses have no zero (MMI, chain) in nats.
    """
    header = ["runs", "seeds", "epochs", "held-out loss, best epoch", "difference", "last epoch", "difference"]
    rows = []
    for group, label in zip(groups, labels, strict=True):
        done = min(run.epochs_done for run in group.runs)
        row = [label, formatting.spans(group.seeds), formatting.finished(done, group.config.epochs)]
        for best in (True, False):
            row += [f"{_loss(group, best):.4f}", _difference(group, baseline, best)]
        rows.append(row)
    return table(header, rows)


def _loss(group: RunGroup, best: bool) -> float:
    value = group.mean(lambda run: run.best_loss if best else run.loss_E[-1])
    assert value is not None  # read_training_run refuses runs without losses
    return value


def _difference(group: RunGroup, baseline: RunGroup | None, best: bool) -> str:
    pair = None if baseline is None or group is baseline else common_seeds(group, baseline)
    if pair is None or len({run.epochs_done for part in pair for run in part.runs}) > 1:
        return "–"
    own, other = _loss(pair[0], best), _loss(pair[1], best)
    if group.config.criterion in WITHOUT_ZERO:
        return f"{own - other:+.4f}"
    return f"{100 * (own / other - 1):+.2f} %"


def common_seeds(group: RunGroup, baseline: RunGroup) -> tuple[RunGroup, RunGroup] | None:
    """Restricts both groups to the seeds they share. Returns None if there are none."""
    seeds = sorted(set(group.seeds) & set(baseline.seeds))
    return (group.of_seeds(seeds), baseline.of_seeds(seeds)) if seeds else None


def accuracy(
    groups: Sequence[RunGroup], labels: Sequence[str], baseline: RunGroup | None, scores: Sequence[SystemScore]
) -> str:
    """Returns table 2: WER by subset and LM, mean over seeds, and the difference from `baseline`. "" without scores.

    Differences cover the seeds that both groups have, if they are scored on the same test set. The whole test set gets
    a paired bootstrap interval.
    """
    families = [(group, family) for group, label in zip(groups, labels, strict=True)
                for family in group_by_lm(group, label, scores)]  # fmt: skip
    if not families:
        return ""
    of_baseline = {family.lm: family for group, family in families if group is baseline}
    every = [score.subsets for _, family in families for score in family.scores]
    subsets = [name for name in every[0] if name != "all" and all(name in subsets for subsets in every)]
    header = ["runs", "LM", "seeds", "all", "difference [95 %]", "verdict"]
    header += [text for name in subsets for text in (name, "difference")]
    rows = []
    for group, family in sorted(families, key=lambda pair: pair[1].lm):
        other = None if group is baseline else of_baseline.get(family.lm)
        pair = shared_seeds(family, other) if other and same_test_set(family, other) else None
        seeds = formatting.spans(score.seed for score in family.scores if score.seed is not None)
        row = [family.system, family.lm, seeds, f"{family.wer('all'):.2f}"]
        row += ["–", "other test set"] if other and not same_test_set(family, other) else _significance(pair)
        for name in subsets:
            change = "–" if pair is None else f"{pair[0].wer(name) - pair[1].wer(name):+.2f}"
            row += [f"{family.wer(name):.2f}", change]
        rows.append(row)
    return table(header, rows)


def group_by_lm(group: RunGroup, label: str, scores: Sequence[SystemScore]) -> list[Family]:
    """Returns the scores of a group's runs by LM. exp/<corpus>/score/<run>_<lm> belongs to exp/<corpus>/train/<run>."""
    runs = {(run.corpus_dir, run.folder.name) for run in group.runs}
    own = [score for score in scores if (corpus_of(score.folder), score.system) in runs]
    return [Family(label, lm, [score for score in own if score.lm == lm]) for lm in sorted({s.lm for s in own})]


def _significance(pair: tuple[Family, Family] | None) -> list[str]:
    if pair is None:
        return ["–", "–"]
    versus = comparisons.compare(*pair)
    return [signed_interval(versus.outcome.difference), comparisons.verdict(versus)]


def speed(speeds: Speeds, rows: Sequence[tuple[int, str]]) -> str:
    """Returns table 3: time per epoch and speed-up, a row per (learners, faults), two columns per strategy.

    The single learner that is the reference has no row. The table is "" if no row is left.
    """
    keys = [key for key in speeds.seconds if (key.learners, key.faults) in rows]
    keys = [key for key in keys if key != speeds.reference or key.learners > 1]
    names = [name for name in comparisons.strategies(speeds.groups) if name in {key.strategy for key in keys}]
    rows = [row for row in rows if row in {(key.learners, key.faults) for key in keys}]
    header = ["learners", "faults", *(text for name in names for text in (f"{name}: time per epoch", "speed-up"))]
    lines = []
    for learners, faults in rows:
        cells = []
        for name in names:
            key = Timed(name, learners, faults)
            ratio = speeds.speedup(key)
            cells += [formatting.duration(speeds.seconds.get(key)), "–" if ratio is None else f"{ratio:.2f}"]
        lines.append([str(learners), faults or "none", *cells])
    return table(header, lines) if lines else ""


def sound_rows(speeds: Speeds) -> list[tuple[int, str]]:
    """Returns the rows without faults, one for each number of learners."""
    return [(learners, "") for learners in sorted({key.learners for key in speeds.seconds if not key.faults})]


def faulty_rows(speeds: Speeds) -> list[tuple[int, str]]:
    """Returns the rows of each number of learners that has runs with faults: without faults first, then with each
    kind.
    """
    keys = {(group.config.learners, group.config.faults) for group in speeds.groups}
    learners = sorted({number for number, faults in keys if faults})
    kinds = comparisons.fault_kinds(speeds.groups)
    return [(number, faults) for number in learners for faults in kinds if (number, faults) in keys]
