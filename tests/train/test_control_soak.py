"""A few seeds of the soak over the production control plane. `scripts/soak.sh --control` runs as many as you like."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.control_soak import UTTERANCES, Hang, Scenario, SoakReport, report_before, write_tables
from tests.support.egs_examples import write_examples


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=UTTERANCES)


@pytest.mark.parametrize(("name", "seed"), [("adpsgd", 0), ("ps_async", 26), ("psp", 0), ("sync", 0), ("hybrid", 47)])
def test_faults_of_everything_together(
    egs_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, seed: int
) -> None:
    with caplog.at_level(logging.CRITICAL, logger="asr_am"):
        scenario = Scenario(name, seed, egs_dir, tmp_path)
        scenario.run()
    assert not scenario.problems and scenario.faults, scenario.problems


def test_a_run_that_hangs_is_found(egs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents' messages are lost, so that the supervisor waits for them until the end of time."""
    monkeypatch.setattr("asr_am.distributed.node_agent.NodeAgent._join_supervisor", lambda agent: agent._clock.tick())
    monkeypatch.setattr("tests.support.control_soak.LIMIT", 50.0)
    with pytest.raises(Hang, match="supervisor waits for a message"):
        Scenario("sync", 0, egs_dir, tmp_path, faulty=False).run()


def test_a_row_of_the_tables_continues(tmp_path: Path) -> None:
    table, report = tmp_path / "table.md", SoakReport(worst=0.0125)
    scenario = Scenario("psp", 0, tmp_path, tmp_path, launches=2)
    scenario.faults.update({"disk full": 3, "message late": 70})
    scenario.history.batches, scenario.history.counts["dropped by a server"] = 54, 7
    report.add(scenario)
    report.add(scenario)
    for name in ("psp", "adpsgd"):
        write_tables(table, report, name)
    assert (
        report_before(table, "psp", 2) == report and report.counts["dropped"] == 14 and report.faults["disk full"] == 6
    )
    assert report_before(table, "psp", 1) == report_before(table, "sync", 0) == SoakReport()
