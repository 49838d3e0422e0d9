"""Reads the records of stages and runs: JSON or YAML files with one mapping."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from asr_am.data.checksums import intact
from asr_am.errors import InputError


def read_record(
    path: Path, parse: Callable[[str], Any] = json.loads, remedy: str = "run the stage that writes it again"
) -> dict[str, Any]:
    """Reads a JSON object, or what else `parse` reads. Raises InputError if the file is missing, damaged or a list."""
    try:
        value = parse(intact(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; {remedy}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())}); {remedy}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: is no mapping of names to values; {remedy}")
    return value
