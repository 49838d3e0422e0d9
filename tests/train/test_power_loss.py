"""Loss of power at any moment: what was promised as durable is there, and what was not complete is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asr_am.distributed.simulator.scheduler import Scheduler
from asr_am.train.checkpoint import Checkpoints
from asr_am.train.run_log import JsonLines
from tests.support.sim_disk import SimDisk


def commits(out: Path, done: list[int]) -> None:
    """Completes checkpoints. `done` has those whose commit has returned, each with its number of log lines."""
    checkpoints = Checkpoints(out / "checkpoints", "f")
    checkpoints.terms.open("launch")
    checkpoints.terms.claim("0.0", lambda: None)
    log = JsonLines(out / "leases.jsonl", 0, checkpoints.terms.writer, checkpoints.terms.check)
    for updates in range(1, 7):
        checkpoints.save_learner(updates, 0, {"updates": updates, "weights": torch.full((500,), float(updates))})
        log.write({"updates": updates})
        checkpoints.commit(updates, {"updates": updates, "kept": log.sync()})
        done.append(updates)


def lose_power(out: Path, seed: int) -> tuple[int, int]:
    """Lets the power go at a random time. Returns the newest checkpoint that was promised, and that is there."""
    scheduler, rng, done = Scheduler(), random.Random(seed), list[int]()
    simulated = SimDisk(out, scheduler, rng)
    end = rng.uniform(0.0, 6.0)
    over: list[bool] = []
    scheduler.call_at(end, lambda: over.append(True))
    with simulated.installed():
        task = scheduler.spawn(lambda: commits(out, done), "leader", 0)
        scheduler.run(lambda: bool(over))
        if task.error is not None:
            raise task.error
        scheduler.kill_all()
        simulated.power_loss()
    state = Checkpoints(out / "checkpoints", "f").load()
    newest = 0 if state is None else state["updates"]
    if state is not None:
        loaded = Checkpoints(out / "checkpoints", "f")
        loaded.load()
        assert loaded.load_learner(0)["weights"].tolist() == [float(newest)] * 500
        lines = (out / "leases.jsonl").read_bytes()
        assert len(lines) >= state["kept"] and lines[: state["kept"]].count(b"\n") == newest
    return max(done, default=0), newest


def test_a_checkpoint_that_was_completed_survives(tmp_path: Path) -> None:
    seen = set()
    for seed in range(40):
        out = tmp_path / str(seed)
        out.mkdir()
        promised, newest = lose_power(out, seed)
        assert newest >= promised
        seen.add(promised)
    assert len(seen) > 3, "at several moments"


def unsynced_lines(lines: JsonLines) -> int:
    """A mutant."""
    return lines._size


@pytest.mark.parametrize(
    ("target", "name", "mutant"), [(SimDisk, "sync_dir", lambda self, path: None), (JsonLines, "sync", unsynced_lines)]
)
def test_without_a_sync_something_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: type, name: str, mutant: Callable[..., object]
) -> None:
    monkeypatch.setattr(target, name, mutant)
    with pytest.raises(AssertionError):
        test_a_checkpoint_that_was_completed_survives(tmp_path)
