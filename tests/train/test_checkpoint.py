"""Who may write to the checkpoints of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asr_am.distributed.team import SingleProcess
from asr_am.errors import InputError
from asr_am.train import checkpoint
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.run_log import NoTracker
from asr_am.train.trainer import train
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS


def test_a_learner_whose_run_was_started_again_by_others_writes_nothing(tmp_path: Path) -> None:
    egs_dir, out = write_examples(tmp_path / "egs", frames_U=(60,) * 12), tmp_path / "run"
    seen: dict[str, bytes] = {}

    class TakenOver(NoTracker):
        """Has another launch claim the run at the first report of the second epoch."""

        def log(self, record: object, step: int) -> None:
            if isinstance(record, dict) and record.get("epoch") == 2 and not seen:
                Checkpoints(out / "checkpoints", "").open("another", claim=True)
                seen.update(contents(out))

    with pytest.raises(InputError, match="another start of this run writes here now"):
        train(egs_dir, out, replace(OPTIONS, report_every=2), tracker=TakenOver(), team=SingleProcess())
    assert seen and contents(out) == seen


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path: Path) -> None:
    killed = Checkpoints(tmp_path, "f")
    killed.save_learner(3, 0, {"weights": torch.ones(3)})
    killed.save_learner(9, 1, {"weights": torch.ones(3)})
    saved = Checkpoints(tmp_path, "f")
    for updates in (2, 5, 8):
        saved.save_learner(updates, 0, {"weights": torch.full((3,), float(updates))})
        saved.commit(updates, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000000005", "checkpoint-000000008", "checkpoint-000000009.partial",
    ]  # fmt: skip
    saved.save_learner(10, 0, {})
    saved.commit(10, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000000008", "checkpoint-000000010"]


def test_a_checkpoint_that_is_not_complete_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it writes the last file of a checkpoint."""
    checkpoints = Checkpoints(tmp_path, "options")
    for updates in (1, 2):
        checkpoints.save_learner(updates, 0, {})
        if updates == 2:
            monkeypatch.setattr(checkpoint, "write_torch", killed)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.commit(updates, {"updates": updates})
        else:
            checkpoints.commit(updates, {"updates": updates})
    state = checkpoints.load()
    assert state is not None and state["updates"] == 1


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
