"""Who may write to the checkpoints of a run."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asr_am import disk
from asr_am.distributed.team import SingleProcess
from asr_am.errors import InputError
from asr_am.stages.target import Target
from asr_am.stages.train import MADE, OTHERS, SETTINGS
from asr_am.train import checkpoint
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.tracking import NoTracker
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
                another = Checkpoints(out / "checkpoints", "")
                another.terms.open("another")
                another.terms.claim("0.0", lambda: None)
                seen.update(contents(out))

    with pytest.raises(InputError, match="another start of this run writes here now"):
        train(egs_dir, out, replace(OPTIONS, report_every=2), tracker=TakenOver(), team=SingleProcess())
    assert seen and contents(out) == seen


def claimed(directory: Path, launch: str, leader: str = "0.0") -> Checkpoints:
    """Returns the checkpoints of a leader that may write."""
    checkpoints = Checkpoints(directory, "f")
    checkpoints.terms.open(launch)
    checkpoints.terms.claim(leader, lambda: None)
    return checkpoints


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".term-"))


def test_checkpoints_that_are_removed_meanwhile_end_the_run_and_nothing_else_goes(tmp_path: Path) -> None:
    egs_dir, out = write_examples(tmp_path / "egs", frames_U=(60,) * 12), tmp_path / "run"

    class Removed(NoTracker):
        """Removes the checkpoints in the second epoch, as a user who needs space."""

        def log(self, record: object, step: int) -> None:
            if isinstance(record, dict) and record.get("epoch") == 2 and (out / "checkpoints").exists():
                shutil.rmtree(out / "checkpoints")

    target = Target(
        out, [egs_dir], {}, lambda folder: train(egs_dir, folder, replace(OPTIONS, report_every=2), tracker=Removed()),
        in_place=True, makes=MADE, settings=(SETTINGS,), exclude=OTHERS,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"checkpoints: was removed while the run wrote there; start it again"):
        target.run()
    assert (out / "metrics.jsonl").stat().st_size > 0 and (out / "best.pt").exists()
    assert replace(
        target, build=lambda folder: train(egs_dir, folder, replace(OPTIONS, report_every=2))
    ).run()  # anew, in the same folder


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_run_that_ends_before_its_first_checkpoint_is_kept(tmp_path: Path, end: type[BaseException]) -> None:
    def build(folder: Path) -> None:
        (folder / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
        (folder / "checkpoints/survivors-000000000.1f").mkdir(parents=True)
        (folder / "checkpoints/survivors-000000000.1f/learner-0.pt").touch()
        raise end

    out = tmp_path / "run"
    with pytest.raises(end):
        Target(out, [], {}, build, in_place=True, makes=MADE, settings=(SETTINGS,), exclude=OTHERS).run()
    assert (out / "config.yaml").exists() and (out / ".key").exists()
    (tmp_path / "other").touch()
    target = Target(
        out, [tmp_path / "other"], {}, lambda folder: (folder / "best.pt").touch(), in_place=True, makes=MADE,
        settings=(SETTINGS,), exclude=OTHERS,
    )  # fmt: skip
    assert target.run(), "with other values: all in the folder is its own"


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path: Path) -> None:
    killed = claimed(tmp_path, "killed")
    killed.save_learner(3, 0, {"weights": torch.ones(3)})
    killed.save_learner(9, 1, {"weights": torch.ones(3)})
    saved = claimed(tmp_path, "saved")
    assert names(tmp_path) == []
    for updates in (2, 5, 8):
        saved.save_learner(updates, 0, {"weights": torch.full((3,), float(updates))})
        saved.commit(updates, {})
    assert names(tmp_path) == ["checkpoint-000000005", "checkpoint-000000008"]
    with pytest.raises(InputError, match="another start of this run"):
        killed.save_learner(10, 0, {})
    assert names(tmp_path) == ["checkpoint-000000005", "checkpoint-000000008"]


def outcome(folder: Path) -> list[object]:
    state = Checkpoints(folder / "checkpoints", "f").load()
    assert state is not None
    return [names(folder / "checkpoints"), state["members"], (folder / "best.pt").exists()]


@pytest.mark.parametrize("successor", ["another launch", "the launch"])
@pytest.mark.parametrize("step", ["write", "rename", "sync_dir"])
def test_a_leader_that_was_stopped_in_a_commit_changes_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, successor: str
) -> None:
    """It is stopped before each of its steps in turn. Meanwhile another leader completes the same checkpoint."""
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        stopped, calls, seen = claimed(folder / "checkpoints", "the launch"), 0, list[object]()
        stopped.save_learner(4, 0, {"weights": torch.zeros(3)})
        stopped.best_model(4).write_bytes(b"best")
        real = getattr(disk, step)

        def stop(*arguments: object) -> None:
            nonlocal calls
            calls += 1
            if calls - 1 == number:  # noqa: B023
                monkeypatch.setattr(disk, step, real)  # noqa: B023
                other = claimed(folder / "checkpoints", successor, "1.0")  # noqa: B023
                if successor != "the launch":  # else it takes over the part that is there
                    other.save_learner(4, 0, {"weights": torch.ones(3)})
                other.commit(4, {"members": [1]})
                other.publish(folder)  # noqa: B023
                seen[:] = outcome(folder)  # noqa: B023
            real(*arguments)  # noqa: B023

        monkeypatch.setattr(disk, step, stop)
        with suppress(InputError, OSError):
            stopped.commit(4, {"members": [0]})
            stopped.publish(folder)
        monkeypatch.setattr(disk, step, real)
        if not seen:
            assert number
            return
        claimed(folder / "checkpoints", "the next")
        assert outcome(folder) == seen
    raise AssertionError("it never came to an end")


def test_a_leader_that_was_replaced_while_it_was_stopped_does_not_claim(tmp_path: Path) -> None:
    late = Checkpoints(tmp_path, "f")
    late.terms.open("late")

    def replaced() -> None:
        """The answer comes, and then the learner is stopped and replaced."""
        claimed(tmp_path, "next").save_learner(1, 0, {})

    with pytest.raises(InputError, match="another start of this run"):
        late.terms.claim("0.0", replaced)
    with pytest.raises(InputError, match="another start of this run"):
        late.save_learner(1, 1, {})
    assert names(tmp_path) == ["checkpoint-000000001.next.partial"]


def test_learners_may_save_while_their_next_leader_claims(tmp_path: Path) -> None:
    """A restarted learner is the leader again: it replaces the term that the others are just reading."""
    follower = Checkpoints(tmp_path, "f")
    follower.terms.open("launch")
    claimed(tmp_path, "launch")
    ended = threading.Event()

    def lead_in_turn() -> None:
        for number in range(600):
            claimed(tmp_path, "launch", f"{number % 2}.{number}")
        ended.set()

    leaders = threading.Thread(target=lead_in_turn)
    leaders.start()
    while not ended.is_set():
        follower.terms.check()
    leaders.join()
    claimed(tmp_path, "another")
    with pytest.raises(InputError, match="another start of this run"):
        follower.terms.check()


def test_a_launch_does_not_come_back_after_a_later_one(tmp_path: Path) -> None:
    """Its launcher and its leader were killed. On another host its learners go on for a while."""
    follower, restarted = Checkpoints(tmp_path, "f"), Checkpoints(tmp_path, "f")
    follower.terms.open("first")
    claimed(tmp_path, "first")
    follower.terms.check()
    claimed(tmp_path, "first", "1.0")  # a new leader of the same launch
    claimed(tmp_path, "second")
    restarted.terms.open("first", rejoins=True)
    for late in (follower, restarted):
        with pytest.raises(InputError, match="another start of this run"):
            late.terms.claim("2.0", lambda: None)
    assert [term.read_text() for term in tmp_path.glob(".term-*")] == ["second 0.0\n"]


def test_a_checkpoint_that_is_not_complete_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it writes the last file of a checkpoint."""
    checkpoints = claimed(tmp_path, "launch")
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
