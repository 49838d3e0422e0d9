"""`ProcessTeam` in real processes: the scenarios of worker_scenarios.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.worker_process import free_port

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


def command(scenario: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.support.worker_scenarios", scenario, str(folder)]


def left(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def test_learners_synchronous(tmp_path: Path) -> None:
    launch(command("synchronous", tmp_path), 3, synchronous=True, env=ENVIRONMENT, encrypt=True)
    found = left(tmp_path)
    assert list(found) == ["0.0", "1.0", "2.0"]
    for rank, values in enumerate(found.values()):
        assert values["mean"] == [1.0]
        assert values["rows"] == {str(r): [k + 1 / 3 for k in range(5 * r)] for r in range(3)}, "to the last bit"
        assert values["empty"] == [0, 0, 0] and values["average"] == [3.0] * 5
        assert values["alive"] == [0, 1, 2] and values["nothing"] and values["batches"] == 5
        comm_stats = values["comm_stats"]
        collectives, messages = round(4 / 3 * 400 * 4) + round(4 / 3 * 600 * 4), 5 * 4 * 300_003
        assert comm_stats["bytes_sent"] == {str((rank + 1) % 3): messages + collectives, str((rank + 2) % 3): messages}
        counts = {key: comm_stats[key] for key in ("messages_sent", "rejected", "lost", "overwritten")}
        assert counts == {"messages_sent": 10, "rejected": 0, "lost": 0, "overwritten": 0}
        assert comm_stats["waiting_seconds"] > 0.05


def test_learners_synchronous_without_a_supervisor_notice_a_death_themselves(tmp_path: Path) -> None:
    """Under torchrun or Slurm there is no supervisor."""
    port = str(free_port("127.0.0.1"))
    learners = []
    for rank in range(3):
        own = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **ENVIRONMENT, **own}
        learners.append(
            subprocess.Popen(command("lost_synchronous", tmp_path), env=environment, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [learner.communicate(timeout=120)[1] for learner in learners]
    finally:
        for learner in learners:
            learner.kill()
    assert [learner.returncode for learner in learners] == [1, -9, 1]
    for rank in (0, 2):
        notice = r"learner 1 died, or cannot be reached any more(?: by learner \d)?; start the same command again"
        assert re.search(notice, said[rank]), "found out by itself, or told by another that has"
        assert left(tmp_path)[f"{rank}.0"]["lost"] == 1


def test_learners_on_messages_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch(command("coordinated", tmp_path), 3, synchronous=False, env=ENVIRONMENT, restart_after=0.1)
    found = left(tmp_path)
    assert list(found) == ["0.0", "1.1", "2.0"], "learner 1 was killed once"
    assert "learner 1 on" in caplog.text and "SIGKILL" in caplog.text
    first, back = found["0.0"], found["1.1"]
    assert first["records"] == found["2.0"]["records"]
    assert back["records"] == first["records"][-len(back["records"]) :]
    assert [1, 0] in first["records"][0] and [1, 0] not in first["records"][1]
    assert [batch_owner[1] for batch_owner in first["released"][0]] == [1], "it died with one batch"
    living, mean = first["means"][1]
    assert living == [0, 1, 2] and mean == [1.0] * 4
    assert back["shared"], "a learner that was restarted maps memory"
    assert all(values["comm_stats"]["rejected"] == 0 for values in found.values())
