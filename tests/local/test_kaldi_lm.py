from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from asr_am.data.issue_counter import IssueCounter
from asr_am.lang.arpa import Arpa, read_arpa
from local.kaldi.lm import beyond, read_given_arpa


def test_places_are_for_words_that_the_transcripts_lack() -> None:
    known = Counter({"a": 9, "b": 8, "c": 3, "d": 2, "e": 1})
    assert beyond("abcdef", Counter("ab"), [known], 4) == {"e", "f"}
    assert beyond("abcdef", Counter("abf"), [known], 2) == {"c", "d", "e"}  # words of the transcripts stay
    assert beyond("abcdef", Counter(), [], 6) == set()


def test_words_of_training_that_the_lm_lacks_are_counted(tmp_path: Path) -> None:
    issues = IssueCounter()
    (tmp_path / "lm.arpa").write_text(CASED)
    read_given_arpa(tmp_path / "lm.arpa", ["right", "the", "uh"], Counter({"the": 5, "uh": 3, "um": 1}), issues)
    what = "words of training that the LM lacks, so they are never recognised"
    assert issues.counts[what] == 3 and issues.first[what].endswith(": 3 uh")


CASED = """\\data\\
ngram 1=7
ngram 2=5
ngram 3=2

\\1-grams:
-99\t<s>\t-0.1
-0.6\t</s>
-1.0\tright\t-0.2
-2.0\tRight\t-0.4
-0.7\tthe\t-0.3
-0.9\tyes\t-0.25
-1.5\tso

\\2-grams:
-0.3\t<s> Right\t-0.2
-0.6\t<s> yes
-0.4\tthe right\t-0.1
-0.5\tright </s>
-0.8\tRight yes

\\3-grams:
-0.2\t<s> Right yes
-0.3\tthe right </s>

\\end\\
"""


def read_cased(folder: Path, lexicon: list[str], issues: IssueCounter) -> tuple[Arpa, Arpa]:
    """Returns the model as it is, and over the words of a lexicon."""
    (folder / "lm.arpa").write_text(CASED)
    return read_arpa(folder / "lm.arpa"), read_given_arpa(folder / "lm.arpa", lexicon, Counter(), issues)


def test_two_spellings_of_a_word_have_their_probability_together(tmp_path: Path) -> None:
    issues = IssueCounter()
    cased, found = read_cased(tmp_path, ["RIGHT", "THE", "YES", "SO"], issues)
    assert {word for (word,) in found.logprobs[0]} == {"<s>", "</s>", "RIGHT", "THE", "YES", "SO"}
    assert set(found.logprobs[1]) == {
        ("<s>", "RIGHT"),
        ("<s>", "YES"),
        ("THE", "RIGHT"),
        ("RIGHT", "</s>"),
        ("RIGHT", "YES"),
    }
    spellings = {"RIGHT": ("right", "Right"), "THE": ("the",), "YES": ("yes",), "SO": ("so",), "</s>": ("</s>",)}

    def expected(history: str, word: str) -> float:
        """Each spelling of the history by its share of the probability, with the sum of those of the word."""
        before = spellings.get(history, (history,))
        weights = [10 ** cased.logprob((), h) if len(before) > 1 else 1.0 for h in before]
        both = (
            w * sum(10 ** cased.logprob((h,), v) for v in spellings[word]) for w, h in zip(weights, before, strict=True)
        )
        return math.log10(sum(both) / sum(weights))

    for word in spellings:
        assert found.logprob((), word) == pytest.approx(
            math.log10(sum(10 ** cased.logprob((), v) for v in spellings[word]))
        )
        for history in ("<s>", "RIGHT", "THE", "YES", "SO"):
            assert found.logprob((history,), word) == pytest.approx(expected(history, word)), (history, word)
    assert found.logprob(("THE", "RIGHT"), "</s>") == pytest.approx(-0.3)  # "the Right" is no history of the model
    assert issues.counts["spellings in the LM of one word of the lexicon: their probabilities are added"] == 2
    assert "words of the LM outside the lexicon: left out" not in issues.counts


def test_words_of_a_lexicon_that_has_both_spellings_stay_two(tmp_path: Path) -> None:
    cased, found = read_cased(tmp_path, ["right", "Right", "the", "yes", "so"], issues := IssueCounter())
    assert (found.logprobs, found.backoffs) == (cased.logprobs, cased.backoffs)
    assert issues.counts == {}


def test_without_merged_words_the_model_is_the_same_under_other_names(tmp_path: Path) -> None:
    (tmp_path / "one.arpa").write_text(CASED.replace("Right", "wrong"))
    found = read_given_arpa(tmp_path / "one.arpa", ["RIGHT", "THE"], Counter(), issues := IssueCounter())
    assert found.logprobs[1] == {("THE", "RIGHT"): -0.4, ("RIGHT", "</s>"): -0.5}
    assert found.backoffs == {("<s>",): -0.1, ("RIGHT",): -0.2, ("THE",): -0.3, ("THE", "RIGHT"): -0.1}
    assert issues.counts["words of the LM outside the lexicon: left out"] == 3


@pytest.mark.parametrize("name", ["<unk>", "<UNK>", "[UNK]", "<oov>"])
def test_the_unknown_word_has_several_names(tmp_path: Path, name: str) -> None:
    lines = ["\\data\\", "ngram 1=4", "", "\\1-grams:", "-1 <s>", "-1 </s>", f"-0.5 {name}", "-1 yes", "", "\\end\\"]
    (tmp_path / "lm.arpa").write_text("\n".join(lines) + "\n")
    found = read_given_arpa(tmp_path / "lm.arpa", {"yes", "<unk>"}, Counter(["yes"]), issues := IssueCounter())
    assert found.logprobs[0]["<unk>",] == -0.5 and "words of the LM outside the lexicon: left out" not in issues.counts
