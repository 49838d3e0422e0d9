"""One case for each rule of csrfilt and sclite, with the counts they give. Checked against them where installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.score import Reference, score_files
from asr_am.score.sctk import find_sctk, score_files_sctk

RULES = ";; mark\n* max_nrules = '20'\n* case_sensitive = 'F'\nNEVER => EVER / [ ] __ [ ]\n"


@dataclass
class Case:
    """Words of one segment (`ref`, `hyp`) and their counts: correct, substitutions, deletions, insertions."""

    name: str
    ref: str
    hyp: str
    counts: tuple[int, int, int, int]
    rules: str | None = None

    def write(self, folder: Path) -> tuple[Path, Path, Path | None]:
        stm, ctm, glm = folder / "ref.stm", folder / "hyp.ctm", folder / "rules.glm"
        stm.write_text(self.ref if "\n" in self.ref else f"f A spk 0 100 <o> {self.ref}\n")
        words = enumerate(self.hyp.split("|"))
        ctm.write_text(self.hyp if "\n" in self.hyp else "".join(f"f A {t} 0.5 {w}\n" for t, w in words if w))
        if self.rules is None:
            return stm, ctm, None
        glm.write_text(RULES + self.rules)
        return stm, ctm, glm


ALIGNMENT = [
    Case("words", "a b c", "a|x|c|d", (2, 1, 0, 1)),
    Case("case of A-Z", "Cat DOG", "cat|Dog", (2, 0, 0, 0)),
    Case("case of other letters", "\u00c9t\u00e9", "\u00e9t\u00e9", (0, 1, 0, 0)),
    Case("substitution on a tie", "a b", "c", (0, 1, 1, 0)),
    Case("insertion on a tie", "a b c", "b|d|a", (1, 1, 1, 1)),
    Case("null deleted", "a @ b", "a|b", (2, 0, 0, 0)),
    Case("null inserted", "a b", "a|@|b", (2, 0, 0, 0)),
    Case("null against null", "@", "@", (0, 0, 0, 0)),
    Case("a word instead of null is inserted", "{ a / @ }", "x", (0, 0, 0, 1)),
    Case("a word instead of a word is substituted", "{ a / b }", "x", (0, 1, 0, 0)),
    Case("optional skipped", "(uh) a", "a", (2, 0, 0, 0)),
    Case("optional said", "(uh) a", "uh|a", (2, 0, 0, 0)),
    Case("optional mismatched", "(uh) a", "um|a", (1, 1, 0, 0)),
    Case("optional in the hypothesis", "a", "(uh)|a", (2, 0, 0, 0)),
    Case("alternation by the branch taken", "{ a b c / d }", "d", (1, 0, 0, 0)),
    Case("alternation of several words", "x { a b c / d } y", "x|a|b|c|y", (5, 0, 0, 0)),
    Case("first branch of equal ones", "{ a b / c }", "z", (0, 1, 0, 0)),
    Case("nested alternation", "{ a { b / c d } / e }", "a|c|d", (3, 0, 0, 0)),
    Case("alternation without blanks", "{a/b}", "b", (1, 0, 0, 0)),
    Case("fragment at the end", "wo-", "wood", (1, 0, 0, 0)),
    Case("fragment longer than its word", "woo- wo-", "wo-|woo-", (1, 1, 0, 0)),
    Case("fragment at the beginning", "-ood", "wood", (1, 0, 0, 0)),
    Case("fragment in the hypothesis", "wood", "woo-", (1, 0, 0, 0)),
    Case("optional fragment", "(wo-) (-ood)", "wood|wood", (1, 1, 0, 0)),
    Case("final star", "a*", "a", (1, 0, 0, 0)),
    Case("after a semicolon", "a;tag1;tag2", "a;other", (1, 0, 0, 0)),
    Case("escaped semicolon", "a\\;s", "a\\;s;tag", (1, 0, 0, 0)),
    Case("no reference words", "", "a|b", (0, 0, 0, 2)),
    Case("neither", "", "", (0, 0, 0, 0)),
]  # fmt: skip

FILTER = [
    Case("hyphens", "twenty-one wo- -rd", "twenty|one|wood|bird", (4, 0, 0, 0), ""),
    Case("optional phrase", "(uh huh) a", "a", (3, 0, 0, 0), ""),
    Case("optional with blanks", "( uh ) a", "a", (2, 0, 0, 0), ""),
    Case("context on both sides", "cat cats", "dog|cats", (2, 0, 0, 0), "CAT => DOG / [ ] __ [ ]"),
    Case("no context", "concat", "condog", (1, 0, 0, 0), "CAT => DOG"),
    Case("contexts are read from the input", "a a", "b|b", (2, 0, 0, 0), "A => B / [ ] __ [ ]"),
    Case("output is not read again", "a", "b", (1, 0, 0, 0), "A => B / [ ] __ [ ]\nB => C / [ ] __ [ X]"),
    Case("first rule in file order", "a", "c", (1, 0, 0, 0), "A => C / [ ] __ [ ]\nA => D / [ ] __ [ ]"),
    Case("one pass from the left", "a b c", "x", (1, 0, 1, 0), "A B => X\nB C => Y"),
    Case("several words only in the reference", "going to", "going|to", (0, 1, 0, 1), "GOING TO => GONNA"),
    Case("a deleting rule", "uh a", "um|a", (1, 0, 0, 0), "UH => [] / [ ] __ [ ]\nUM => [] / [ ] __ [ ]"),
    Case("a deleted word leaves its confidence", "a", "um 0.5|a 0.5", (1, 0, 0, 1), "UM => [] / [ ] __ [ ]"),
    Case("quotes instead of brackets", "a b", "c|b", (2, 0, 0, 0), '"A" => "C" / " " __ " "'),
    Case("alternation in the hypothesis", "he would go", "he'd|go", (3, 0, 0, 0),
         "[HE'D] => [{HE HAD / HE WOULD}] / [ ] __ [ ]"),
    Case("nested alternation is flat in the hypothesis", "x y", "w", (2, 0, 0, 0), "W => {A {B / X Y}} / [ ] __ [ ]"),
    Case("confidence with alternatives", "he had", "he'd 0.9", (2, 0, 0, 0),
         "[HE'D] => [{HE HAD / HE WOULD}] / [ ] __ [ ]"),
    Case("null alternative", "a", "uh|a", (1, 0, 0, 0), "UH => {UH / @} / [ ] __ [ ]"),
    Case("a trailing number is a confidence", "channel", "five", (1, 0, 0, 0), "FIVE => CHANNEL 5 / [ ] __ [ ]"),
    Case("section for the reference", "a", "a", (0, 1, 0, 0), ';; INPUT_DEPENDENT_APPLICATION = "stm"\nA => B'),
    Case("section by purpose", "a", "a", (0, 1, 0, 0), ';; INPUT_DEPENDENT_APPLICATION = "HYP"\nA => B'),
    Case("section for neither", "a", "a", (1, 0, 0, 0), ';; INPUT_DEPENDENT_APPLICATION = "rttm"\nA => B'),
    Case("case sensitive", "a", "a", (1, 0, 0, 0), "* case_sensitive = 'T'\na => b"),
    Case("underscores in a target", "a", "b_c", (1, 0, 0, 0), "A => B_C / [ ] __ [ ]"),
    Case("comment after a rule", "a", "b", (1, 0, 0, 0), "A => B ;; why"),
    Case("optional by rule", "uh a", "a", (2, 0, 0, 0), "UH => (%HESITATION) / [ ] __ [ ]"),
]  # fmt: skip

FILES = [
    Case("by mid-point, strictly", "f A s 0 1 a\nf A s 1 2 b\n", "f A 0 1 a\nf A 0.5 1 b\n", (2, 0, 0, 0)),
    Case("a gap goes to the next segment", "f A s 0 1 a\nf A s 5 6 b\n", "f A 0.1 0.2 a\nf A 2 1 x\nf A 5 1 b\n",
         (2, 0, 0, 1)),
    Case("the last segment takes the rest", "f A s 0 1 a\nf A s 1 2 b\n", "f A 0 1 a\nf A 90 1 b\n", (2, 0, 0, 0)),
    Case("end times are C floats", "f A s 0 0.7 a\nf A s 0.7 2 b\n", "f A 0.69999999 0 a\nf A 0.8 0.2 b\n",
         (1, 0, 1, 1)),
    Case("ignored with the gap before it", "f A s 0 1 a\nf A s 4 5 IGNORE_TIME_SEGMENT_IN_SCORING\nf A s 5 6 b\n",
         "f A 0 1 a\nf A 2 1 x\nf A 4 1 y\nf A 5 1 b\n", (2, 0, 0, 0)),
    Case("channels and files", "g A s 0 1 a\nf B s 0 1 b\nf A s 0 1 c\n", "f B 0 1 b\nf A 0 1 c\ng A 0 1 a\n",
         (3, 0, 0, 0)),
    Case("a channel without words", "f A s 0 1 a\nf B s 0 1 b\nf C s 0 1 c\n", "f A 0 1 a\nf C 0 1 c\n", (2, 0, 1, 0)),
    Case("case of file and channel", "F a s 0 1 x\n", "f A 0 1 x\n", (1, 0, 0, 0)),
    Case("time is sorted as a number", "f A s 0 100 a b\n", "f A 10 1 b\nf A 9 1 a\n", (2, 0, 0, 0)),
    Case("comments, blank lines, tabs", ";; c\n\n  f\tA  s 0 1   a b\n** c\n",
         ";; c\n\n f A\t0 1 a\nf A 0.5 1 b\n; x\n", (2, 0, 0, 0)),
    Case("empty hypothesis", "f A s 0 1 a b\n", "\n", (0, 0, 2, 0)),
    Case("alternatives move as one, by the largest mid-point", "f A s 0 1 a\nf A s 1 2 x y\n",
         "f A 0 0.5 a\nf A 0.6 0.6 w\n", (3, 0, 0, 0), "W => {Q / X Y} / [ ] __ [ ]"),
]  # fmt: skip


@pytest.mark.parametrize("case", ALIGNMENT + FILTER + FILES, ids=lambda case: case.name)
def test_fact(case: Case, tmp_path: Path) -> None:
    stm, ctm, glm = case.write(tmp_path)
    total = score_files(stm, ctm, glm).total
    assert (total.correct, total.substitutions, total.deletions, total.insertions) == case.counts
    if find_sctk():
        assert score_files_sctk(stm, ctm, glm).total == total


ACCIDENTS = [
    ("open alternation", "{ a / b", "a", None, "no closing brace"),
    ("brace inside a word", "x{a / b}", "a", None, "brace inside a word"),
    ("no alternative", "{ }", "a", None, "no alternative"),
    ("native ALT markup", "a", "<ALT_BEGIN>|a|<ALT_END>", None, "ALT"),
    ("nested parentheses", "((a))", "a", "", "parentheses"),
    ("open parenthesis", "(a", "a", "", "parentheses"),
    ("open parenthesis in the hypothesis", "a", "a)", "", "parentheses"),
    ("alternatives without context", "a", "a", "A => {B / C}", "needs a context"),
    ("brackets in alternatives", "it's", "a", "IT'S => {[it is] / [it has]} / [ ] __ [ ]", "brackets"),
    ("long rule", "a", "a", "A => B / [ ] __ [ ] ;; " + "x" * 120, "131 bytes"),
    ("too many rules", "a", "a", "".join(f"Q{i} => R{i}\n" for i in range(30)), "max_nrules"),
    ("another format", "a", "a", "* format = 'NIST2'\nA => B", "NIST1"),
    ("dropping what no rule matches", "a", "a", "* copy_no_hit = 'F'", "copy_no_hit"),
    ("no arrow", "a", "a", "A -> B", "no '=>'"),
    ("bad expression", "a", "a", ';; INPUT_DEPENDENT_APPLICATION = "("', "regular expression"),
    ("an empty alternative in the hypothesis", "a", "w", "W => {A / } / [ ] __ [ ]", "empty alternative"),
]


@pytest.mark.parametrize(("name", "ref", "hyp", "rules", "message"), ACCIDENTS, ids=[case[0] for case in ACCIDENTS])
def test_accidents_of_the_tools_are_errors(
    name: str, ref: str, hyp: str, rules: str | None, message: str, tmp_path: Path
) -> None:
    stm, ctm, glm = Case(name, ref, hyp, (0, 0, 0, 0), rules).write(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        score_files(stm, ctm, glm)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("stm", "ctm", "message"),
    [
        ("f A s 0 1 a\n", "g A 0 1 a\n", "hyp.ctm:1: file 'g' channel 'a' is not in"),
        ("f A s 0 1 a\n", "f A 0 1 a\nf B 0 1 a\n", "hyp.ctm:2"),
        ("f A s 0 1 a\nf B s 0 1 a\n", "f 1 0 1 a\n", "has the file with a, b; name the channels alike"),
        ("f A s 0\n", "", "ref.stm:1: 4 fields"),
        ("f A s zero 1 a\n", "", "begin time 'zero'"),
        ("f A s nan inf a\n", "", "not a number"),
        ("f A s 2 1 a\n", "", "ends at 1 s, before it begins"),
        (";; only a comment\n", "", "no segments"),
        ("f A s 0 1 a\n", "f A 0 1\n", "hyp.ctm:1: 4 fields"),
        ("f A s 0 1 a\n", "f A 0 -1 a\n", "negative duration"),
        ("f A s 0 1 a\n", "f A 0 1 a\x00\n", "byte 0x00"),
        ("f A s 0 1 a\n", "f A 0 1 " + "a" * 600 + "\n", "499 bytes"),
    ],
)
def test_bad_files_name_the_line(stm: str, ctm: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ref.stm").write_text(stm)
    (tmp_path / "hyp.ctm").write_text(ctm)
    with pytest.raises(InputError, match=message):
        score_files(tmp_path / "ref.stm", tmp_path / "hyp.ctm")


def test_missing_files_are_named(tmp_path: Path) -> None:
    stm = tmp_path / "ref.stm"
    stm.write_text("f A s 0 1 a\n")
    with pytest.raises(InputError, match=r"missing\.ctm"):
        score_files(stm, tmp_path / "missing.ctm")
    with pytest.raises(InputError, match=r"missing\.glm"):
        Reference(stm, tmp_path / "missing.glm")
    with pytest.raises(InputError, match="cannot be read"):
        Reference(tmp_path)


def test_ignored_segments_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "ref.stm").write_text("f A s 0 1 { IGNORE_TIME_SEGMENT_IN_SCORING\nf A s 1 2 a\n")
    (tmp_path / "hyp.ctm").write_text("f A 1 1 a\n")
    score = score_files(tmp_path / "ref.stm", tmp_path / "hyp.ctm")
    assert (score.total.sentences, score.total.correct) == (1, 1)
