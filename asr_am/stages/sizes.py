"""What follows from the user's data: OmegaConf resolvers for conf/corpus files.

${hours_of:DATA_DIR}         hours of training speech that stage data wrote to DATA_DIR/corpus.json
${row_for_hours:ROWS,HOURS}  the first of ROWS whose `hours` is not exceeded
${beside:FILE,NAME}          the file NAME in the folder of FILE, null where there is none
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from asr_am.errors import InputError


def hours_of(data_dir: str) -> float:
    """0 before stage data has run: then every later stage asks for its data itself. InputError for a broken file."""
    path = Path(data_dir) / "corpus.json"
    if not path.exists():
        return 0.0
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["hours"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: does not tell the hours of speech; run stage 0 (data) again") from error


def row_for_hours(rows: Sequence[Mapping[str, float]], hours: float) -> Mapping[str, float]:
    """InputError where every row has fewer hours."""
    for row in rows:
        if hours <= row["hours"]:
            return row
    raise InputError(f"corpus.sizes: no row for {hours:g} hours of speech; add one with more hours")


def beside(file: str | None, name: str) -> str | None:
    """None without `file`, too."""
    path = Path(file).with_name(name) if file else None
    return str(path) if path and path.exists() else None


def register() -> None:
    """Make them known to OmegaConf; does nothing the second time."""
    OmegaConf.register_new_resolver("hours_of", hours_of, replace=True)
    OmegaConf.register_new_resolver("row_for_hours", row_for_hours, replace=True)
    OmegaConf.register_new_resolver("beside", beside, replace=True)
