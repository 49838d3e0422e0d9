"""Tests the sections about strategies, their tables and figures, and the command that compares runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asr_am.report import tables
from asr_am.report.compare import main
from asr_am.report.comparisons import single_learner
from asr_am.report.results import read_scores
from asr_am.report.run_labels import labels
from asr_am.report.runs import group_runs, read_training_run, read_training_runs
from asr_am.report.strategies import strategy_sections
from asr_am.report.write import write_report
from tests.support.report_files import SEGMENTS, write_distributed, write_run, write_score

HOUR = 3600.0
HALF = SEGMENTS // 2


def write_corpus(corpus: Path) -> None:
    """Writes two seeds of one learner and of two strategies with four, one strategy at another batch, one slowed
    learner.
    """
    for seed in (1, 2):
        write_distributed(corpus, "local", 1, 8 * HOUR, [2.0, 0.9 + seed / 10], seed=seed, clock="wall", cluster=None)
        write_distributed(corpus, "local", 1, 8 * HOUR, [2.0, 0.9 + seed / 10], seed=seed, name="virtual")
        write_distributed(
            corpus, "sync", 4, 4 * HOUR, [1.5, 1.05 + seed / 100], seed=seed,
            waiting_seconds=dict.fromkeys("0123", HOUR), bytes_sent=3e9, modelled_bytes=8e12,
        )  # fmt: skip
        write_distributed(
            corpus, "adpsgd", 4, 2 * HOUR, [2.5, 1.05], seed=seed,
            staleness={"0": 10, "1": 20, "7": 10} if seed == 1 else {"0": 30, "1": 10},
            consensus_distance=[9.0, 0.25 * seed],
        )  # fmt: skip
        errors = {"local1": [1] * SEGMENTS, "sync4": [1] * HALF + [2] * HALF, "adpsgd4": [2] * SEGMENTS}
        for name, counts in errors.items():
            write_score(corpus, f"{name}-b64-s{seed}", "kn3", counts, seed)
    write_distributed(corpus, "sync", 4, 40 * HOUR, [1.5, 1.05], faults={"slow": {"0": 10}}, name="slow")
    write_distributed(corpus, "sync", 4, 4 * HOUR, [3.0, 2.132], seed=2, batch=640)


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "exp" / "swb")
    return tmp_path / "exp" / "swb"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sections about that corpus, made once."""
    root = tmp_path_factory.mktemp("report")
    write_corpus(root / "swb")
    return sections(root / "swb", root / "out")


def sections(corpus_dir: Path, out: Path) -> str:
    out.mkdir()
    return "\n".join(strategy_sections(read_training_runs(corpus_dir), read_scores(corpus_dir), out, "there/"))


def test_loss_is_relative_to_the_single_learner(text: str) -> None:
    assert "### By strategy: swb, blstm, sgd, batch 64, 2 epochs" in text
    assert "| local, 1 learner, wall clock | 1-2 | 2 | 1.0500 | – | 1.0500 | – |" in text
    assert "| adpsgd, 4 learners | 1-2 | 2 | 1.0500 | +0.00 % | 1.0500 | +0.00 % |" in text
    assert "| sync, 4 learners, no faults | 1-2 | 2 | 1.0650 | +1.43 % | 1.0650 | +1.43 % |" in text
    # seed 1 only: 1.05 against the 1.0 of the single learner with that seed
    assert "| sync, 4 learners, learner 0 slowed 10x | 1 | 2 | 1.0500 | +5.00 % | 1.0500 | +5.00 % |" in text


def test_loss_by_batch_is_over_common_seeds(text: str) -> None:
    assert "### By batch size: swb, sync, 4 learners, blstm, sgd" in text
    assert "| batch 64 | 2 | 2 | 1.0700 | – | 1.0700 | – |" in text
    assert "| batch 640 | 2 | 2 | 2.1320 | +99.25 % | 2.1320 | +99.25 % |" in text


def test_word_errors_are_compared_in_pairs(text: str) -> None:
    assert "| runs | LM | seeds | all | difference [95 %] | verdict | swb | difference | ch | difference |" in text
    assert "| local, 1 learner, wall clock | kn3 | 1-2 | 10.00 | – | – | 10.00 | – | 10.00 | – |" in text
    (sync,) = re.findall(r"\| sync, 4 learners, no faults \| kn3 (.*) \|\n", text)
    seeds, wer, difference, verdict, *by_subset = sync.removeprefix("| ").split(" | ")
    assert (seeds, wer, verdict) == ("1-2", "15.00", "too few words (600)")
    assert by_subset == ["10.00", "+0.00", "20.00", "+10.00"]
    assert difference.startswith("+5.00 [+3.") and difference.endswith("]")
    assert (
        "| kn3 | 1-2 | 20.00 | +10.00 [+10.00, +10.00] | too few words (600) | 20.00 | +10.00 | 20.00 | +10.00 |"
        in text
    )


def test_speed_and_slow_downs(text: str) -> None:
    assert "### Speed: swb, blstm, batch 64, virtual clock, cluster ibm_a, workload swb2000_lstm" in text
    assert "Speed-up against local with 1 learner, 4 h per epoch." in text
    assert "| learners | faults | adpsgd: time per epoch | speed-up | sync: time per epoch | speed-up |" in text
    assert "| 4 | none | 1 h | 4.00 | 2 h | 2.00 |" in text and "| 1 | none |" not in text
    assert "| 4 | learner 0 slowed 10x | – | – | 20 h | 0.20 |" in text


def test_costs_as_measured(text: str) -> None:
    assert "| sync, 4 learners, no faults | 1-2 | 25.0 % | 1.5 GB | 4 TB | 0.00 | 0 | 0 |" in text
    assert "| adpsgd, 4 learners | 1-2 | 0.0 % | 0 B | 0 B | 1.25 | 7 | 0.375 |" in text
    assert "| local, 1 learner | 1-2 | 0.0 %" not in text  # a single learner never waits


def test_no_difference_between_runs_that_have_not_come_equally_far(tmp_path: Path) -> None:
    write_distributed(tmp_path, "local", 1, 8.0, [3.0, 1.0, 2.0], epochs=3)
    write_distributed(tmp_path, "sync", 4, 8.0, [3.0, 2.0], epochs=3)
    text = sections(tmp_path, tmp_path / "out")
    assert "| local, 1 learner | 1 | 3 | 1.0000 | – | 2.0000 | – |" in text
    assert "| sync, 4 learners | 1 | 2 of 3 | 2.0000 | – | 2.0000 | – |" in text


def test_runs_of_one_epoch_are_timings(tmp_path: Path) -> None:
    for learners in (2, 4):
        write_distributed(tmp_path, "sync", learners, 8 / learners, [3.0])
    text = sections(tmp_path, tmp_path / "out")
    assert "### Speed" in text and "By strategy" not in text
    assert "| 4 | none | 2 s | 2.00 |" in text


def test_untimed_runs_have_no_table_of_times(tmp_path: Path) -> None:
    write_distributed(tmp_path, "sync", 4, 0.0, [3.0])
    text = sections(tmp_path, tmp_path / "out")
    assert "### Speed" in text and "| learners | faults |" not in text
    assert "| sync, 4 learners | 1 | – | 0 B | 0 B | 0.00 | 0 | 0 |" in text


def test_every_figure_is_linked_and_there(corpus_dir: Path) -> None:
    (corpus_dir / "lm").mkdir()
    write_report(corpus_dir, corpus_dir / "report", "x")
    text = (corpus_dir / "RESULTS.md").read_text()
    linked = re.findall(r"^!\[[^\]]+\]\((report/[\w.-]+\.png)\)$", text, flags=re.MULTILINE)
    assert linked == [
        "report/wer.png", "report/heldout.png", "report/loss-by-strategy-b64.png", "report/loss-by-batch-sync-4.png",
        "report/speedup-ibm_a-b64.png", "report/batches-per-learner-4-ibm_a-b64.png",
        "report/batches-per-learner-4-ibm_a-b640.png",
    ]  # fmt: skip
    assert sorted(linked) == sorted(f"report/{path.name}" for path in (corpus_dir / "report").glob("*.png"))
    assert all((corpus_dir / name).read_bytes().startswith(b"\x89PNG") for name in linked)
    assert text.index("## Training") < text.index("## Strategies") < text.index("## Language models")


def test_equal_names_of_figures_are_told_apart(tmp_path: Path) -> None:
    for losses in ([3.0, 2.0], [3.0, 2.0, 1.5]):
        for strategy in ("sync", "hybrid"):
            write_distributed(tmp_path, strategy, 4, 1.0, losses, name=f"{strategy}-{len(losses)}")
    text = sections(tmp_path, tmp_path / "out")
    assert "there/loss-by-strategy-b64.png" in text and "there/loss-by-strategy-b64-2.png" in text
    assert (tmp_path / "out" / "loss-by-strategy-b64-2.png").exists()


def test_each_strategy_may_have_its_own_optimizer(tmp_path: Path) -> None:
    """Runs with different rates are labelled and compared with the better run of a single learner."""
    for momentum, loss in ((0.5, 1.0), (0.9, 1.25)):
        write_distributed(
            tmp_path, "local", 1, 1.0, [3.0, loss], optimizer="sgd", momentum=momentum, name=f"local-{momentum}"
        )
    write_distributed(tmp_path, "adpsgd", 4, 1.0, [3.0, 1.1], optimizer="sgd", momentum=0.9)
    text = sections(tmp_path, tmp_path / "out")
    assert text.count("### By strategy") == 1 and "differences from local, 1 learner, sgd, momentum 0.5 (" in text
    assert re.search(r"\| adpsgd, 4 learners[^|]* \| 1 \| 2 \| 1\.1000 \| \+10\.00 %", text)


def test_options_that_differ_tell_runs_with_one_strategy_apart(tmp_path: Path) -> None:
    """Each setting has its own accuracy, time and delays, as in table 1 of PSP-SGD."""
    for c, b, seconds in ((4, 1.0, 8.0), (3, 0.75, 4.0)):
        write_distributed(
            tmp_path, "psp", 4, seconds, [3.0, 2.0 / c], name=f"psp-{c}",
            strategy_options={"servers": 4, "c": c, "b": b}, pull_latency={"0.12": 7, "4.1": 1},
        )  # fmt: skip
    write_distributed(tmp_path, "sync", 4, 16.0, [3.0, 1.0], strategy_options={"form": "gradients"})
    text = sections(tmp_path, tmp_path / "out")
    assert "| psp c=3 b=0.75, 4 learners | 1 | 2 | 0.6667 |" in text
    assert "| psp c=4 b=1.0, 4 learners | 1 | 2 | 0.5000 |" in text and "servers" not in text
    assert "| learners | faults | psp c=3 b=0.75: time per epoch | speed-up | psp c=4 b=1.0: time per epoch |" in text
    assert "| sync, 4 learners | 1 | 2 | 1.0000 |" in text


def test_the_learning_rate_is_said_where_it_differs(tmp_path: Path) -> None:
    for learners, base in ((1, 0.5), (4, 0.02)):
        name = "local" if learners == 1 else "ps_async"
        write_distributed(tmp_path, name, learners, 8.0, [3.0, 1.0], schedule={"base": base})
    text = sections(tmp_path, tmp_path / "out")
    assert "| local, 1 learner, rate 0.5 | 1 |" in text and "| ps_async, 4 learners, rate 0.02 | 1 |" in text


def test_runs_across_folders(corpus_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_distributed(tmp_path / "new exp" / "swb", "sync", 4, 2 * HOUR, [1.5, 1.0])
    write_score(tmp_path / "new exp" / "swb", "sync4-b64-s1", "kn3", [3] * SEGMENTS, 1)
    runs = [corpus_dir / "train" / name for name in ("local1-b64-s1", "sync4-b64-s1", "sync4-b64-s1")]
    out = tmp_path / "compared"
    assert main([*map(str, runs), str(other), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'COMPARE.md'}\n"
    text = (out / "COMPARE.md").read_text()
    assert f"python -m asr_am.report.compare {runs[0]} " in text and f"'{other}'" in text
    assert text.count(f"| {runs[1]} | sync |") == 1 and text.count(f"| {other} | sync |") == 1
    assert f"| sync, 4 learners, {str(other)[:-3]} | 1 | 2 | 1.0000 | +0.00 % |" in text
    assert f"| sync, 4 learners, {str(runs[1])[:-3]} | kn3 | 1 | 15.00 | +5.00 [" in text
    assert f"| sync, 4 learners, {str(other)[:-3]} | kn3 | 1 | 30.00 | +20.00 [" in text
    assert (out / "heldout.png").exists() and (out / "loss-by-strategy-b64.png").exists()
    assert main([*map(str, runs), "--out", str(out)]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/COMPARE.md").write_text("mine")
    assert main([*map(str, runs), "--out", str(tmp_path / "mine")]) == 1
    assert (tmp_path / "mine/COMPARE.md").read_text() == "mine"


def test_a_run_whose_team_changed_has_no_time_of_an_epoch(corpus_dir: Path) -> None:
    teams = [{"updates": 0, "learners": 2}, {"updates": 9, "learners": 4}]
    folder = write_distributed(corpus_dir, "sync", 4, HOUR, [1.5, 1.0], name="grown", teams=teams)
    run = read_training_run(folder)
    assert run.epoch_seconds is None and "| grown-s1 | sync | 2, then 4 | 64 |" in tables.training([run])
    folder = write_distributed(corpus_dir, "sync", 4, HOUR, [1.5, 1.0], name="stopped", teams=[teams[1]] * 2)
    assert read_training_run(folder).epoch_seconds == HOUR / 2


def test_a_run_that_shrank_to_one_learner_is_no_baseline(corpus_dir: Path) -> None:
    teams = [{"updates": 0, "learners": 2}, {"updates": 9, "learners": 1}]
    shrunk = write_distributed(corpus_dir, "local", 1, HOUR, [1.5, 1.0], name="shrunk", teams=teams)
    alone = write_distributed(corpus_dir, "local", 1, HOUR, [1.5, 1.4], name="alone")
    groups = group_runs([read_training_run(shrunk), read_training_run(alone)])
    baseline = single_learner(groups)
    assert baseline is not None and baseline.name == "alone"
    texts = labels(groups, ["strategy", "learners"], complete=True)
    assert sorted(texts) == [
        "local, 1 learner, change of learners=2, then 1",
        "local, 1 learner, no change of learners",
    ]


def test_runs_of_two_corpora_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_distributed(tmp_path / "an4", "local", 1, 5.0, [2.0, 1.0])
    two = write_distributed(tmp_path / "swb", "sync", 4, 5.0, [2.0, 1.0])
    assert main([str(one), str(two), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == (
        "asr_am.report.compare: no two runs have the same training data: corpus an4 (local1-b64-s1); "
        "corpus swb (sync4-b64-s1); give runs with equal values\n"
    )
    three = write_distributed(tmp_path / "swb", "local", 1, 20.0, [2.0, 2.0])
    assert main([str(one), str(two), str(three), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "COMPARE.md").read_text()
    assert "| sync, 4 learners | 1 | 2 | 1.0000 | -50.00 % |" in text and "Not compared" not in text


@pytest.mark.parametrize("arguments", [[], ["--out", "x"], ["nowhere", "--out", "x"], ["a", "b"]])
def test_bad_arguments_end_in_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("asr_am.report.compare: ") and stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_directory_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "x-s1", 1, [1.0])
    (tmp_path / "out").write_text("a file")
    assert main([str(run), "--out", str(tmp_path / "out")]) == 1
    assert "give a path that can be written" in capsys.readouterr().err
