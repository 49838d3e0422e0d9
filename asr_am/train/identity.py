"""The identity of a training run: which options decide its result, and which its speed only.

The key of stage train, checkpoints and the report all ask here. What a run is made from (examples, a model to start
from) are inputs of the stage, and part of its key as files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPEED_ONLY = ("device", "threads", "workers", "report_every", "checkpoint_every", "checkpoint_minutes")
"""Options of section `train` that change rounding at most. `train.init` is an input."""
MORE_OF_THE_SAME = ("epochs",)
"""Options of section `train` whose change continues a run from its checkpoint, through the API."""
TEAM = ("launcher", "learners")
"""Names in `run_identity` that may change while a run is unfinished: it continues from its checkpoint (`resume`)."""


def deciding(train: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of section `train` that decide the result."""
    return {name: value for name, value in train.items() if name not in SPEED_ONLY}


def launcher_identity(launcher: Mapping[str, Any], learners: int) -> dict[str, Any]:
    """Returns the options of a launcher of several learners that decide the result."""
    found = {"launcher": launcher["name"], "learners": learners}
    return found if launcher["wire"] == "float32" else found | {"wire": launcher["wire"]}


def run_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that decide the result of a training run.

    Args:
        config: the resolved configuration as plain values, with the schedule for the batch of this run.
    """
    found = {
        "train": {name: value for name, value in deciding(config["train"]).items() if name != "init"},
        **{name: config[name] for name in ("model", "schedule", "strategy", "seed")},
    }
    launcher = config["launcher"]["name"]
    if launcher == "alone":
        return found
    found |= launcher_identity(config["launcher"], config["learners"])
    if launcher == "virtual" or config["workload"].get("emulate"):
        return found | {"cluster": config["cluster"], "workload": config["workload"]}
    return found | {"faults": config["cluster"]["faults"]}
