"""How settings, faults, times and sizes are put into words, for titles, legends and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from asr_am.distributed.cluster_config import Faults

if TYPE_CHECKING:
    from asr_am.report.runs import Group, Setting

SHARED = ("strategy", "learners", "model", "optimizer", "batch", "epochs", "clock", "cluster", "workload")


def phrase(setting: Setting, field: str) -> str:
    """The value of one field in words."""
    value = getattr(setting, field)
    if field == "faults":
        return value or "no faults"
    if value is None:
        return f"{field} unknown"
    if field in ("learners", "epochs"):
        return f"{value} {field if value != 1 else field[:-1]}"
    if field == "clock":
        return f"{value} clock"
    if field == "rate":
        return f"rate {value:g}"
    return value if field in ("corpus", "strategy", "model", "optimizer") else f"{field} {value}"


def labels(groups: Sequence[Group], fields: Sequence[str]) -> list[str]:
    """Of each group the values of `fields`; where that is not enough to tell it from another, what else differs."""
    texts = [", ".join(phrase(group.setting, field) for field in fields) for group in groups]
    for field in ("faults", *SHARED, "launcher"):
        if field not in fields:
            texts = _told_apart(texts, [phrase(group.setting, field) for group in groups])
    return _told_apart(texts, [group.name for group in groups])


def _told_apart(texts: Sequence[str], further: Sequence[str]) -> list[str]:
    """`further` added to those equal texts that it differs for."""
    kinds: dict[str, set[str]] = {}
    for text, more in zip(texts, further, strict=True):
        kinds.setdefault(text, set()).add(more)
    return [f"{text}, {more}" if len(kinds[text]) > 1 else text for text, more in zip(texts, further, strict=True)]


def shared(groups: Sequence[Group], without: Sequence[str] = ()) -> str:
    """What all groups have in common, fields that no run names left out."""
    words = []
    for field in (field for field in SHARED if field not in without):
        values = {getattr(group.setting, field) for group in groups}
        if len(values) == 1 and values != {None}:
            words.append(phrase(groups[0].setting, field))
    return ", ".join(words)


def seeds(numbers: Sequence[int]) -> str:
    """ "seed 1", "seeds 1-3"; "" without any."""
    return f"seed{'s' if len(numbers) > 1 else ''} {spans(numbers)}" if numbers else ""


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers, neighbours drawn together: 0-3, 7."""
    runs = []
    for _, members in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in members]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ", ".join(runs)


def describe_faults(faults: Faults) -> str:
    """In words, "" without any."""
    words = []
    for factor in sorted({factor for factor in faults.slow.values() if factor != 1}):
        slow = [learner for learner, slowed in faults.slow.items() if slowed == factor]
        words.append(f"learner{'s' if len(slow) > 1 else ''} {spans(slow)} slowed {factor:g}x")
    for crash in faults.crashes:
        back = "" if crash.restart_after is None else f", back after {crash.restart_after:g} s"
        words.append(f"learner {crash.learner} killed at {crash.at:g} s{back}")
    if faults.late_share and faults.late_seconds:
        words.append(f"{100 * faults.late_share:g} % of letters late by {faults.late_seconds:g} s")
    if faults.lost_share:
        words.append(f"{100 * faults.lost_share:g} % of letters lost")
    return "; ".join(words)


def duration(seconds: float | None) -> str:
    """With its unit: 0.123 s, 45.6 s, 12.3 min, 9.47 h."""
    if seconds is None:
        return "–"
    for unit_seconds, least, unit in ((3600, 3600, "h"), (60, 120, "min")):
        if seconds >= least:
            return f"{seconds / unit_seconds:.3g} {unit}"
    return f"{seconds:.3g} s"


def size(count: float | None) -> str:
    """Bytes with their unit, in powers of 1,000."""
    if count is None:
        return "–"
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.3g} {unit}"
    return f"{count:.0f} B"
