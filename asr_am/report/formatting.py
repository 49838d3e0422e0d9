"""Text for faults, seeds, durations and sizes in titles, legends and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from asr_am.distributed.cluster_config import Faults


def seeds(numbers: Sequence[int]) -> str:
    """Formats seeds: "seed 1", "seeds 1-3", or "" for none."""
    return f"seed{'s' if len(numbers) > 1 else ''} {spans(numbers)}" if numbers else ""


def spans(numbers: Iterable[int]) -> str:
    """Formats integers with consecutive ones joined: 0-3, 7."""
    runs = []
    for _, members in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in members]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ", ".join(runs)


def describe_faults(faults: Faults) -> str:
    """Describes injected faults. Returns "" for none."""
    words = []
    for factor in sorted({factor for factor in faults.slow.values() if factor != 1}):
        slow = [learner for learner, slowed in faults.slow.items() if slowed == factor]
        words.append(f"learner{'s' if len(slow) > 1 else ''} {spans(slow)} slowed {factor:g}x")
    for crash in faults.crashes:
        back = "" if crash.restart_after is None else f", back after {crash.restart_after:g} s"
        words.append(f"learner {crash.learner} killed at {crash.at:g} s{back}")
    if faults.late_share and faults.late_seconds:
        words.append(f"{100 * faults.late_share:g} % of messages late by {faults.late_seconds:g} s")
    if faults.lost_share:
        words.append(f"{100 * faults.lost_share:g} % of messages lost")
    return "; ".join(words)


def finished(done: int, planned: int | None) -> str:
    """Formats a number of epochs: "3", or "3 of 16"."""
    return str(done) if planned in (done, None) else f"{done} of {planned}"


def duration(seconds: float | None) -> str:
    """Formats seconds with a suitable unit: 0.123 s, 45.6 s, 12.3 min, 9.47 h."""
    if seconds is None:
        return "–"
    for unit_seconds, least, unit in ((3600, 3600, "h"), (60, 120, "min")):
        if seconds >= least:
            return f"{seconds / unit_seconds:.3g} {unit}"
    return f"{seconds:.3g} s"


def size(count: float | None) -> str:
    """Formats a number of bytes in powers of 1,000."""
    if count is None:
        return "–"
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.3g} {unit}"
    return f"{count:.0f} B"
