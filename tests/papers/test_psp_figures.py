"""Figures of PSP-SGD on runs with known values."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.papers.psp_figures import draw_staleness, main
from asr_am.report.runs import group_runs, read_training_runs
from tests.support.report_files import write_distributed


def test_delays_and_errors_are_drawn_for_each_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write_distributed(
            tmp_path, "psp", 4, seconds, [3.0, 2.0 / c], name=f"psp-{c}",
            strategy_options={"servers": 4, "c": c, "b": b}, pull_latency={"0.12": 7, "4.1": 1},
        )
        for c, b, seconds in ((4, 1.0, 8.0), (3, 0.75, 4.0))
    ]  # fmt: skip
    out = tmp_path / "out"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.split() == [str(out / "error.png"), str(out / "pulls.png")]
    for name in ("error", "pulls"):
        assert "psp c=3 b=0.75" in (out / f"{name}.svg").read_text()


def test_of_several_rates_the_best_is_drawn(tmp_path: Path) -> None:
    for learners, rate, losses in ((2, 0.1, [3.0, 1.0]), (8, 0.02, [3.0, 1.1]), (8, 0.1, [40.0, 41.0])):
        name = f"r{rate}-{learners}"
        write_distributed(tmp_path, "ps_async", learners, 8.0, losses, name=name, schedule={"base": rate})
    groups = group_runs(read_training_runs(tmp_path))
    figure = draw_staleness(groups, ["ps_async"], "title")
    assert figure is not None
    assert [list(line.get_ydata()) for line in figure.axes[1].lines] == [[1.0, 1.1]]


def test_files_of_others_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_distributed(tmp_path, "psp", 4, 8.0, [3.0, 1.0])
    for folder, key in (("mine", None), ("output", "0123456789abcdef")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "error.png").write_text("mine")
        if key:
            (tmp_path / folder / ".key").write_text(f"{key}\n")
    for out, message in (
        ("mine", "not made by asr_am.papers.psp_figures"),
        ("output/new", "is the output of a stage"),
        ("mine/error.png", "File exists"),
    ):
        assert main([str(run), "--out", str(tmp_path / out)]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert main([str(tmp_path / "nobody"), "--out", str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists() and not (tmp_path / "output/new").exists()
    assert (tmp_path / "mine/error.png").read_text() == "mine"
