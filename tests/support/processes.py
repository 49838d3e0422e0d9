"""Processes that items of a map have run in."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def process_of(_: int) -> int:
    """Returns the process that an item runs in."""
    return os.getpid()


def ended(processes: Iterable[int]) -> bool:
    return not any(Path(f"/proc/{process}").exists() for process in processes)
