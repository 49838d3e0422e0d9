"""Tests that unlike runs are not compared, or that the labels say what differs, and the rule of verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from asr_am.data.ownership import mark_own_dir
from asr_am.report.compare import main
from asr_am.report.comparisons import MIN_SEGMENTS, MIN_WORDS, Versus, compare, verdict
from asr_am.report.results import Family, SystemScore, read_scores
from asr_am.report.runs import group_runs, read_training_runs
from asr_am.report.strategies import strategy_sections
from asr_am.report.write import write_report
from tests.support.report_files import SEGMENTS, write_distributed, write_run, write_score

CONFIG = {
    "features": {"name": "logmel", "kinds": {"mfcc": {"num_bins": 23}, "logmel": {"num_bins": 40}}},
    "align": {"system": "tri", "mono": {"gaussians": 800}, "tri": {"leaves": 300, "device": "cpu"}},
    "egs": {"chunk": 21, "dtype": "float16"},
    "speed_perturb": [],
    "corpus": {"name": "swb", "hours": 1, "lms": {"kn3": {"order": 3}}, "prepare": {"data_dir": None}},
    "model": {"name": "blstm", "cells": 128, "dropout": 0.0},
    "train": {"subset": 1.0, "init": None, "precision": "float32", "threads": 1, "batch_size": 64, "device": "cpu"},
    "schedule": {"base": 0.1, "anneal": 0.5},
    "strategy": {"name": "sync", "_target_": "asr_am.distributed.strategies.sync.Sync"},
    "launcher": {"name": "virtual"},
    "cluster": {"name": "ibm_a", "hosts": 4, "nic_latency": 2e-05, "faults": {"slow": {}}},
    "workload": {"name": "swb2000_lstm", "bytes": 165e6, "emulate": False},
}
DATA = [
    ("train.subset", 0.1), ("features.name", "lfbe64"), ("features.kinds.logmel.num_bins", 23),
    ("align.tri.leaves", 600), ("egs.chunk", 42), ("corpus.hours", 3), ("speed_perturb", [0.9, 1.1]),
]  # fmt: skip
METHOD = [
    ("model.cells", 24), ("model.dropout", 0.2), ("train.precision", "bfloat16"), ("train.init", "exp/start/best.pt"),
    ("schedule.anneal", 0.7),
]  # fmt: skip
NO_RESULT = {
    "train.threads": 8, "train.device": "cuda", "align.tri.device": "cuda", "corpus.lms.kn3.order": 2,
    "corpus.prepare.data_dir": "/data", "align.sat": {"leaves": 5}, "cluster.hosts": 16, "nj": 4,
}  # fmt: skip


def write_config(folder: Path, changes: dict[str, Any]) -> Path:
    """Writes the config.yaml of a run: CONFIG with `changes`, by dotted name."""
    config = json.loads(json.dumps(CONFIG))
    for option, value in changes.items():
        *sections, name = option.split(".")
        group = config
        for section in sections:
            group = group[section]
        group[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def write_done(folder: Path, date: str, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != ".done"}
    (folder / ".done").write_text(json.dumps({"key": "f00d", "files": files, "date": date, **more}))


def write_pair(corpus_dir: Path, changes: dict[str, Any], seconds: float = 4.0) -> list[Path]:
    """Writes a single learner, and four learners with other options."""
    one = write_distributed(corpus_dir, "local", 1, 8.0, [2.0, 1.0])
    four = write_distributed(corpus_dir, "sync", 4, seconds, [2.0, 1.1])
    return [write_config(one, {}), write_config(four, changes)]


def sections(corpus_dir: Path) -> str:
    out = corpus_dir / "figures"
    out.mkdir(exist_ok=True)
    return "\n".join(strategy_sections(read_training_runs(corpus_dir), read_scores(corpus_dir), out, "there/"))


@pytest.mark.parametrize(("option", "value"), DATA)
def test_runs_with_other_training_data_are_not_compared(tmp_path: Path, option: str, value: object) -> None:
    write_pair(tmp_path, {option: value})
    text = sections(tmp_path)
    assert "By strategy" not in text and " %" not in text.replace("0.0 %", "")
    (note,) = [line for line in text.splitlines() if line.startswith("Not compared")]
    assert option in note and "(local1-b64-s1)" in note and "(sync4-b64-s1)" in note and "train with equal" in note
    assert "Speed-up against sync with 4 learners" in text  # not against the single learner
    (heading,) = [line for line in text.splitlines() if line.startswith("### Speed") and option in line]
    assert "workload swb2000_lstm" in heading


@pytest.mark.parametrize(("option", "value"), METHOD)
def test_labels_have_the_options_that_differ(tmp_path: Path, option: str, value: object) -> None:
    write_pair(tmp_path, {option: value})
    text = sections(tmp_path)
    own = f"{option}={value}"
    before = {"model.cells": "model.cells=128", "train.precision": "train.precision=float32",
              "schedule.anneal": "schedule.anneal=0.5"}.get(option, f"no {option}")  # fmt: skip
    assert f"| local, 1 learner, {before} | 1 | 2 | 1.0000 | – |" in text
    assert f"| sync, 4 learners, {own} | 1 | 2 | 1.1000 | +10.00 % |" in text
    assert f"differences from local, 1 learner, {before} (" in text


def test_losses_of_different_criteria_are_not_compared(tmp_path: Path) -> None:
    options = [{}, {}, {"train.chain": {"leaky": 0.1}}, {"train.chain": {"leaky": 0.1}}]
    runs = [
        write_config(write_distributed(tmp_path, "sync", learners, 4.0, losses, name=f"{name}{learners}"), changes)
        for name, learners, losses, changes in zip(
            ["ce", "ce", "chain", "chain"], [1, 4] * 2, [[2.0], [2.2], [-0.2], [-0.1]], options, strict=True
        )
    ]
    assert main([*map(str, runs), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "COMPARE.md").read_text()
    assert text.count("### By strategy") == 2 and "| +10.00 % |" in text and "| -0.1000 | +0.1000 |" in text
    assert "| ce1-s1 | cross-entropy | sync |" in text and "| chain4-s1 | chain | sync |" in text
    assert text.count("### Speed") == 2 and text.count(", chain\n") == 2


def test_options_that_change_no_result_change_no_label(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", {})
    write_pair(tmp_path / "b", NO_RESULT)
    changed = sections(tmp_path / "b")
    assert sections(tmp_path / "a").replace(": a,", ": b,") == changed
    assert "| sync, 4 learners | 1 | 2 | 1.1000 | +10.00 % |" in changed


def test_options_that_are_missing_are_off(tmp_path: Path) -> None:
    one, _ = write_pair(tmp_path, {"train.masking": {"bands": 0, "streams": 3}, "train.accumulation": 1})
    config = yaml.safe_load((one / "config.yaml").read_text())
    del config["speed_perturb"], config["train"]["subset"], config["train"]["init"], config["model"]["dropout"]
    (one / "config.yaml").write_text(yaml.safe_dump(config))
    assert "| sync, 4 learners | 1 | 2 | 1.1000 | +10.00 % |" in sections(tmp_path)


def test_seeds_with_other_options_are_not_averaged(tmp_path: Path) -> None:
    for seed, subset in ((1, 0.05), (2, 0.1)):
        folder = write_distributed(tmp_path, "sync", 4, 4.0, [2.0, 1.0], seed=seed)
        write_config(folder, {"train.subset": subset})
    assert [group.seeds for group in group_runs(read_training_runs(tmp_path))] == [[1], [2]]


def test_each_seed_may_start_from_the_model_of_its_seed(tmp_path: Path) -> None:
    for seed in (1, 2):
        folder = write_distributed(tmp_path, "sync", 4, 4.0, [2.0, 1.0], seed=seed)
        write_config(folder, {"train.init": f"exp/swb/train/start-s{seed}/best.pt"})
    (group,) = group_runs(read_training_runs(tmp_path))
    assert group.seeds == [1, 2] and dict(group.config.method)["train.init"] == "exp/swb/train/start/best.pt"


def test_examples_that_were_made_again_are_other_data(tmp_path: Path) -> None:
    for folder, date in zip(write_pair(tmp_path, {}), ("2026-01-01", "2026-01-03"), strict=True):
        write_done(folder, date, inputs=["exp/x/egs/logmel-tri"], config={})
    assert "| sync, 4 learners | 1 | 2 | 1.1000 | +10.00 % |" in sections(tmp_path)
    write_done(tmp_path / "egs/logmel-tri", "2026-01-02")
    assert "By strategy" not in sections(tmp_path)
    assert "egs=current (sync4-b64-s1); egs=earlier (local1-b64-s1)" in sections(tmp_path)


def test_examples_that_were_made_again_from_the_same_sources_are_the_same(tmp_path: Path) -> None:
    """The record is that which stage train has written."""
    from asr_am.stages.target import Target

    egs, config = tmp_path / "egs/logmel-tri", {"train": {"subset": 1.0}}
    write_done(egs, "2026-01-01")
    Target(tmp_path / "made", [egs], config, lambda out: None).run()
    record = json.loads((tmp_path / "made/.done").read_text())
    same, other = write_pair(tmp_path, {})
    known = {name: record[name] for name in ("key", "sources", "inputs", "config")}
    write_done(same, "2026-01-02", **known)
    write_done(other, "2026-01-02", **known | {"key": "another", "sources": ["another"]})
    write_done(egs, "2026-01-03")
    assert "egs=current (local1-b64-s1); egs=earlier (sync4-b64-s1)" in sections(tmp_path)
    write_done(other, "2026-01-02", **known)
    assert "egs=" not in sections(tmp_path)


@pytest.mark.parametrize(
    ("more", "label"),
    [
        ({"cluster": "ibm_b"}, "cluster ibm_b"), ({"clock": "wall"}, "wall clock"),
        ({"faults": {"slow": {"0": 10}}}, "learner 0 slowed 10x"),
    ],
)  # fmt: skip
def test_labels_have_the_cluster_of_several_learners(tmp_path: Path, more: dict, label: str) -> None:
    write_distributed(tmp_path, "local", 1, 8.0, [2.0, 1.0])
    write_distributed(tmp_path, "sync", 4, 4.0, [2.0, 1.1])
    write_distributed(tmp_path, "adpsgd", 4, 4.0, [2.0, 1.2], **more)
    text = sections(tmp_path)
    assert f"| adpsgd, 4 learners, {label} | 1 | 2 | 1.2000 | +20.00 % |" in text
    assert "| local, 1 learner | 1 |" in text


def test_faults_that_all_groups_have_are_in_no_label(tmp_path: Path) -> None:
    for strategy in ("sync", "adpsgd"):
        write_distributed(tmp_path, strategy, 4, 4.0, [2.0, 1.1], faults={"slow": {"0": 10}})
    assert "| sync, 4 learners | 1 | 2 | 1.1000 | – |" in sections(tmp_path)


def test_an_option_of_the_cluster_is_in_labels_and_headings(tmp_path: Path) -> None:
    write_pair(tmp_path, {"cluster.nic_latency": 0.001})
    write_config(write_distributed(tmp_path, "adpsgd", 4, 4.0, [2.0, 1.2]), {})
    text = sections(tmp_path)
    assert "| sync, 4 learners, cluster.nic_latency=0.001 | 1 |" in text
    assert "workload swb2000_lstm, cluster.nic_latency=0.001" in text and text.count("### Speed") == 2


def test_batches_have_the_rate_and_the_schedule_in_their_labels(tmp_path: Path) -> None:
    for batch, anneal in ((64, 0.5), (640, 0.7)):
        folder = write_distributed(tmp_path, "sync", 4, 4.0, [2.0, 1.0], batch=batch, schedule={"base": batch / 64})
        write_config(folder, {"schedule.anneal": anneal})
    text = sections(tmp_path)
    assert "| batch 64, rate 1, schedule.anneal=0.5 |" in text and "| batch 640, rate 10, schedule.anneal=0.7 |" in text


def test_compare_refuses_runs_without_common_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_pair(tmp_path / "swb", {"train.subset": 0.05})
    assert main([*map(str, runs), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == (
        "asr_am.report.compare: no two runs have the same training data: train.subset=0.05 (sync4-b64-s1); "
        "train.subset=1 (local1-b64-s1); give runs with equal values\n"
    )
    assert not (tmp_path / "out").exists()


def test_compare_says_what_it_does_not_compare(tmp_path: Path) -> None:
    runs = write_pair(tmp_path / "swb", {})
    other = write_distributed(tmp_path / "swb", "adpsgd", 4, 4.0, [2.0, 1.2])
    runs.append(write_config(other, {"train.subset": 0.05}))
    (runs[0] / ".key").write_text("0123456789abcdef\n{}\n", encoding="utf-8")
    assert main([*map(str, runs), "--out", str(runs[0])]) == 1 and not (runs[0] / "COMPARE.md").exists()
    mark_own_dir(tmp_path / "exported", "asr_am.kaldi_export")
    assert main([*map(str, runs), "--out", str(tmp_path / "exported")]) == 1
    assert main([*map(str, runs), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/COMPARE.md").read_text()
    assert "train.subset=0.05 (adpsgd4-b64-s1); train.subset=1 (local1-b64-s1, sync4-b64-s1). To compare" in text
    assert "### By strategy: swb, blstm, sgd, batch 64, 2 epochs, train.subset=1" in text
    assert "| sync, 4 learners | 1 | 2 | 1.1000 | +10.00 % |" in text and "+20.00 %" not in text


def test_no_difference_between_scores_of_two_test_sets(tmp_path: Path) -> None:
    for name, strategy, learners in (("a", "local", 1), ("b", "sync", 4)):
        folder = write_distributed(tmp_path / name / "swb", strategy, learners, 4.0, [2.0, 1.0])
        score = write_score(tmp_path / name / "swb", folder.name, "kn3", [learners] * SEGMENTS, 1) / "wer.json"
        score.write_text(json.dumps(json.loads(score.read_text()) | {"reference": name}))
    runs = [str(folder) for folder in sorted(tmp_path.glob("*/swb/train/*"))]
    assert main([*runs, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/COMPARE.md").read_text()
    assert "| sync, 4 learners | kn3 | 1 | 40.00 | – | other test set | 40.00 | – | 40.00 | – |" in text


def versus(
    root: Path, words: int, seeds: tuple[list[int | None], list[int | None]], errors: tuple[int, int], segments: int
) -> Versus:
    """Compares two systems on `words` words, with the share of wrong words given in percent."""
    write_score(root, "x", "kn3", [1] * SEGMENTS)
    (score,) = read_scores(root)

    def family(name: str, numbers: list[int | None], percent: int) -> Family:
        each = [len(range(n, words, segments)) for n in range(segments)]
        counts = {str(n): (round(count * percent / 100), count) for n, count in enumerate(each)}
        scores: list[SystemScore] = [replace(score, seed=seed, segments=counts) for seed in numbers]
        return Family(name, "kn3", scores)

    return compare(family("b", seeds[1], errors[1]), family("a", seeds[0], errors[0]))


@pytest.mark.parametrize(
    ("words", "seeds", "errors", "expected"),
    [
        (MIN_WORDS, ([1, 2], [1, 2]), (20, 10), "better"),
        (MIN_WORDS, ([1, 2], [1, 2]), (10, 20), "worse"),
        (MIN_WORDS, ([1, 2], [1, 2]), (10, 10), "not significant"),
        (MIN_WORDS, ([None], [1, 2, 3]), (20, 10), "better"),  # a GMM has no seed
        (MIN_WORDS - 1, ([1, 2], [1, 2]), (20, 10), "too few words (4,999)"),
        (773, ([None], [1, 2, 3]), (20, 10), "too few words (773)"),
        (MIN_WORDS, ([None], [1]), (20, 10), "one seed"),
        (MIN_WORDS, ([1], [1, 2]), (20, 10), "one seed"),
        (MIN_WORDS, ([1, 2], [2, 2]), (20, 10), "one seed"),
        (773, ([1], [1]), (10, 10), "too few words (773), one seed"),
    ],
)
def test_a_verdict_needs_words_and_seeds(
    tmp_path: Path, words: int, seeds: tuple[list[int | None], list[int | None]], errors: tuple[int, int], expected: str
) -> None:
    pair = versus(tmp_path, words, seeds, errors, MIN_SEGMENTS)
    assert pair.outcome.difference.value == pytest.approx(errors[1] - errors[0], abs=0.5)
    assert verdict(pair) == expected


def test_a_verdict_needs_segments(tmp_path: Path) -> None:
    """Drawn from one segment, all samples are alike."""
    pair = versus(tmp_path, MIN_WORDS, ([1, 2], [1, 2]), (20, 19), 1)
    assert pair.outcome.significant and verdict(pair) == "too few segments (1)"


def test_tables_of_the_report_have_the_rule(tmp_path: Path) -> None:
    write_score(tmp_path, "tri", "kn3", [2] * SEGMENTS)
    write_score(tmp_path, "net-s1", "kn3", [1] * SEGMENTS, 1)
    write_report(tmp_path, tmp_path / "report", "x")
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| net | tri | kn3 | -10.00 [-10.00, -10.00] | 100.0 % | too few words (600), one seed |" in text
    assert "at least 5,000 words in 20 segments and there are at least 2 seeds of each system" in text


def test_the_report_groups_no_unlike_seeds_and_compares_no_shares_with_the_gmm(tmp_path: Path) -> None:
    write_score(tmp_path, "tri", "kn3", [3] * SEGMENTS)
    for seed, subset in ((1, 0.05), (2, 1.0), (3, 1.0)):
        write_config(write_run(tmp_path, f"net-s{seed}", seed, [1.0], epochs=3), {"train.subset": subset})
        write_score(tmp_path, f"net-s{seed}", "kn3", [2 if seed == 1 else 1] * SEGMENTS, seed)
    write_report(tmp_path, tmp_path / "report", "x")
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| net, train.subset=0.05 | **20.00** |" in text
    assert "| net, train.subset=1 | **10.00** (10.00, 10.00) |" in text
    assert "| net, train.subset=1 | tri | kn3 | -20.00 [" in text and "| net, train.subset=0.05 | tri |" not in text
    assert "training data differ from its: net, train.subset=0.05 (train.subset=0.05)." in text


def test_rescoring_is_compared_over_common_seeds(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_score(tmp_path, f"net-s{seed}", "kn3", [seed] * SEGMENTS, seed)
    write_score(tmp_path, "net-s2", "kn3+lstm", [1] * SEGMENTS, 2)
    record = tmp_path / "rescore/net-s2_kn3+lstm/rescore.json"
    record.parent.mkdir(parents=True)
    perplexities = {"perplexity": {"ngram": 3.0, "lstm": 2.0, "mixture": 1.0}}
    record.write_text(json.dumps({"weight": 0.5, "dev": perplexities, "test": perplexities}))
    write_report(tmp_path, tmp_path / "report", "x")
    assert "| net | kn3+lstm | kn3 | -10.00 [" in (tmp_path / "RESULTS.md").read_text()


def truncate(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove, "sync4-b64-s1: no such directory; give that of a run"),
        (lambda folder: (folder / "summary.json").unlink(), "sync4-b64-s1: has no summary.json"),
        (lambda folder: [(folder / name).unlink() for name in ("summary.json", ".done")], "s1: has no summary.json"),
        (truncate("summary.json", "{"), "sync4-b64-s1/summary.json: "),
        (truncate(".done", "{"), "sync4-b64-s1/.done: cannot be read"),
        (truncate(".done", "[]"), "sync4-b64-s1/.done: is no mapping"),
        (truncate(".done", "{}"), "sync4-b64-s1/.done: is not the record of a finished run"),
        (truncate("config.yaml", "model: {cells: 12}\n"), "sync4-b64-s1/config.yaml: is missing, or has another size"),
        (lambda folder: (folder / "config.yaml").unlink(), "sync4-b64-s1/config.yaml: is missing"),
    ],
)
def test_a_damaged_run_is_named_in_one_line(
    tmp_path: Path, damage: Callable[[Path], object], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, four = write_pair(tmp_path / "swb", {})
    write_done(four, "2026-01-01", inputs=["egs/logmel-tri"], config={})
    damage(four)
    assert main([str(one), str(four), "--out", str(tmp_path / "out")]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("asr_am.report.compare: ") and stderr.count("\n") == 1
    assert named in stderr and stderr.count(str(four)) == 1


@pytest.mark.parametrize(
    "content",
    ["a: [", "- 1", "", "\ta: b: c", "a: !!python/object/apply:os.system ['touch ran']", "a: \x00", "a: &a {b: *a}"],
)
def test_a_config_is_plain_yaml(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one, four = write_pair(tmp_path / "swb", {})
    (four / "config.yaml").write_text(content)
    assert main([str(one), str(four), "--out", str(tmp_path / "out")]) == 1
    stderr = capsys.readouterr().err
    assert f"{four}" in stderr and "config.yaml" in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()
