"""Checkpoints of a training run, complete enough that a killed run continues bit for bit.

A checkpoint is a directory with `run.pt`, the progress of the run, and a `learner-<rank>.pt` per learner with its
weights, its optimizer and the rest of its strategy's state. Where replicas are equal, only the first learner's file has
weights and optimizer. After an epoch that is the best so far it has a `best.pt`.
It is written under a temporary name and renamed when all parts are on disk. The last two are kept. What the survivors
of a lost learner save (`survivors`) is in survivors-<updates>.<launch> until the next team has begun.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from asr_am import disk
from asr_am.distributed.leases import LossSums
from asr_am.errors import InputError
from asr_am.models.model_file import check_torch, read_torch, write_torch
from asr_am.train.leadership import Terms

log = logging.getLogger(__name__)

FORMAT = "asr_am training checkpoint 2"
KEPT = 2
BEST = "best.pt"
SURVIVORS = "survivors-"
OF_SURVIVORS = re.compile(SURVIVORS + r"\d{9}\.\w*")
COMPLETE = re.compile(r"checkpoint-\d{9}")  # copies that a user has made have other names


@dataclass
class TrainProgress:
    """Progress of a run: the same for all learners, and saved in every checkpoint under these names.

    Attributes:
        epoch: finished epochs.
        done: finished batches of the current epoch.
        updates: updates of the whole team.
        updates_before: updates of the whole team before the current epoch.
        frames: frames of the finished epochs.
        seconds: seconds of training, without validation.
        best_loss: lowest held-out loss.
        totals: fields of the `LossSums` of the finished segments of the current epoch.
        kept: bytes of metrics.jsonl and of leases.jsonl.
        history: the record of each finished epoch.
        seconds_per_epoch: seconds of each finished epoch.
        batches_per_learner: number of batches by rank.
        pace: updates that the next checkpoint is after, where checkpoints are made by time. 0 before the first one.
        teams: (updates, learners) of each team: updates before it began, and number of learners.
    """

    epoch: int = 0
    done: int = 0
    updates: int = 0
    updates_before: int = 0
    frames: float = 0.0
    seconds: float = 0.0
    best_loss: float = math.inf
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0])
    kept: list[int] = field(default_factory=lambda: [0, 0])
    history: list[dict[str, float]] = field(default_factory=list)
    seconds_per_epoch: list[float] = field(default_factory=list)
    batches_per_learner: dict[int, int] = field(default_factory=dict)
    pace: int = 0
    teams: list[list[int]] = field(default_factory=list)

    @property
    def learners(self) -> int:
        """Number of learners that the batches are divided among. 0 before the first team."""
        return self.teams[-1][1] if self.teams else 0

    def with_learners(self, learners: int) -> TrainProgress:
        """Returns the progress of a team with another number of learners, which share batches of the same total."""
        if learners == self.learners:
            return self
        done = self.done * learners // self.learners if self.teams else 0  # whole rounds
        teams = [team for team in self.teams if team[0] < self.updates]  # not one that has done nothing
        return replace(self, done=done, teams=[*teams, [self.updates, learners]])

    def after_epoch(
        self, validation: str | None, loss: float, error: float, consensus_distance: float
    ) -> TrainProgress:
        """Returns the progress after the current epoch, whose last segment is finished.

        Args:
            validation: see `trainable.Trainable`.
            loss: held-out loss. Without a validation, the training loss.
            error: held-out share of wrong frames.
            consensus_distance: distance of the learners from their consensus.
        """
        totals = LossSums(*self.totals)  # type: ignore[arg-type]
        record: dict[str, float] = {"epoch": self.epoch + 1}
        if validation is not None:
            record["heldout_loss"] = round(loss, 6)
        if validation == "frame error":
            record["heldout_frame_error"] = round(error, 6)
        elif validation == "perplexity":
            record["heldout_perplexity"] = round(math.exp(loss), 4)
        record["train_loss"] = round(totals.mean_loss, 6)
        if validation == "frame error":
            record["train_frame_accuracy"] = round(totals.accuracy, 6)
        record["consensus_distance"] = consensus_distance
        seconds = round(self.seconds - sum(self.seconds_per_epoch), 3)
        return replace(
            self, epoch=self.epoch + 1, done=0, updates_before=self.updates, frames=self.frames + totals.frames,
            best_loss=min(loss, self.best_loss), totals=list(astuple(LossSums())), history=[*self.history, record],
            seconds_per_epoch=[*self.seconds_per_epoch, seconds],
        )  # fmt: skip


def _aside(checkpoint: Path) -> Path:
    """Returns the first free name for a damaged checkpoint: `<name>.damaged`, `<name>.damaged2`, and so on."""
    names = (f"{checkpoint.name}.damaged{number}" for number in ("", *range(2, 10_000)))
    return next(path for path in map(checkpoint.with_name, names) if not path.exists())


class Checkpoints:
    """The checkpoints of one run. Their names count the updates of the whole team.

    Args:
        directory: `checkpoints/` of the run.
        fingerprint: digest of options, learners and examples. A checkpoint with another one is refused.

    Attributes:
        terms: who may write.
        on_disk: False for a run without files.
    """

    on_disk = True

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.directory, self.fingerprint = directory, fingerprint
        self.terms = Terms(directory)
        self._loaded: Path | None = None
        directory.parent.mkdir(parents=True, exist_ok=True)
        disk.make_dir(directory)

    def paths(self) -> list[Path]:
        """Returns the complete checkpoints, oldest first."""
        return sorted(path for path in self.directory.glob("checkpoint-*") if COMPLETE.fullmatch(path.name))

    def save_learner(self, updates: int, rank: int, state: dict[str, Any]) -> None:
        """Saves one learner's part of the checkpoint after `updates` updates."""
        self.terms.check()
        partial = self._partial(updates)
        disk.make_dir(partial)
        write_torch(state, partial / f"learner-{rank}.pt")

    def save_survivor(self, updates: int, rank: int, saved: dict[str, Any]) -> None:
        """Saves what a survivor has done since the checkpoint after `updates` updates (`survivors`)."""
        self.terms.check()
        folder = self.directory / f"{SURVIVORS}{updates:09d}.{self.terms.launch}"
        disk.make_dir(folder)
        write_torch({"format": FORMAT, "fingerprint": self.fingerprint, **saved}, folder / f"learner-{rank}.pt")

    def load_survivors(self) -> dict[int, dict[str, Any]]:
        """Returns, by rank, what survivors have saved since the newest checkpoint, those of the newest launch."""
        updates = self.paths()[-1].name.removeprefix("checkpoint-") if self.paths() else f"{0:09d}"
        folders = sorted(self.directory.glob(f"{SURVIVORS}{updates}.*"), key=lambda path: path.stat().st_mtime)
        found: dict[int, dict[str, Any]] = {}
        for path in folders[-1].glob("learner-*.pt") if folders else ():
            try:
                saved = read_torch(path, "the steps since the checkpoint are done again")
            except InputError as error:
                log.warning("%s", error)
                continue
            known = isinstance(saved, dict) and saved.get("format") == FORMAT
            if known and saved.get("fingerprint") == self.fingerprint:
                found[int(path.stem.removeprefix("learner-"))] = saved
        return dict(sorted(found.items()))

    def remove_survivors(self) -> None:
        """Removes what survivors have saved. Called by the leader."""
        for found in self.directory.glob(f"{SURVIVORS}*"):
            if OF_SURVIVORS.fullmatch(found.name):
                disk.remove_at_once(found)

    def best_model(self, updates: int) -> Path:
        """Returns where to save the best model so far, which becomes the run's best.pt with this checkpoint."""
        disk.make_dir(self._partial(updates))
        return self._partial(updates) / BEST

    def completed(self, updates: int) -> bool:
        """True if this launch has completed the checkpoint after `updates` updates: a leader that has died since."""
        final = self.directory / f"checkpoint-{updates:09d}"
        return final.exists() and not any(self.directory.glob(f"{final.name}.{self.terms.launch}.*"))

    def commit(self, updates: int, state: dict[str, Any]) -> None:
        """Completes a checkpoint. Called by the leader, after all have saved their parts.

        It takes the parts over from a leader that has died before it could complete them.
        """
        final = self.directory / f"checkpoint-{updates:09d}"
        own = self.directory / f"{final.name}.{self.terms.launch}.{self.terms.writer}partial"
        for found in self.directory.glob(f"{final.name}.{self.terms.launch}.*"):
            if found != own:
                disk.rename(found, own)
        write_torch({"format": FORMAT, "fingerprint": self.fingerprint, **state}, own / "run.pt")
        self.terms.check()
        if final.exists():
            disk.remove_at_once(final)
        disk.rename(own, final)
        disk.sync_dir(self.directory)
        unfinished = [path for path in self.directory.glob("checkpoint-*.partial") if path < own]
        for old in self.paths()[:-KEPT] + unfinished:  # a killed run left the unfinished ones
            disk.remove_at_once(old)

    def publish(self, out: Path) -> None:
        """Copies the best model to `out`, if it was found just before the newest checkpoint."""
        best = [path / BEST for path in self.paths()[-1:] if (path / BEST).exists()]
        if best:
            content = best[0].read_bytes()
            disk.replace(out / BEST, lambda file: file.write(content), self.terms.writer, self.terms.check)

    def set_damaged_aside(self) -> None:
        """Renames checkpoints that are newer than the newest intact one (`_aside`). Called by the leader.

        Raises:
            InputError: none is intact.
        """
        damaged: dict[Path, InputError] = {}
        for path in reversed(self.paths()):
            try:
                self._check(path, f"it is kept as {_aside(path).name}, and the checkpoint before it is taken")
                break
            except InputError as error:
                damaged[path] = error
        else:
            if damaged:
                self._check(next(iter(damaged)), self._remedy())
            return
        for path, problem in damaged.items():
            log.warning("%s", problem)
            disk.rename(path, _aside(path))

    def _check(self, path: Path, remedy: str) -> None:
        """Reads a checkpoint. Raises InputError with `remedy` if a file is missing or damaged."""
        state = read_torch(path / "run.pt", remedy)
        for rank in state["members"] if isinstance(state, dict) else ():
            check_torch(path / f"learner-{rank}.pt", remedy)
        if (path / BEST).exists():
            check_torch(path / BEST, remedy)

    def load(self) -> dict[str, Any] | None:
        """Returns `run.pt` of the newest checkpoint, or None if there is no checkpoint.

        Raises:
            InputError: the checkpoint is damaged or belongs to a run with other options.
        """
        if not self.paths():
            return None
        newest = self._loaded = self.paths()[-1]
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
        """Returns a learner's part of the checkpoint that `load` has read. The learner was alive when it was made."""
        assert self._loaded is not None
        return read_torch(self._loaded / f"learner-{rank}.pt", self._remedy())

    def newest(self) -> str:
        """Returns the path of the newest checkpoint for messages."""
        paths = self.paths()
        return str(paths[-1]) if paths else "none"

    def _partial(self, updates: int) -> Path:
        """Returns the directory of an unfinished checkpoint, which only this launch writes."""
        return self.directory / f"checkpoint-{updates:09d}.{self.terms.launch}.partial"

    def _remedy(self) -> str:
        return f"remove {self.directory} to start anew"
