"""Checkpoints of a run in progress: complete, so that a killed run goes on with the same bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from asr_am.errors import InputError
from asr_am.model.checkpoint import read_torch, write_torch

log = logging.getLogger(__name__)

FORMAT = "asr_am training checkpoint 1"
KEPT = 2


class Checkpoints:
    """The directory `checkpoints/` of a run; file names count batches. The last two are kept."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.directory, self.fingerprint = directory, fingerprint
        directory.mkdir(parents=True, exist_ok=True)

    def paths(self) -> list[Path]:
        """From the oldest to the newest."""
        return sorted(self.directory.glob("checkpoint-*.pt"))

    def save(self, batches: int, state: dict[str, Any]) -> None:
        """Write the state after `batches` batches of the run."""
        value = {"format": FORMAT, "fingerprint": self.fingerprint, **state}
        write_torch(value, self.directory / f"checkpoint-{batches:09d}.pt")
        for old in self.paths()[:-KEPT]:
            old.unlink()

    def load(self) -> dict[str, Any] | None:
        """The newest state, None where there is none. InputError where it is damaged or of other options."""
        paths = self.paths()
        if not paths:
            return None
        remedy = f"remove it to go on from the one before, or {self.directory} to start anew"
        state = read_torch(paths[-1], remedy)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise InputError(f"{paths[-1]}: is not a training checkpoint of this program; {remedy}")
        if state.get("fingerprint") != self.fingerprint:
            raise InputError(
                f"{paths[-1]}: belongs to a run with other options or examples; remove {self.directory} to start anew"
            )
        log.info("goes on from %s", paths[-1])
        return state

    def newest(self) -> str:
        """Name of the newest checkpoint, for messages."""
        paths = self.paths()
        return str(paths[-1]) if paths else "none"
