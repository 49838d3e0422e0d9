"""`Check`: what a section of the GPU check is given, and where its rows go."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One section.

    Attributes:
        device: cuda or cpu.
        small: small sizes, to rehearse.
    """

    section: str
    device: str
    small: bool
    folder: Path

    def row(self, name: str, passed: bool | None, found: str, **values: Any) -> None:
        """Adds a row. What a section has found is kept if its time runs out later.

        Args:
            passed: the result, None for a figure without a limit.
        """
        row = {"section": self.section, "name": name, "passed": passed, "found": found, **values}
        with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "rows.jsonl"
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    def synchronize(self) -> None:
        """Waits until the device has done all its work."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()


FORK = get_context("fork")  # imports are shared. CUDA starts in the child only


def in_process(work: Callable[[], None], limit: float | None = None) -> int | None:
    """Runs `work` in a forked process. Returns its exit status, None if it was killed after `limit` seconds."""
    process = FORK.Process(target=work)
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode
