"""Models and options of the Parallax tests."""

from __future__ import annotations

from asr_am.parallax import Config

CASES = {
    "on": ("adam", Config(clip_norm=0.3, servers=2)),
    "off": (
        "adam",
        Config(
            clip_norm=0.3, hybrid=False, local_aggregation=False, after_aggregation=False, gather_on_servers=False,
            servers=2,
        ),
    ),
    "all-gather": ("adam", Config(clip_norm=0.3, path="all-gather")),
}  # fmt: skip
