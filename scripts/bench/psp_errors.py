"""Compares errors of PSP-SGD (Table 1 of "Faster distributed synchronous SGD with weak synchronization", 2018) with
ours.

    python scripts/bench/psp_errors.py exp/an4/train

The paper has errors of ResNet-50 on CIFAR-10, we have held-out frame errors of runs with conf/experiment/psp.yaml.
Prints means over the seeds that all settings share, and ratios to the first setting, `sync`. Exits with 1 unless those
with c=28 are within 10 % of it and c=20 is the worst, as published.
"""

from __future__ import annotations

import sys
from pathlib import Path

import published
from published import Row

from asr_am.errors import InputError
from asr_am.report.results import mean
from asr_am.report.runs import TrainingRun, read_training_runs

TOLERANCE = 0.10
TABLE = {("32", "1.0"): 0.1479, ("28", "1.0"): 0.1609, ("28", "0.9"): 0.1565, ("20", "0.75"): 0.2914}


def by_setting(runs: list[TrainingRun]) -> dict[tuple[str, str], list[TrainingRun]]:
    """Groups the runs by (c, b) of the table, restricted to shared seeds."""
    found = {setting: [run for run in runs if setting_of(run) == setting] for setting in TABLE}
    seeds = set.intersection(*({run.seed for run in members} for members in found.values()))
    if not seeds:
        missing = [f"c={c} b={b}" for (c, b), members in found.items() if not members]
        raise InputError(f"no seed has a run of every setting (none at all: {', '.join(missing)}); train them first")
    return {setting: [run for run in members if run.seed in seeds] for setting, members in found.items()}


def setting_of(run: TrainingRun) -> tuple[str, str] | None:
    """Returns c and b. None for a run that does not belong: another strategy, without delays, or unfinished."""
    setting, options = run.config, dict(run.config.options)
    if (setting.strategy, setting.learners) != ("psp", 32) or not setting.faults or run.epochs_done != setting.epochs:
        return None
    return options.get("c", ""), options.get("b", "")


def error(runs: list[TrainingRun]) -> float:
    """Returns the mean error of the best epochs in percent."""
    return mean([run.frame_error_E[run.best_epoch - 1] for run in runs])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        found = by_setting(read_training_runs(Path(sys.argv[1]).parent))
    except InputError as problem:
        sys.exit(f"psp_errors.py: {problem}")
    errors = {setting: error(runs) for setting, runs in found.items()}
    first = next(iter(TABLE))
    rows = [Row(f"c={c} b={b}", TABLE[c, b] / TABLE[first], errors[c, b] / errors[first]) for c, b in TABLE]
    seeds = sorted(run.seed for run in found[first] if run.seed is not None)
    print(f"held-out frame errors, seeds {seeds}: {', '.join(f'{value:.2f} %' for value in errors.values())}")
    published.show("error, ratio", rows, 3)
    near = max(abs(row.ours - 1) for row in rows[1:3])
    last = rows[3].ours - max(row.ours for row in rows[:3])
    print(f"c=28 differ by {near:.1%} at most; c=20 is {last:+.1%} worse than the worst of the others")
    sys.exit(int(near > TOLERANCE or last <= 0))


if __name__ == "__main__":
    main()
