"""The audit of a run's history accepts runs under faults, and finds what must not be."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asr_am.distributed.strategies.adpsgd import Adpsgd
from asr_am.distributed.strategies.ps_async import PsAsync
from asr_am.distributed.strategies.psp import Psp
from asr_am.distributed.strategies.sync import Sync
from asr_am.errors import InputError
from asr_am.train.audit import audit, check_records, main
from asr_am.train.run_setup import StrategyFactory
from tests.support.egs_examples import write_examples
from tests.support.toy_runs import OPTIONS, virtually

SERVED = partial(PsAsync, servers=2, timeout=2.0)


@pytest.fixture(scope="module")
def egs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("egs") / "egs", frames_U=(60,) * 12)


@pytest.fixture(scope="module")
def good(egs_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("good")
    virtually(egs_dir, out, SERVED)
    return out


@pytest.mark.parametrize("restart_after", [0.5, None])
@pytest.mark.parametrize(
    "strategy", [Adpsgd, SERVED, partial(Psp, servers=2, timeout=2.0)], ids=["adpsgd", "ps_async", "psp"]
)
def test_runs_under_faults_have_no_problem(
    egs_dir: Path, tmp_path: Path, strategy: StrategyFactory, restart_after: float | None
) -> None:
    """Learner 2 has a server. Then all die at once."""
    crashes = [{"learner": 2, "at": 9.3, "restart_after": restart_after}]
    crashes += [{"learner": rank, "at": 30.4, "restart_after": 0.5} for rank in (0, 1, 3)]
    summary = virtually(egs_dir, tmp_path, strategy, crashes=crashes, lost_share=0.05)
    history = audit(tmp_path)
    assert not history.problems and history.batches == sum(summary["batches_per_learner"].values()), str(history)


def test_a_synchronous_run_has_no_problem(egs_dir: Path, tmp_path: Path) -> None:
    virtually(egs_dir, tmp_path, Sync)
    assert not audit(tmp_path).problems


def test_each_start_of_the_command_counts_incarnations_anew(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "run")

    def restart(lines: list[dict[str, Any]], launches: tuple[str, str]) -> None:
        for line, launch, incarnation in zip(lines, launches, (1, 0), strict=False):
            line["launch"], line["incarnation"] = launch, [incarnation] * len(line["incarnation"])

    def check(*launches: str) -> list[str]:
        edit("leases.jsonl", lambda lines: restart(lines, (launches[0], launches[1])))(tmp_path / "run")
        problems = audit(tmp_path / "run").problems
        return [problem for problem in problems if "came back" in problem]

    assert check("a", "a") and not check("a", "b")


def test_checkpoints_that_were_set_aside_are_not_read(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "run")
    for name in ("checkpoint-000000001.damaged", "checkpoint-of-mine"):
        (tmp_path / "run/checkpoints" / name).mkdir()
    assert not audit(tmp_path / "run").problems


Change = Callable[[Path], None]


def edit(name: str, change: Callable[[list[dict[str, Any]]], object]) -> Change:
    """Returns a change of a file of JSON lines."""

    def apply(run: Path) -> None:
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        change(lines)
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return apply


def twice(run: Path) -> None:
    """A segment that was repeated after its checkpoint."""
    edit("leases.jsonl", lambda lines: lines.insert(3, lines[2]))(run)


def not_applied(lines: list[dict[str, Any]]) -> None:
    lines[1]["servers"][0]["missing"] = [lines[1]["batch"][3]]


def same_examples(lines: list[dict[str, Any]]) -> None:
    lines[2]["digest"][1] = lines[2]["digest"][0]


def epoch_again(lines: list[dict[str, Any]]) -> None:
    lines.insert(0, next(line for line in lines if "heldout_loss" in line))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (twice, "was to continue at batch"),
        (edit("leases.jsonl", lambda lines: lines.pop(1)), "epoch 1 was to continue at batch 16"),
        (edit("leases.jsonl", lambda lines: lines.pop()), "epoch 2 ends at round"),
        (edit("leases.jsonl", not_applied), "server 0 has not applied batch 19"),
        (edit("leases.jsonl", same_examples), "two batches have the same examples"),
        (edit("metrics.jsonl", epoch_again), r"has the epochs \[1, 1, 2\]"),
        (lambda run: (run / "checkpoints/checkpoint-000000099.partial").mkdir(), "partial was left"),
    ],
)
def test_it_finds(good: Path, tmp_path: Path, change: Change, said: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    change(run)
    assert any(re.search(said, problem) for problem in audit(run).problems), audit(run)


def test_the_command(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["audit", str(good)])
    assert main() == 0 and " batches, 0 deaths: no problem" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"the folder of a finished run\?"):
        audit(tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "leases.jsonl"])
def test_records_that_are_not_written_again_are_named(good: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(good, tmp_path / "run")
    check_records(tmp_path / "run")
    (tmp_path / "run" / name).write_text("")
    with pytest.raises(InputError, match=rf"run/{name}: .*; all epochs are done, so it is not .* and remove .*run$"):
        check_records(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "text"), [("summary.json", '{"a": 1}'), ("leases.jsonl", "[1]\n"), ("leases.jsonl", "{}\n")]
)
def test_files_of_something_else_are_named(good: Path, tmp_path: Path, name: str, text: str) -> None:
    shutil.copytree(good, tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(InputError, match=r"run: leases\.jsonl, .* not as a run writes it"):
        audit(tmp_path / "run")


def test_a_run_on_dev_has_no_held_out_losses(egs_dir: Path, tmp_path: Path) -> None:
    virtually(egs_dir, tmp_path, Sync, options=replace(OPTIONS, with_dev=True))
    assert not audit(tmp_path).problems


@pytest.mark.parametrize(("later", "problems"), [(0, 0), (1, 1)])
def test_incarnations_begin_again_when_the_command_is_started_again(
    good: Path, tmp_path: Path, later: int, problems: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)

    def change(lines: list[dict[str, Any]]) -> None:
        for number, line in enumerate(lines):
            line["incarnation"] = [2 if number == 0 else later for _ in line["incarnation"]]

    path = run / "leases.jsonl"
    edit("leases.jsonl", change)(run)
    assert path.stat().st_size == (good / "leases.jsonl").stat().st_size
    assert sum("came back" in problem for problem in audit(run).problems) >= problems
    assert problems or not audit(run).problems
