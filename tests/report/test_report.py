"""Tests the report on files as the stages write them: known counts in, correct numbers and pictures out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.report.comparisons import against_gmm
from asr_am.report.results import group_by_seed, read_coverage, read_scores, without_seed
from asr_am.report.runs import read_training_runs
from asr_am.report.write import write_report
from tests.support.report_files import SEGMENTS, write_run, write_score


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    corpus = tmp_path / "exp" / "tiny"
    for seed in (1, 2, 3):
        write_run(corpus, f"blstm-s{seed}", seed, [2.0, 1.25 + seed / 100, 1.5], epochs=5)
    for nth, lm in enumerate(("kn2", "kn3")):
        write_score(corpus, "mono", lm, [3 - nth] * SEGMENTS)
        write_score(corpus, "tri", lm, [2 - nth, 2] * (SEGMENTS // 2))
        for seed in (1, 2, 3):
            write_score(corpus, f"blstm-s{seed}", lm, [1, 1 if seed > 1 else 0] * (SEGMENTS // 2), seed)
    (corpus / "lm" / "kn2").mkdir(parents=True)
    lm_json = {
        "name": "kn2", "source": "train.txt", "ngrams": [10, 2000], "dev_perplexity": 20.125,
        "dev_words": 50, "dev_oov": 1,
    }  # fmt: skip
    (corpus / "lm" / "kn2" / "lm.json").write_text(json.dumps(lm_json))
    return corpus


def test_report(corpus_dir: Path) -> None:
    (corpus_dir / "train" / "blstm-s9").mkdir()  # still training
    (corpus_dir / "score" / "tri_kn9.partial").mkdir()  # still being scored
    write_report(corpus_dir, corpus_dir / "report", "recipes/tiny/run.sh")
    text = (corpus_dir / "RESULTS.md").read_text()
    assert "recipes/tiny/run.sh" in text
    assert "| mono | **30.00** | **20.00** |" in text
    assert "| blstm | **8.33** (5.00, 10.00, 10.00) | **8.33** (5.00, 10.00, 10.00) |" in text
    assert text.index("| mono |") < text.index("| tri |") < text.index("| blstm |")
    assert f"| tri_kn3 {3 * '| 15.00 [13.50, 16.50] '}| 90/0/0 | 600 | 9.87 | 12 | 0.5 | abc1234 |" in text
    assert (
        "| blstm-s2 | local | 1 | 256 | 3 of 5 | 2 | 1.2700 | 25.40 % | 12,346 | wall | 61.5 | f00d | abc1234 |" in text
    )
    assert "| blstm-s3 | local | 1 | 256 | 3 of 5 |" in text
    assert "| kn2 | train.txt | 10 + 2,000 | 20.1 | 1 of 50 |" in text
    assert "too few words (600)" in text and "s9" not in text and "kn9" not in text
    assert "Trained again" not in text
    assert "Strategies" not in text  # one learner, one batch: nothing to compare
    for name in ("wer.png", "heldout.png"):
        content = (corpus_dir / "report" / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
        assert f"(report/{name})" in text
    write_report(corpus_dir, corpus_dir / "report", "recipes/tiny/run.sh")
    assert (corpus_dir / "RESULTS.md").read_text() == text


def test_runs_that_were_trained_on_dev_are_not_listed_with_held_out_losses(corpus_dir: Path) -> None:
    folder = write_run(corpus_dir, "blstm-final-s2", 2, [1.0])
    (folder / "summary.json").write_text("{}")
    (folder / "config.yaml").write_text("train: {with_dev: true}")
    write_report(corpus_dir, corpus_dir / "report", "x")
    text = (corpus_dir / "RESULTS.md").read_text()
    assert "| blstm-final-s2" not in text and "Not listed: blstm-final-s2. These go on from runs of the table" in text


def test_a_run_that_was_trained_again_after_scoring_is_told(corpus_dir: Path) -> None:
    (corpus_dir / "train/blstm-s2/.done").write_text(json.dumps({"date": "2026-01-03T10:00:00", "files": {}}))
    write_report(corpus_dir, corpus_dir / "report", "x")
    record = "Trained again since they were scored: blstm-s2_kn2, blstm-s2_kn3. Run stages 7 to 9"
    assert record in (corpus_dir / "RESULTS.md").read_text()
    for run, used in (("blstm-s1_kn2", "decode/blstm-s2_kn2"), ("blstm-s2_kn2", "train/blstm-s2")):
        (corpus_dir / f"decode/{run}").mkdir(parents=True)
        (corpus_dir / f"decode/{run}/.done").write_text(json.dumps({"inputs": [f"exp/tiny/{used}"]}))
    write_report(corpus_dir, corpus_dir / "report", "x")
    assert "scored: blstm-s1_kn2, blstm-s2_kn2, blstm-s2_kn3. Run" in (corpus_dir / "RESULTS.md").read_text()


def test_results_of_the_network_before_sequence_training_are_told(corpus_dir: Path) -> None:
    (corpus_dir / "decode/blstm-s2_kn2").mkdir(parents=True)
    tried = [{"network": name, "errors": 3} for name in ("start-s2", "blstm-s2")]
    for chosen, told in (("start-s2", True), ("blstm-s2", False)):
        record = {"tried": tried, "chosen": {"network": chosen}}
        (corpus_dir / "decode/blstm-s2_kn2/decode.json").write_text(json.dumps(record))
        write_report(corpus_dir, corpus_dir / "report", "x")
        said = "blstm-s2_kn2 was decoded with the network of start-s2, which makes fewer errors on dev."
        assert (said in (corpus_dir / "RESULTS.md").read_text()) == told


def test_hybrids_are_compared_with_the_furthest_gmm_of_the_same_lm(corpus_dir: Path) -> None:
    pairs = against_gmm(group_by_seed(read_scores(corpus_dir)))
    assert [(pair.system.system, pair.baseline.system, pair.system.lm) for pair in pairs] == [
        ("blstm", "tri", "kn2"), ("blstm", "tri", "kn3"),
    ]  # fmt: skip
    assert [round(pair.outcome.difference.value, 2) for pair in pairs] == [-11.67, -6.67]
    assert all(pair.outcome.significant and pair.outcome.probability_b_better == 1.0 for pair in pairs)


def test_the_furthest_gmm_is_the_last_that_was_trained(tmp_path: Path) -> None:
    for system in ("net", "sat", "mono", "tri"):
        write_score(tmp_path, system, "kn2", [1, 3] * (SEGMENTS // 2))
    assert [pair.baseline.system for pair in against_gmm(group_by_seed(read_scores(tmp_path)))] == ["sat"]


def test_a_difference_within_the_interval_is_not_significant(tmp_path: Path) -> None:
    write_score(tmp_path, "tri", "kn2", [1, 3] * (SEGMENTS // 2))
    write_score(tmp_path, "net", "kn2", [3, 1] * (SEGMENTS // 2 - 1) + [3, 0])
    write_report(tmp_path, tmp_path / "report", "x")
    assert "| net | tri | kn2 | -0.17 [" in (tmp_path / "RESULTS.md").read_text()
    assert not against_gmm(group_by_seed(read_scores(tmp_path)))[0].outcome.significant


def test_seeds_in_names() -> None:
    assert without_seed("blstm-local-b256-s1", 1) == "blstm-local-b256"
    assert without_seed("blstm_seed12", 12) == "blstm"
    assert without_seed("blstm-s12", 2) == "blstm-s12"
    assert without_seed("tri", None) == "tri"


def test_without_training_or_subsets(tmp_path: Path) -> None:
    folder = write_score(tmp_path, "mono", "ug", [1] * SEGMENTS)
    content = json.loads((folder / "wer.json").read_text())
    (folder / "wer.json").write_text(json.dumps({k: v for k, v in content.items() if k not in ("swb", "ch")}))
    write_report(tmp_path, tmp_path / "report", "x")
    assert "Training" not in (tmp_path / "RESULTS.md").read_text()
    assert not (tmp_path / "report" / "heldout.png").exists()


def test_utterances_that_stage_data_left_out_are_told(tmp_path: Path) -> None:
    write_score(tmp_path, "mono", "ug", [1] * SEGMENTS)
    record = tmp_path / "data/corpus.json"
    record.parent.mkdir()
    lost = {"transcript without words": 12, "missing audio": 1}
    record.write_text(json.dumps({"utterances": {"test": 1412}, "left_out": {"test": lost, "train": {"x": 5}}}))
    write_report(tmp_path, tmp_path / "report", "x")
    text = (tmp_path / "RESULTS.md").read_text()
    line = "1,412 of 1,425 utterances; 13 left out (12 transcript without words, 1 missing audio)."
    assert text.index("## Word error rate") < text.index(line) < text.index("### all")
    for nothing_lost in ({"hours": 1.5}, {"utterances": {"test": 9}, "left_out": {"train": {"x": 5}}}):
        record.write_text(json.dumps(nothing_lost))
        assert read_coverage(tmp_path) is None
    record.write_text(json.dumps({"left_out": {"test": {"x": "many"}}}))
    with pytest.raises(InputError, match=r"corpus.json: .*run stage 0"):
        read_coverage(tmp_path)


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        change(content)
        path.write_text(json.dumps(content), encoding="utf-8")

    return damage


@pytest.mark.parametrize(
    "file", ["score/tri_kn2/wer.json", "score/tri_kn2/segments.json", "train/blstm-s1/summary.json", "lm/kn2/lm.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff{}", b"3"])
def test_broken_json_is_named(corpus_dir: Path, file: str, content: bytes) -> None:
    (corpus_dir / file).write_bytes(content)
    with pytest.raises(InputError, match=file):
        write_report(corpus_dir, corpus_dir / "report", "x")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("score/tri_kn2/wer.json", Path.unlink),
        ("score/tri_kn2/segments.json", Path.unlink),
        ("score/tri_kn2/wer.json", edit(lambda c: c.pop("dev_wer"))),
        ("score/tri_kn2/wer.json", edit(lambda c: c.pop("all"))),
        ("score/tri_kn2/wer.json", edit(lambda c: c["swb"].pop("interval"))),
        ("score/tri_kn2/wer.json", edit(lambda c: c.update(lm_weight="much"))),
        ("score/tri_kn2/wer.json", edit(lambda c: c["ch"].update(wer=float("nan")))),
        ("score/tri_kn2/wer.json", edit(lambda c: c["ch"].update(words=float("inf")))),
        ("score/tri_kn2/segments.json", edit(lambda c: c.update(seg001=[1]))),
        ("train/blstm-s1/summary.json", edit(lambda c: c.pop("heldout_loss"))),
        ("lm/kn2/lm.json", edit(lambda c: c.update(ngrams=7))),
        ("train/blstm-s1/summary.json", edit(lambda c: c["heldout_loss"].pop())),
    ],
)
def test_incomplete_results_are_named(corpus_dir: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(corpus_dir / file)
    with pytest.raises(InputError, match=file):
        write_report(corpus_dir, corpus_dir / "report", "x")


def test_runs_that_do_not_compare(corpus_dir: Path) -> None:
    edit(lambda c: c.pop("seg001"))(corpus_dir / "score/tri_kn2/segments.json")
    with pytest.raises(InputError, match="scored on other segments"):
        write_report(corpus_dir, corpus_dir / "report", "x")
    edit(lambda c: c.pop("ch"))(corpus_dir / "score/tri_kn2/wer.json")
    with pytest.raises(InputError, match="different subsets"):
        write_report(corpus_dir, corpus_dir / "report", "x")


def test_runs_scored_against_another_reference_are_named(corpus_dir: Path) -> None:
    """Stage 0 has made another test set with segments of the same names."""
    scores = sorted((corpus_dir / "score").iterdir())
    for number, folder in enumerate(scores[1:]):  # the first has no digest
        edit(lambda c, n=number: c.update(reference="a" if n else "b", date=f"2026-01-{n + 1:02}"))(folder / "wer.json")
    with pytest.raises(InputError, match=rf"{scores[1].name}: scored against another reference .*\(1 such\)"):
        write_report(corpus_dir, corpus_dir / "report", "x")
    edit(lambda c: c.update(reference="a"))(scores[1] / "wer.json")
    write_report(corpus_dir, corpus_dir / "report", "x")


def test_a_diverged_epoch_is_not_the_best(tmp_path: Path) -> None:
    write_run(tmp_path, "x-s1", 1, [float("nan"), 2.0, 1.0, float("nan")])
    (run,) = read_training_runs(tmp_path)
    assert run.best_epoch == 3


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run stage 9 \(score\) first"):
        write_report(tmp_path, tmp_path / "report", "x")
    assert read_training_runs(tmp_path) == []
