"""A few seeds of the soak over the production control plane. `python -m scripts.soak.control` runs a thousand."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.control_soak import UTTERANCES, Hang, Scenario
from tests.support.egs_examples import write_examples


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=UTTERANCES)


@pytest.mark.parametrize(("name", "seed"), [("adpsgd", 0), ("ps_async", 26), ("psp", 0), ("sync", 0), ("hybrid", 47)])
def test_faults_of_everything_together(
    egs_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, seed: int
) -> None:
    check(Scenario(name, seed, egs_dir, tmp_path), caplog)


def test_an_epoch_ends_while_a_server_is_dead(egs_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Learners have copies of two versions of its shard then."""
    check(Scenario("ps_async", 5, egs_dir, tmp_path, resizes=True), caplog)


def check(scenario: Scenario, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, logger="asr_am"):
        scenario.run()
    assert not scenario.problems and scenario.faults, scenario.problems


def test_a_run_that_hangs_is_found(egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents' messages are lost, so that the supervisor waits for them until the end of time."""
    monkeypatch.setattr("asr_am.distributed.node_agent.NodeAgent._join_supervisor", lambda agent: agent._clock.tick())
    monkeypatch.setattr("tests.support.control_soak.LIMIT", 50.0)
    with pytest.raises(Hang, match="supervisor waits for a message"):
        Scenario("sync", 0, egs_dir, tmp_path, faulty=False).run()
