"""Composed cluster and workload configurations."""

from __future__ import annotations

from functools import cache
from typing import Any

from hydra import compose

from asr_am.stages.resolvers import composing
from asr_am.stages.sections import values


@cache
def config(*overrides: str) -> dict[str, Any]:
    with composing():
        cfg = compose("config", list(overrides))
    return {name: values(cfg[name]) for name in ("cluster", "workload", "strategy")}
