"""GTC, BMUF, HTM and the collectives of groups in four real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_am.distributed.runtime.launcher import launch
from asr_am.distributed.runtime.worker_process import free_port
from tests.support.forked_workers import ForkedPopen
from tests.support.synchronous_worker import PROBLEM, ROUNDED, STRATEGIES
from tests.support.toy_training import train

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


def command(scenario: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.support.synchronous_worker", scenario, str(folder)]


def left(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob(f"{name}.?.pt"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    launch(command("train", folder), 4, synchronous=True, env=ENVIRONMENT)
    return folder


@pytest.mark.parametrize("name", STRATEGIES)
def test_real_learners_are_virtual_ones(trained: Path, name: str) -> None:
    """Real and virtual learners have equal bits, except for means of more than two: gloo has its own order."""
    virtual = train(PROBLEM, STRATEGIES[name])
    for rank, found in enumerate(left(trained, name)):
        life = virtual[rank]
        if name == "bmuf":
            torch.testing.assert_close(found["replica"], life.replica, rtol=0.0, atol=1e-6)
        else:
            assert torch.equal(found["replica"], life.replica)
        assert found["sent"] == life.strategy.team.comm_stats.bytes_sent
    assert len(left(trained, name)) == 4


def test_real_learners_round_as_virtual_ones(tmp_path: Path) -> None:
    """With bfloat16 between learners, sums have the same order on both."""
    launch(command("rounded", tmp_path), 4, synchronous=True, env=ENVIRONMENT)
    for name, make in ROUNDED.items():
        virtual = train(PROBLEM, make, wire="bfloat16")
        learners = left(tmp_path, name)
        assert len(learners) == 4
        for rank, found in enumerate(learners):
            assert torch.equal(found["replica"], virtual[rank].replica), name
            assert found["sent"] == virtual[rank].strategy.team.comm_stats.bytes_sent, name


def test_super_learners_share_a_model_and_gossip(trained: Path) -> None:
    learners = left(trained, "super-learners")
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(learners[one]["replica"], learners[other]["replica"])
    assert learners[0]["metrics"]["exchanges"] > 0 and "exchanges" not in learners[1]["metrics"]
    assert learners[0]["loss"] < 1.0


def test_all_that_groups_can_do(tmp_path: Path) -> None:
    launch(command("collectives", tmp_path), 4, synchronous=True, env=ENVIRONMENT)
    for rank, found in enumerate(left(tmp_path, "collectives")):
        assert found["x"].tolist() == [1.0 if rank < 2 else 3.0] * 5
        assert found["numbers"].tolist() == ([0, 1] if rank < 2 else [2, 3])
        assert found["rows"].tolist() == [0, 0, 1, 0, 1, 2] and found["rows"].dtype == torch.int32
        assert found["y"].tolist() == [{0: 1.5, 3: 1.5}.get(rank, float(rank))] * 3 and found["z"].tolist() == [2.0] * 2


def test_all_groups_hear_of_a_lost_learner(tmp_path: Path) -> None:
    assert lose_learner_3("lost", tmp_path) == [{"lost": 3}] * 3


def test_half_a_gradient_is_not_applied(tmp_path: Path) -> None:
    expected = {"lost": 3, "step": 3, "same": True, "half": True}
    assert lose_learner_3("half", tmp_path) == [expected] * 3


def lose_learner_3(scenario: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Returns what the others left. None of them is ended by a launcher."""
    port = str(free_port("127.0.0.1"))
    learners = []
    for rank in range(4):
        own = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **ENVIRONMENT, **own}
        learners.append(ForkedPopen(command(scenario, tmp_path), env=environment, start_new_session=True))
    try:
        statuses = [learner.wait(120) for learner in learners]
    finally:
        for learner in learners:
            learner.kill()
    assert statuses == [1, 1, 1, -9]
    return left(tmp_path, scenario)
