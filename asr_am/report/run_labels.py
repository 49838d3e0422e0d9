"""Labels and titles for groups of runs, from the fields of their configurations."""

from __future__ import annotations

from collections.abc import Sequence

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


def labels(groups: Sequence[RunGroup], fields: Sequence[str]) -> list[str]:
    """Labels each group by the values of `fields`, plus the first further fields that tell equal labels apart."""
    texts = [", ".join(phrase(group.config, field) for field in fields) for group in groups]
    for field in ("faults", *SHARED, "launcher"):
        if field not in fields:
            texts = _disambiguate(texts, [phrase(group.config, field) for group in groups])
    return _disambiguate(texts, [group.name for group in groups])


def _disambiguate(texts: Sequence[str], further: Sequence[str]) -> list[str]:
    """Appends `further` to equal texts for which it differs."""
    kinds: dict[str, set[str]] = {}
    for text, more in zip(texts, further, strict=True):
        kinds.setdefault(text, set()).add(more)
    return [f"{text}, {more}" if len(kinds[text]) > 1 else text for text, more in zip(texts, further, strict=True)]


def shared(groups: Sequence[RunGroup], without: Sequence[str] = ()) -> str:
    """Lists the known values that all groups have in common."""
    words = []
    for field in (field for field in SHARED if field not in without):
        values = {getattr(group.config, field) for group in groups}
        if len(values) == 1 and values != {None}:
            words.append(phrase(groups[0].config, field))
    return ", ".join(words)
