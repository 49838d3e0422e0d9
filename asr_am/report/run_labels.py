"""Labels and titles for groups of runs, from the fields of their configurations."""

from __future__ import annotations

from collections.abc import Sequence

from asr_am.report.run_settings import describe, describe_data, differing
from asr_am.report.runs import RunConfig, RunGroup

SHARED = ("strategy", "learners", "model", "optimizer", "batch", "epochs", "clock", "cluster", "workload")


def phrase(config: RunConfig, field: str) -> str:
    """Formats the value of one field."""
    value = getattr(config, field)
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


def labels(groups: Sequence[RunGroup], fields: Sequence[str], complete: bool = False) -> list[str]:
    """Labels each group by the values of `fields`, plus the first further fields that tell equal labels apart.

    A complete label has everything else that differs between the groups and may change the accuracy.
    """
    texts = [", ".join(phrase(group.config, field) for field in fields) for group in groups]
    if complete:
        differences = _differences(groups, fields)
        texts = [", ".join([text, *differs]) for text, differs in zip(texts, differences, strict=True)]
    for field in ("faults", *SHARED, "launcher"):
        if field not in fields:
            texts = _disambiguate(texts, [phrase(group.config, field) for group in groups])
        if field == "faults" and complete and len({group.config.faults for group in groups}) > 1:
            texts = [
                f"{text}, {group.config.faults}" if group.config.faults not in text else text
                for text, group in zip(texts, groups, strict=True)
            ]
    return _disambiguate(texts, [group.name for group in groups])


def _differences(groups: Sequence[RunGroup], fields: Sequence[str]) -> list[list[str]]:
    """Lists the options of each group that differ between the groups.

    Clock, cluster and workload count between groups of several learners: they do not change what a single one learns.
    """
    methods = differing([group.config.method for group in groups])
    several = [group for group in groups if group.config.learners > 1]
    shown = [field for field in ("clock", "cluster", "workload") if field not in fields]
    shown = [field for field in shown if len({getattr(group.config, field) for group in several}) > 1]
    lists = []
    for group in groups:
        config = group.config
        words = describe(config.method, methods)
        if group in several:
            words += [phrase(config, field) for field in shown]
            words += _differing_hardware(config, several)
        lists.append(words)
    return lists


def _differing_hardware(config: RunConfig, groups: Sequence[RunGroup]) -> list[str]:
    """Lists the options of hardware that differ between groups on the same clock, with one cluster and one workload."""

    def kind(each: RunConfig) -> tuple[object, ...]:
        return each.clock, each.cluster, each.workload

    alike = [group.config.hardware for group in groups if kind(group.config) == kind(config)]
    return describe(config.hardware, differing(alike))


def _disambiguate(texts: Sequence[str], further: Sequence[str]) -> list[str]:
    """Appends `further` to equal texts for which it differs."""
    kinds: dict[str, set[str]] = {}
    for text, more in zip(texts, further, strict=True):
        kinds.setdefault(text, set()).add(more)
    return [f"{text}, {more}" if len(kinds[text]) > 1 else text for text, more in zip(texts, further, strict=True)]


def system_names(groups: Sequence[RunGroup]) -> dict[str, str]:
    """Names the system of each run: the name without the seed and, if groups of that name differ, how they do."""
    fields = (*SHARED, "rate", "launcher", "faults")
    names: dict[str, str] = {}
    for group in groups:
        alike = [other for other in groups if other.name == group.name]
        differ = [field for field in fields if len({getattr(other.config, field) for other in alike}) > 1]
        words = [phrase(group.config, field) for field in differ]
        words += [text] if (text := describe_data([other.config.data for other in alike])[group.config.data]) else []
        words += describe(group.config.method, differing([other.config.method for other in alike]))
        words += _differing_hardware(group.config, alike)
        names |= {run.name: ", ".join([group.name, *words]) for run in group.runs}
    return names


def shared(groups: Sequence[RunGroup], without: Sequence[str] = ()) -> str:
    """Lists the known values that all groups have in common."""
    words = []
    for field in (field for field in SHARED if field not in without):
        values = {getattr(group.config, field) for group in groups}
        if len(values) == 1 and values != {None}:
            words.append(phrase(groups[0].config, field))
    return ", ".join(words)
