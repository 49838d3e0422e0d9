"""Tables of papers: runs that fail, are killed or finished, and the tables of conf/experiment."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.options import build
from asr_am.papers.cells import PaperTable, check_measures
from asr_am.papers.members import MEASURES, WORK, Member, ParallaxWork, plain_name, recipe, train
from asr_am.papers.table import check_fitted, experiment_of, fitted, members, read_table, refuse_equal_names
from asr_am.parallax.config import Config
from asr_am.parallax.throughput import SizedModel
from asr_am.stages.option_checks import compose_job
from asr_am.stages.recipe_files import ROOT
from asr_am.stages.resolvers import composing
from asr_am.stages.sections import values
from tests.support.configurations import config
from tests.support.report_files import write_run, write_score
from tests.support.toy_stage import ENVIRONMENT

EXPERIMENTS = ROOT / "conf/experiment"
TABLES = [
    str(path.relative_to(EXPERIMENTS).with_suffix(""))
    for path in sorted(EXPERIMENTS.rglob("*.yaml"))
    if "\ntable:" in path.read_text()
]
TOY = """
# @package _global_
defaults: [{override /cluster: ibm_a}, {override /workload: swb2000_lstm}]
learners: 16
table:
  title: A toy
  member: epoch
  within: 1.05
  work: {steps: 3, epoch_steps: 13393}
  cells:
    sync: {options: [strategy=sync, strategy.form=weights], published: {hours: 1.09}, fits: ibm_a.all_reduce_efficiency}
    odd one: {options: [strategy=adpsgd, learners=LEARNERS], published: {hours: HOURS}}
    hybrid: {options: [strategy=hybrid], published: {hours: 0.8}, judged: false}
"""


def run(folder: Path, learners: int, hours: float) -> subprocess.CompletedProcess[str]:
    """Runs the table in a process of its own."""
    experiment = folder / "conf/experiment/papers/toy.yaml"
    experiment.parent.mkdir(parents=True, exist_ok=True)
    experiment.write_text(TOY.replace("LEARNERS", str(learners)).replace("HOURS", str(hours)))
    return run_stage(f"hydra.searchpath=[file://{folder / 'conf'}]", "+experiment=papers/toy", f"exp={folder}", "nj=2")


def run_stage(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asr_am.papers.table", *overrides]
    return subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, text=True, capture_output=True, check=False)


def test_a_failed_run_is_named_and_the_same_command_continues(tmp_path: Path) -> None:
    process = run(tmp_path, learners=3, hours=0.87)
    folder = tmp_path / "minicts/tables/toy"
    assert process.returncode == 1
    assert "1 of 3 runs failed: toy-odd-one-s1 (" in process.stderr and "an even number" in process.stderr
    assert "the same command continues" in process.stderr and "Traceback" not in process.stderr
    assert "| odd one | hours | 0.87 | – | – |  |" in process.stdout
    done = {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/.done")}
    assert set(done) == {"toy-sync-s1", "toy-hybrid-s1"}

    process = run(tmp_path, learners=4, hours=9.9)
    assert process.returncode == 1 and "not as published: odd one, hours: 1.0" in process.stderr
    assert {name: (folder / name / ".done").stat().st_mtime_ns for name in done} == done  # not run again
    record = json.loads((folder / "table.json").read_text())
    assert record["rows"][0]["ratio"] == pytest.approx(1.0, rel=0.05) and len(record["unmet"]) == 1
    assert len(record["fitted"]) == 3 and "2 of 3 independent cells are predictions" in process.stdout
    assert (folder / "table.md").read_text().startswith("### A toy\n")
    assert ">hours</text>" in (folder / "table.svg").read_text()


def test_mistakes_are_named_before_the_first_run() -> None:
    with pytest.raises(InputError, match=r"which table\? Give \+experiment=papers/NAME"):
        experiment_of(["nj=2"])
    with pytest.raises(InputError, match=r"conf/experiment/fusion.yaml has no section `table`"):
        read_table(config("+experiment=fusion"), "fusion")
    cells = {"a": {"fits": "ibm_a.nic_bandwidth"}, "b": {"work": {"stepps": 3}}}
    table = PaperTable.build({"title": "", "member": "epoch", "within": 1.1, "cells": cells})
    with pytest.raises(InputError, match=r"table.cells.a.fits=ibm_a.nic_bandwidth: is not marked as fitted"):
        check_fitted(table, ["ibm_a.overlap_speed"])
    wrong = {"title": "", "member": "train", "within": 1.1, "cells": {"a": {"published": {"wer_swb": 7.5}}}}
    with pytest.raises(InputError, match=r"table.cells.a: its runs have no wer_swb, only heldout_loss, .*trial"):
        members(PaperTable.build(wrong), config(), ["+experiment=papers/toy"])
    with pytest.raises(InputError, match=r"table.cells.a.work.steps: is missing"):
        members(table, config(), ["+experiment=papers/toy"])


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_valid(name: str) -> None:
    cfg = config(f"+experiment={name}")
    table = PaperTable.build(values(cfg.table))
    assert len({plain_name(cell) for cell in table.cells}) == len(table.cells)
    for name, cell in table.cells.items():
        check_measures(table, name, [*MEASURES[table.member], "wer_swb", "wer_ch", "wer_all"])
        work = build(WORK[table.member], {**table.work, **cell.work}, "work")
        if isinstance(work, ParallaxWork):
            build(SizedModel, work.model, "model")
            build(Config, work.parallax, "parallax")
    used = {option.removeprefix("cluster=") for cell in table.cells.values() for option in cell.options
            if option.startswith("cluster=")} | {cfg.cluster.name}  # fmt: skip
    workloads = {option.removeprefix("workload=") for cell in table.cells.values() for option in cell.options
                 if option.startswith("workload=")} | {cfg.workload.name}  # fmt: skip
    members = [
        Member("", table.member, Path(), {}, {"cluster": {"name": cluster}, "workload": {"name": workload}}, [], Path())
        for cluster in used
        for workload in workloads
    ]
    check_fitted(table, fitted({"all": members}))


def test_a_recipe_that_fails_ends_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no stage 99 .*out.log"):
        recipe("minicts", ["--stage", "99"], tmp_path / "out.log")
    with pytest.raises(InputError, match=r"recipes/nobody/run.sh does not exist"):
        recipe("nobody", [])


def test_the_trial_with_the_lowest_heldout_loss_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial whose training diverges does not count. Any other failure ends the cell."""
    losses: dict[str, float | str] = {"0.1": 2.0, "0.5": 1.5, "4": "the loss is nan in epoch 1; lower schedule.base"}

    def stages(member: Member, first: str, last: str, *overrides: str) -> None:
        *_, rate, run = member.overrides
        assert run == f"run={member.name}" and sum(word.startswith("run=") for word in member.overrides) == 1
        if first == "7":
            for lm, errors in (("kn3", 1), ("kn2", 2), ("kn3+lstm", 3), ("kn3.outdated", 4), ("zero", 5)):
                write_score(tmp_path, member.name, lm, [errors] * 60)
        elif isinstance(loss := losses[rate.partition("=")[2]], str):
            raise InputError(loss)
        else:
            write_run(tmp_path, member.name, 1, [2.5, loss])

    monkeypatch.setattr("asr_am.papers.members.stages", stages)

    def measures(*rates: str) -> dict[str, float]:
        work = {"score": True, "trials": [f"schedule.base={rate}" for rate in rates]}
        name = "cell" + "".join(rates)
        overrides = ["strategy=sync", "run=cell"]
        return train(Member(name, "train", tmp_path / name, work, {"lms": ["kn3"]}, overrides, tmp_path))[0]

    found = measures("0.1", "4", "0.5")
    assert found["trial"] == 3 and found["heldout_loss"] == 1.5 and found["wer_all"] == 10
    assert len(list(tmp_path.glob("score/cell0.140.5-schedule.base-0.5_*/wer.json"))) == 5
    with pytest.raises(InputError, match="diverges in each of 1 trials; try smaller rates"):
        measures("4")
    losses["4"] = "no space left (cell4-schedule.base-4_6.log)"
    with pytest.raises(InputError, match="no space left"):
        measures("4", "0.5")


def test_a_table_has_the_word_error_rates_of_one_lm() -> None:
    values = {"title": "", "member": "train", "within": 1.1, "work": {"score": True}, "cells": {"a": {}}}
    table, overrides = PaperTable.build(values), ["+experiment=sixteen", "corpus=an4"]
    with composing():
        cfg = compose_job(overrides)
        with pytest.raises(InputError, match=r"table.cells.a: lms is \[ug, kn2, kn3\].*, such as lms=\[kn3\]"):
            members(table, cfg, overrides)
        (member,) = members(table, cfg, [*overrides, "lms=[kn2]"])["a"]
    assert member.config["lms"] == ["kn2"]


@pytest.mark.parametrize(
    ("cells", "trials", "message"),
    [
        (["c=1", "c=-1"], [], "cell 'c=1', seed 1 and cell 'c=-1', seed 1 are both named t-c-1-s1"),
        (["a"], ["x=1", "y=1", "x=-1"], "cell 'a', seed 1, trial 1 x=1 and cell 'a', seed 1, trial 3 x=-1 are both"),
        (["a", "b", "a.1"], ["x=1", "x=2"], None),
    ],
)
def test_one_run_does_not_stand_for_two_cells(cells: list[str], trials: list[str], message: str | None) -> None:
    runs = {
        name: [Member(f"t-{plain_name(name)}-s1", "train", Path("t"), {"trials": trials}, {"seed": 1}, [], Path())]
        for name in cells
    }
    with pytest.raises(InputError, match=message) if message else nullcontext():
        refuse_equal_names(runs)
