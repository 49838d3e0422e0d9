"""Section `training`: the same bits when a run is repeated, and when it is killed and started again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch

from asr_am.distributed.strategies.local import Local
from asr_am.train.run_setup import StrategyFactory
from asr_am.train.trainer import train
from scripts.gpu_check.check import Check, in_process
from scripts.gpu_check.examples import small_examples, small_options
from scripts.gpu_check.killing import killed_in_step


def section(check: Check) -> None:
    egs = small_examples(check)
    for precision in ("bfloat16",) if check.small else ("float32", "bfloat16"):
        options = small_options(check, precision=precision)

        def run(name: str, strategy: StrategyFactory = Local, options: Any = options) -> int | None:
            out = check.folder / f"{options.precision}-{name}"
            return in_process(lambda: train(egs, out, options, strategy=strategy))

        folders = [check.folder / f"{precision}-{name}" for name in ("first", "again", "resumed")]
        ended = [run("first"), run("again"), run("resumed", killed_in_step(Local, folders[2]))]
        had_checkpoint = (folders[2] / "checkpoints").exists() and not (folders[2] / "summary.json").exists()
        ended.append(run("resumed"))
        if ended != [0, 0, -signal.SIGKILL, 0] or not had_checkpoint:
            check.row(f"{precision}: runs end", False, f"exit statuses {ended}")
            continue
        first, again, resumed = (final_state(folder) for folder in folders)
        for name, other in (("repeated", again), ("killed and resumed", resumed)):
            same = equal(first, other)
            check.row(f"{precision}, {name}", same, "same bits" if same else "other bits")


def final_state(out: Path) -> dict[str, Any]:
    """Returns the weights and the optimizer's state at the end of a run."""
    newest = max(path for path in (out / "checkpoints").iterdir() if not path.name.startswith("."))
    return torch.load(newest / "learner-0.pt", weights_only=True, map_location="cpu")["strategy"]


def equal(a: Any, b: Any) -> bool:
    """Returns True if two nested states have the same bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, list | tuple) else a == b
