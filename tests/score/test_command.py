"""Tests the command line and its outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asr_am.score import Counts, Reference, score_files
from asr_am.score.__main__ import main
from asr_am.score.output import to_json, write_alignments
from asr_am.score.sctk import find_sctk, score_files_sctk

STM = """;; LABEL "F" "Female" "Female speakers"
;; LABEL "all" "Everything" "Clashes with a name of ours"
sw_1 A ann 0 2 <F,all> hello there (uh) world
sw_1 B bob 0 2 <all> yes
en_2 A cat 0 2 <f,all> I see
"""
CTM = "en_2 A 0 1 I\nen_2 A 1 1 saw\nsw_1 A 0 0.5 hello\nsw_1 A 1 0.5 world\nsw_1 B 0 1 yes\nsw_1 B 1 1 yes\n"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "ref.stm").write_text(STM)
    (tmp_path / "hyp.ctm").write_text(CTM)
    return ["--stm", str(tmp_path / "ref.stm"), "--ctm", str(tmp_path / "hyp.ctm")]


def test_table_json_and_alignments(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--json", str(tmp_path / "wer.json"), "--errors", str(tmp_path / "errors.txt")]) == 0
    rows = {line.split()[1]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("|")}
    assert rows["all"][3:5] == ["3", "7"]
    assert rows["all"][6:] == ["71.4", "14.3", "14.3", "14.3", "42.9", "100.0", "|"]
    assert list(rows) == ["speaker", "cat", "ann", "bob", "swb", "ch", "f", "label-all", "all"]
    result = json.loads((tmp_path / "wer.json").read_text())
    assert result["all"] == {
        "sentences": 3, "words": 7, "correct": 5, "substitutions": 1, "deletions": 1, "insertions": 1, "errors": 3,
        "sentence_errors": 3, "wer": pytest.approx(300 / 7),
    }  # fmt: skip
    assert (result["swb"]["words"], result["ch"]["words"], result["f"]["words"]) == (5, 2, 6)
    listing = (tmp_path / "errors.txt").read_text()
    assert "REF:  i SEE\nHYP:  i SAW\nEval:   S\n" in listing
    assert "     1  see -> saw" in listing and "INSERTIONS: 1 in all" in listing


def test_a_byte_order_mark_is_no_part_of_a_name(files: list[str], tmp_path: Path) -> None:
    for name, text in (("ref.stm", STM.partition("\n")[2].partition("\n")[2]), ("hyp.ctm", CTM)):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert main([*files, "--json", str(tmp_path / "wer.json")]) == 0
    assert json.loads((tmp_path / "wer.json").read_text())["all"]["errors"] == 3


@pytest.mark.skipif(find_sctk() is None, reason="NIST's sctk is not installed")
def test_a_byte_order_mark_does_not_reach_sctk(tmp_path: Path) -> None:
    (tmp_path / "ref.stm").write_text("f A s 0 1 one two\nf A s 1 2 three\n", encoding="utf-8-sig")
    (tmp_path / "hyp.ctm").write_text("f A 0 .4 one\nf A .5 .4 two\nf A 1.2 .4 three\n", encoding="utf-8-sig")
    head = ";; rules\n* name 'x'\n* format = 'NIST1'\n* max_nrules = '50'\n* case_sensitive = 'F'\n"
    rules = f"{head}ONE => 1 / [ ] __ [ ]\n"
    (tmp_path / "en.glm").write_text(rules, encoding="utf-8-sig")
    for glm in (None, tmp_path / "en.glm"):
        total = score_files_sctk(tmp_path / "ref.stm", tmp_path / "hyp.ctm", glm).total
        assert (total.words, total.errors) == (3, 0)


def test_subsets_by_prefix(files: list[str], tmp_path: Path) -> None:
    assert main([*files, "--subset", "first=SW_1", "--json", str(tmp_path / "wer.json")]) == 0
    result = json.loads((tmp_path / "wer.json").read_text())
    assert result["first"]["sentences"] == 2 and "swb" not in result


def test_prefixes_fold_no_letters_but_those_of_nist(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ref.stm").write_text("ÜN_1 A s 0 1 one\n", encoding="utf-8")
    (tmp_path / "hyp.ctm").write_text("ÜN_1 A 0 1 one\n", encoding="utf-8")
    score = Reference(tmp_path / "ref.stm", subsets={"u": "Ün_", "v": "other"}).score(tmp_path / "hyp.ctm")
    assert score.subset("u").sentences == 1 and score.subset("v").sentences == 0
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "the subset v is empty, as no file begins with other"
    ]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--subset", "nonsense"], "NAME=PREFIX"),
        (["--subset", "all=x"], "NAME=PREFIX"),
        (["--glm", "absent.glm"], "absent.glm"),
        (["--json", "/absent/folder/wer.json"], "/absent/folder"),
        (["--unknown"], "--unknown"),
        (["--ctm"], "--ctm"),
    ],
)
def test_bad_options_end_with_one_line(
    files: list[str], extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*files, *extra]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--errors"])
def test_inputs_are_not_replaced(files: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    stm = Path(files[files.index("--stm") + 1])
    before = stm.read_bytes()
    assert main([*files, option, str(stm)]) == 1 and "is read, so it would be replaced" in capsys.readouterr().err
    assert stm.read_bytes() == before


def test_results_are_not_written_into_each_other_or_an_output(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*files, "--json", str(tmp_path / "a"), "--errors", str(tmp_path / "a")]) == 1
    assert "give two files" in capsys.readouterr().err and not (tmp_path / "a").exists()
    (tmp_path / "output").mkdir()
    (tmp_path / "output/.key").write_text("0123456789abcdef\n{}")
    assert main([*files, "--json", str(tmp_path / "output/wer.json")]) == 1
    assert "is the output of a stage" in capsys.readouterr().err


def test_validation_refuses_what_hubscr_refuses(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*files, "--validate"]) == 0
    (tmp_path / "ref.stm").write_text(STM.replace("yes", "yes!"))
    assert main(files) == 0
    assert main([*files, "--validate"]) == 1
    assert "ref.stm:4: yes!" in capsys.readouterr().err


def test_command_imports_nothing_heavy(files: list[str]) -> None:
    run = "import sys, asr_am.score.__main__ as score; score.main(sys.argv[1:]); "
    code = run + "print(sorted({'torch', 'lhotse'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


@pytest.mark.skipif(find_sctk() is None, reason="NIST's sctk is not installed (Debian: apt-get install sctk)")
def test_sctk_counts_are_the_same(files: list[str], tmp_path: Path) -> None:
    for option in ("--sctk", "--no-sctk"):
        assert main([*files, option, "--json", str(tmp_path / f"{option}.json")]) == 0
    assert (tmp_path / "--sctk.json").read_text() == (tmp_path / "--no-sctk.json").read_text()


@pytest.mark.skipif(find_sctk() is None, reason="NIST's sctk is not installed (Debian: apt-get install sctk)")
def test_sctk_counts_are_the_same_with_windows_line_ends(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    rules = ";; rules\n* name 'some'\n* format = 'NIST1'\n* max_nrules = '9'\nI => YOU / [ ] __ [ ]\n"
    for name, text in (("ref.stm", STM), ("hyp.ctm", CTM), ("rules.glm", rules)):
        (folder / name).write_bytes(text.replace("\n", "\r\n").encode())
    files = ["--stm", str(folder / "ref.stm"), "--ctm", str(folder / "hyp.ctm"), "--glm", str(folder / "rules.glm")]
    for option in ("--sctk", "--no-sctk"):
        assert main([*files, option, "--json", str(tmp_path / f"{option}.json")]) == 0
    assert (tmp_path / "--sctk.json").read_text() == (tmp_path / "--no-sctk.json").read_text()


def test_a_folder_is_no_place_for_the_counts(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*files, "--json", str(tmp_path)]) == 1
    assert "is a directory" in capsys.readouterr().err


def test_a_reference_scores_many_hypotheses(tmp_path: Path) -> None:
    (tmp_path / "ref.stm").write_text(STM)
    (tmp_path / "hyp.ctm").write_text(CTM)
    (tmp_path / "empty.ctm").write_text("")
    reference = Reference(tmp_path / "ref.stm")
    first = reference.score(tmp_path / "hyp.ctm")
    assert reference.score(tmp_path / "empty.ctm").total.deletions == 6
    assert to_json(reference.score(tmp_path / "hyp.ctm")) == to_json(first)
    assert first.per_segment("swb") == ([1, 1], [4, 1])
    assert first.speakers("ch") == {"cat": Counts(1, 1, 1, 0, 0, 1)}


def test_long_segments_align_as_short_ones(tmp_path: Path) -> None:
    """Rows above 60 words are computed by NumPy: 90 optional words and fragments, skipped, spoken or wrong."""
    words = [f"w{i}" if i % 3 else f"(w{i})" if i % 2 else f"w{i}-" for i in range(90)]
    (tmp_path / "ref.stm").write_text(f"f A s 0 99 {' '.join(words)}\n")
    spoken = [f"w{i}x" if i % 11 else "other" for i in range(90) if i % 7]
    (tmp_path / "hyp.ctm").write_text("".join(f"f A {i} 1 {word}\n" for i, word in enumerate(spoken)))
    total = score_files(tmp_path / "ref.stm", tmp_path / "hyp.ctm").total
    assert total.words == 90 and total.correct > 10
    if find_sctk():
        from asr_am.score.sctk import score_files_sctk

        assert score_files_sctk(tmp_path / "ref.stm", tmp_path / "hyp.ctm").total == total


def test_letters_that_grow_in_capitals_keep_the_columns(tmp_path: Path) -> None:
    (tmp_path / "ref.stm").write_text("f A s 0 1 die straße\n", encoding="utf-8")
    (tmp_path / "hyp.ctm").write_text("f A 0 1 die\n", encoding="utf-8")
    write_alignments(score_files(tmp_path / "ref.stm", tmp_path / "hyp.ctm"), tmp_path / "errors.txt")
    lines = (tmp_path / "errors.txt").read_text(encoding="utf-8").splitlines()
    assert lines[2:4] == ["REF:  die STRASSE", "HYP:  die *******"]


def test_what_is_no_plain_file_is_not_replaced(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "kept.json").write_text("{}")
    (tmp_path / "link").symlink_to("kept.json")
    for name in ("pipe", "link"):
        assert main([*files, "--json", str(tmp_path / name)]) == 1
        assert "is a link, a device or a pipe" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    other = tmp_path / "x/../kept.json"
    other.parent.parent.mkdir()
    assert main([*files, "--json", str(tmp_path / "kept.json"), "--errors", str(other)]) == 1
    assert "give two files" in capsys.readouterr().err


@pytest.mark.parametrize("programs", [pytest.param(False, id="own"), pytest.param(True, id="sclite")])
def test_case_may_matter(tmp_path: Path, programs: bool, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ref.stm").write_text("f A amy 0 1 <O> sAr SAr\n")
    (tmp_path / "hyp.ctm").write_text("f A 0 0.4 sAr 1\nf A 0.5 0.4 sAr 1\n")
    options = ["--stm", str(tmp_path / "ref.stm"), "--ctm", str(tmp_path / "hyp.ctm"), "--json", str(tmp_path / "json")]
    if programs and find_sctk() is None:
        pytest.skip("NIST's programs are not installed")
    for case, errors in ((["--case-sensitive"], 1), ([], 0)):
        assert main([*options, *case, *(["--sctk"] if programs else [])]) == 0
        assert json.loads((tmp_path / "json").read_text())["all"]["errors"] == errors
        told = "words that differ only in case, such as sAr and SAr, were taken for one" in capsys.readouterr().err
        assert told == (case == [])
    (tmp_path / "en.glm").write_text("; * name '' * desc '' * format = 'NIST1'\n")
    assert main([*options, "--case-sensitive", "--glm", str(tmp_path / "en.glm")]) == 1


def test_references_of_one_time_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ref.stm").write_text("f A amy 0 1 a\nf A amy 1 2 b\nf A amy 0 1 a\n")
    (tmp_path / "hyp.ctm").write_text("f A 0.1 0.2 a\n")
    assert main(["--stm", str(tmp_path / "ref.stm"), "--ctm", str(tmp_path / "hyp.ctm")]) == 0
    assert (
        f"{tmp_path}/ref.stm:3: has the time of {tmp_path}/ref.stm:1; both count, as in sclite"
        in capsys.readouterr().err
    )
