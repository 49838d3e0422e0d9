"""The GPU check, rehearsed on a CPU, and its wheels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.__main__ import SECTIONS, main, run_section
from scripts.gpu_check.check import Check
from scripts.gpu_check.wheels import pins

ROOT = Path(__file__).parents[1]


def test_every_section_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but those that start processes, which import everything anew: test_processes.py has such teams."""
    names = [name for name in SECTIONS if name not in ("processes", "mpi", "messages")]
    command = ["gpu_check", "--device", "cpu", "--small", "--out", str(tmp_path / "out"), "--only", *names]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "out/gpu_check.json").read_text())
    assert ended.value.code == 0 and result["failed"] == 0, said
    assert list(result["seconds"]) == names
    assert {row["section"] for row in result["rows"] if row["passed"]} >= {"kernels", "training", "virtual", "decoding"}
    assert len(said.splitlines()) == len(result["rows"]) + 1 <= 70


def test_a_section_that_fails_or_hangs_costs_only_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(check: Check) -> None:
        check.row("first", True, "done")
        raise RuntimeError("no such kernel")

    def hangs(check: Check) -> None:
        subprocess.run(["sleep", "60"])

    monkeypatch.setitem(SECTIONS, "kernels", (fails, 50))
    monkeypatch.setitem(SECTIONS, "speed", (hangs, 50))
    failing, hanging = (Check(name, "cpu", True, tmp_path / name) for name in ("kernels", "speed"))
    run_section(failing, 50)
    run_section(hanging, 0.3)
    assert [(row["name"], row["passed"]) for row in failing.rows()] == [("first", True), ("ends", False)]
    assert failing.rows()[1]["found"] == "RuntimeError: no such kernel"
    assert [(row["passed"], row["found"]) for row in hanging.rows()] == [(False, "not within 0.3 s")]


def test_the_limits_leave_time_for_the_start() -> None:
    assert sum(limit for _, limit in SECTIONS.values()) <= 530


def test_missing_packages_are_named(tmp_path: Path) -> None:
    """In a Python that has nothing."""
    assert len(pins()) > 20
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts/gpu_check/wheels.py"), "install", "none", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "has no torch; name another Python" in done.stderr
