"""Checkpoints of a run in progress: complete, so that a killed run goes on with the same bits.

A checkpoint is a directory: `run.pt`, where the run stands, and `learner-<rank>.pt`, each learner's weights, optimizer
and whatever else its strategy keeps. It gets its final name when every part is on the disk; the last two are kept.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from asr_am.errors import InputError
from asr_am.model.model_file import read_torch, write_torch

log = logging.getLogger(__name__)

FORMAT = "asr_am training checkpoint 2"
KEPT = 2


class Checkpoints:
    """The directory `checkpoints/` of a run; names count updates of the whole team."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.directory, self.fingerprint = directory, fingerprint
        directory.mkdir(parents=True, exist_ok=True)

    def paths(self) -> list[Path]:
        """Complete ones, from the oldest to the newest."""
        return sorted(path for path in self.directory.glob("checkpoint-*") if path.suffix != ".partial")

    def save_learner(self, updates: int, rank: int, state: dict[str, Any]) -> None:
        """One learner's part of the checkpoint after `updates` updates."""
        place = self._partial(updates)
        place.mkdir(exist_ok=True)
        write_torch(state, place / f"learner-{rank}.pt")

    def commit(self, updates: int, state: dict[str, Any]) -> None:
        """Finish a checkpoint of which all learners have saved their parts; by one learner only."""
        place = self._partial(updates)
        write_torch({"format": FORMAT, "fingerprint": self.fingerprint, **state}, place / "run.pt")
        final = place.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        place.rename(final)
        for old in self.paths()[:-KEPT]:
            shutil.rmtree(old)

    def load(self) -> dict[str, Any] | None:
        """Where the newest checkpoint's run stands, None where there is none.

        InputError where it is damaged, or of other options.
        """
        if not self.paths():
            return None
        newest = self.paths()[-1]
        state = read_torch(newest / "run.pt", self._remedy())
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise InputError(f"{newest}: is not a training checkpoint of this program; {self._remedy()}")
        if state.get("fingerprint") != self.fingerprint:
            raise InputError(
                f"{newest}: belongs to a run with other options, learners or examples; remove {self.directory} to "
                "start anew"
            )
        return state

    def load_learner(self, rank: int) -> dict[str, Any]:
        """The part in the newest checkpoint of a learner that lived when it was made."""
        return read_torch(self.paths()[-1] / f"learner-{rank}.pt", self._remedy())

    def newest(self) -> str:
        """Name of the newest checkpoint, for messages."""
        paths = self.paths()
        return str(paths[-1]) if paths else "none"

    def _partial(self, updates: int) -> Path:
        return self.directory / f"checkpoint-{updates:09d}.partial"

    def _remedy(self) -> str:
        return f"remove it to go on from the one before, or {self.directory} to start anew"
