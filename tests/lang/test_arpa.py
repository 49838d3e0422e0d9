from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa, perplexity, read_arpa, write_arpa
from asr_am.lang.ngram import estimate

GOOD = """An introduction which mentions \\data\\ in passing
ngram 1=nr  # and a format description

\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-0.5\t</s>\t-99.0
-99\t<s>\t-0.25
-0.25 A -0.5
-inf B

\\2-grams:
-0.125 <s> A
0.0000 A </s>

\\end\\
what follows is ignored
"""


def test_reads_comments_backoffs_and_gzip(tmp_path: Path) -> None:
    for path, content in ((tmp_path / "lm", GOOD.encode()), (tmp_path / "lm.gz", gzip.compress(GOOD.encode()))):
        path.write_bytes(content)
        arpa = read_arpa(path)
        assert arpa.order == 2
        assert arpa.logprob(["<s>"], "A") == -0.125
        assert arpa.logprob(["x", "A"], "</s>") == 0.0
        assert arpa.logprob(["A"], "A") == -0.75  # backs off
        assert arpa.logprob([], "B") == -math.inf
        assert arpa.logprob([], "C") == -math.inf


def test_words_keep_blanks_that_separate_no_words(tmp_path: Path) -> None:
    word = "A\u00a0"
    arpa = Arpa([{("<s>",): -1.0, ("</s>",): -1.0, (word,): -0.5}, {("<s>", word): -0.25}], {})
    write_arpa(arpa, tmp_path / "lm")
    assert read_arpa(tmp_path / "lm") == arpa


def test_perplexity_leaves_words_outside_out(tmp_path: Path) -> None:
    (tmp_path / "lm").write_text(GOOD)
    result = perplexity(read_arpa(tmp_path / "lm"), [["A"], ["C", "A"]])
    assert (result.sentences, result.words, result.oov) == (2, 3, 1)
    # A </s> after <s>; then A (after the unknown word: unigram) and </s>.
    assert result.perplexity == pytest.approx(10 ** ((0.125 + 0.0 + 0.25 + 0.0) / 4))


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("-0.25 A -0.5", "nan A -0.5", 11, "not a log10 number"),
        ("-0.25 A -0.5", "-0.25 A nan", 11, "not a log10 number"),
        ("-0.25 A -0.5", "-0.25 A inf", 11, "not a log10 number"),
        ("-0.25 A -0.5", "-0,25 A -0.5", 11, "not a log10 number"),
        ("-0.25 A -0.5", "0.25 A -0.5", 11, "above 0"),
        ("-0.25 A -0.5", "-0.25", 11, "not a probability, 1 words"),
        ("-0.25 A -0.5", "-0.25 A B -0.5", 11, "not a probability, 1 words"),
        ("-inf B", "-1 A", 12, "is a duplicate"),
        ("0.0000 A </s>", "0.0000 A C", 16, "the word 'C' is not among the 1-grams"),
        ("-inf B\n", "", 13, "3 1-grams but the header says 4"),
        ("ngram 2=2", "ngram 2=3", 18, "2 2-grams but the header says 3"),
        ("ngram 2=2", "ngram 3=2", 6, "expected 'ngram 2=COUNT'"),
        ("ngram 2=2", "ngram 2=x", 6, "expected 'ngram 2=COUNT'"),
        ("\\2-grams:", "\\3-grams:", 14, "expected \\2-grams:"),
        ("\\end\\", "\\3-grams:", 18, "expected \\end\\"),
        ("\\end\\\nwhat follows is ignored\n", "", None, "ends without \\end\\"),
        ("\n\\data\\\n", "\n", None, "no line \\data\\"),
        ("<s>", "<t>", None, "no unigram <s>"),
        ("ngram 1=4", "ngram 1=0", None, "no unigrams"),
    ],
)
def test_bad_models_are_named_with_their_line(tmp_path: Path, old: str, new: str, line: int | None, what: str) -> None:
    assert old in GOOD
    path = tmp_path / "lm.arpa"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError) as error:
        read_arpa(path)
    assert str(error.value).startswith(f"{path}:{line}:" if line else f"{path}:")
    assert what in str(error.value)


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "lm.gz"
    with pytest.raises(InputError, match="no such file"):
        read_arpa(path)
    whole = gzip.compress(GOOD.encode())
    for damaged in (whole[: len(whole) // 2], GOOD.encode(), b"", whole[:20] + b"\xff\xff" + whole[22:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            read_arpa(path)
    (tmp_path / "lm").write_bytes(GOOD.encode().replace(b"-inf B", b"-1 B\xe9"))
    with pytest.raises(InputError, match="lm:12: not UTF-8"):
        read_arpa(tmp_path / "lm")


@settings(max_examples=150)
@given(data=st.data())
def test_fuzzed_models_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=6))
    path = tmp_path_factory.getbasetemp() / "fuzzed.arpa"
    path.write_bytes(bytes(content))
    try:
        arpa = read_arpa(path)
    except InputError:
        return
    assert arpa.order >= 1


def test_write_then_read_gives_the_same_model(tmp_path: Path) -> None:
    arpa = estimate([["a", "b", "a"], ["é", "a"], []], ["a", "b", "é", "c"], 3)
    write_arpa(arpa, tmp_path / "lm.arpa")
    again = read_arpa(tmp_path / "lm.arpa")
    assert [list(ngrams) for ngrams in again.logprobs] == [list(ngrams) for ngrams in arpa.logprobs]
    for ngrams, same in zip(arpa.logprobs, again.logprobs, strict=True):
        assert list(same.values()) == pytest.approx(list(ngrams.values()), abs=1e-6)
    assert again.backoffs == pytest.approx(arpa.backoffs, abs=1e-6)
