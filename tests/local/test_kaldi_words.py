from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.data.issue_counter import IssueCounter, summary_table
from asr_am.errors import InputError
from local.kaldi.lexicon import read_lexicon
from local.kaldi.words import Normaliser

UPPER = ("YES", "I'M", "SURE", "O'CLOCK", "[NOISE]", "'EM", "US", "us", "CAF\u00c9", "<unk>")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("YES SURE", "YES SURE"),
        ("Yes, I\u2019m  sure.", "YES I'M SURE"),
        ("us US Us", "us US US"),  # the lexicon has both
        ("'em (yes)", "'EM YES"),
        ("'yes'", "YES"),
        ("cafe\u0301 yes\u200b", "CAF\u00c9 YES"),  # decomposed letter, zero-width space
        ("[noise] [cough] <laugh> <unk> <UNK>", "[NOISE] [cough] <laugh> <unk> <unk>"),
        ("maybe... (not) a/b", "MAYBE NOT A/B"),
        ("no;no b*c* a\\b", "NONO BC AB"),  # markup in NIST's references
        ("- !! ' <s> !SIL </s>", ""),
        ("us- -us, i'- yes-- --yes (us)-", "US- -US I'- YES YES us"),  # fragments, not the words us and yes
        ("yes\u00a0sure", "YES SURE"),
    ],
)
def test_words_in_the_spelling_of_the_lexicon(text: str, words: str) -> None:
    normalise = Normaliser(UPPER, {"!SIL"}, {"<UNK>"})
    assert normalise(text, "here", IssueCounter()) == words.split()


def test_unknown_words_are_counted() -> None:
    normalise, issues = Normaliser(UPPER, (), ()), IssueCounter()
    normalise("no, no yes", "text:1", issues)
    normalise("no YES", "text:2", issues)
    assert normalise.unknown == {"NO": 3}
    assert issues.counts["words outside the lexicon: the unknown word"] == 3
    assert issues.first["words outside the lexicon: the unknown word"] == "text:1: NO"


def test_the_summary_has_a_column_for_each_set_that_has_something() -> None:
    issues_by_set = {name: IssueCounter() for name in ("train", "dev", "test")}
    issues_by_set["test"].add("lost", "b", 20)
    issues_by_set["train"].add("lost", "a")
    assert [line.split() for line in summary_table(issues_by_set).splitlines()] == [
        ["train", "test", "first"],
        ["lost", "1", "20", "a"],
    ]


def lexicon_of(folder: Path, text: str, silence: str | None = None) -> tuple[dict[str, str], Path]:
    """Returns the written lines by word."""
    path = folder / "mine.txt"
    path.write_text(text)
    if silence is not None:
        (folder / "silence_phones.txt").write_text(silence)
    lexicon = read_lexicon(path, IssueCounter())
    lexicon.write(folder)
    return {word: " | ".join(" ".join(p) for p in variants) for word, variants in lexicon.entries.items()}, path


@pytest.mark.parametrize(
    "text",
    [
        "A AH\nAB AH B\nAB AE B\n",
        "A 1.0 AH\nAB 0.7 AH B\nAB 3e-1 AE B\n",
        "A 1 AH\nAB 1.0E-1 AH B\nAB 1 AE B\n",
        ";;; CMUdict\nA  AH\nAB  AH B\nAB(2)  AE B\n",
        "a AH\nab AH B # place, danish\nab(2) AE B #\n".upper(),
        "A AH_S\nAB AH_B B_E\nAB AE_B B_E\n!SIL SIL\n",
        "\r\nA\tAH\r\nAB AH B\r\nAB AE B\r\nAB AE B\r\n",
        "A\u00a0AH\nAB\u00a0AH\u00a0B\nAB\u3000AE B\n",
        "\u00a0A AH\nAB\u00a0 AH B\nAB AE\u00a0B\n",
        "<eps> sil\n!SIL SIL\n<UNK> SPN\n<SPOKEN_NOISE> spn\n<s> SIL\nA AH\nAB AH B\nAB AE B\n",
    ],
)
def test_every_form_of_lexicon_comes_to_the_same(tmp_path: Path, text: str) -> None:
    entries, _ = lexicon_of(tmp_path, text)
    assert entries == {"A": "AH", "AB": "AH B | AE B"}
    assert (tmp_path / "lexicon.txt").read_text() == "A AH\nAB AH B\nAB AE B\n"


def test_probabilities_are_kept_for_the_words_that_remain(tmp_path: Path) -> None:
    lexicon_of(tmp_path, "A 1.0 AH\nAB 0.7 AH B\nAB 3e-1 AE B\n[DOOR] 1 NSN\n")
    assert (tmp_path / "lexiconp.txt").read_text() == "A 1 AH\nAB 0.7 AH B\nAB 0.3 AE B\n"
    (tmp_path / "plain").mkdir()
    lexicon_of(tmp_path / "plain", "A AH\nAB AH B\n")
    assert not (tmp_path / "plain/lexiconp.txt").exists()


@pytest.mark.parametrize("text", ["A 6 8\nB 1\n", "A 1 8\nB 8\n", "A 1 8\nB 1\n", "A 100 8\nB 100 1\n"])
def test_phones_may_be_whole_numbers(tmp_path: Path, text: str) -> None:
    lexicon_of(tmp_path, text)
    assert (tmp_path / "lexicon.txt").read_text() == text


def test_noises_are_words_of_one_silence_phone(tmp_path: Path) -> None:
    entries, _ = lexicon_of(tmp_path, "A AH\n[COUGH] spn\n[DOOR] NSN\n[LAUGH] LAU\n", silence="SIL SPN\nNSN\nLAU\n")
    assert entries == {"A": "AH"}
    assert (tmp_path / "nonspeech.txt").read_text() == "[COUGH] SPN\n[DOOR] NSN\n[LAUGH] LAU\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A AH\nB\n", "mine.txt:2: 'B' has no phones"),
        ("A 0.5 AH\nB 0.5 B\nC K\n", "mine.txt:3: 'C' has no probability"),
        ("A 0.5 AH\nB 0.5 B\nC 1.5 K\n", "mine.txt:3: 'C' has no probability"),
        ("A AH\nB 0.5 B\nC K\n", "mine.txt:2: 0.5 is a number"),
        ("A -0.33 AH\nB -0.1 B\n", "mine.txt:1: -0.33 is a number"),
        ("A 0,5 AH\nB 0,5 B\n", "mine.txt:1: 0,5 is a number"),
        ("A 0.0 AH\nB 0.0 B\n", "mine.txt:1: 0.0 is a number"),
        ("A 0.99 0.6 1.03 0.98 AX\nB 1 0.5 1.0 1.0 B\n", "mine.txt:1: 0.6 is a number .* give lexiconp.txt"),
        ("A 1.0\nB 1.0 B\n", "mine.txt:1: 1.0 is a number"),
        ("A AH\nB\u3000C B K\n", "mine.txt:2: 'B.u3000C' has a Unicode blank: write _ if"),
        ("A AH\nB SIL B\n", "mine.txt:2: SIL is a phone of silence"),
        ("A AH #1\n", "mine.txt:1: the phone name #1 is reserved"),
        ("!SIL SIL\n", "no word made of speech phones"),
        ("", "is empty"),
    ],
)
def test_what_is_wrong_with_a_lexicon_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lexicon_of(tmp_path, text)


def test_phones_are_names(tmp_path: Path) -> None:
    text = "kart k a r t`\nkart' k a r t'\na a\u0301\nb \u00e1\n"
    issues = IssueCounter()
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    lexicon = read_lexicon(tmp_path / "mine.txt", issues)
    assert [variants[0][-1] for variants in lexicon.entries.values()] == ["t`", "t'", "a\u0301", "\u00e1"]
    assert issues.counts == {"phones that differ only in invisible characters or Unicode form: kept apart": 2}


APART = "words of the lexicon that differ only in case, apostrophes or invisible characters: kept apart (--unify-words)"
ONE = "words of the lexicon that differ only in case, apostrophes or invisible characters: one"


@pytest.mark.parametrize(
    ("first", "second"),
    [("sAr", "SAr"), ("ka`", "ka'"), ("don\u2019t", "don't"), ("ab", "a\u200bb"), ("caf\u00e9", "cafe\u0301")],
)
def test_two_words_of_the_lexicon_stay_two_unless_the_user_makes_them_one(
    tmp_path: Path, first: str, second: str
) -> None:
    (tmp_path / "mine.txt").write_text(f"{first} S\n{second} Z\nother T\n", encoding="utf-8")
    lexicon = read_lexicon(tmp_path / "mine.txt", apart := IssueCounter())
    assert lexicon.entries == {first: [("S",)], second: [("Z",)], "other": [("T",)]}
    assert apart.counts == {APART: 2}
    normalise = Normaliser(lexicon.vocabulary, (), ())
    assert normalise(f"{second} {first} Other", "here", IssueCounter()) == [second, first, "other"]
    united = read_lexicon(tmp_path / "mine.txt", one := IssueCounter(), unify=True)
    assert list(united.entries.values()) == [[("S",), ("Z",)], [("T",)]] and one.counts[ONE] == 2
    normalise = Normaliser(united.vocabulary, (), (), unify=True)
    assert len(set(normalise(f"{second} {first}", "here", IssueCounter()))) == 1


def test_what_is_unified_is_counted_under_its_name() -> None:
    normalise, issues = Normaliser(["it's", "caf\u00e9", "sure", "Sar", "SAr"], (), ()), IssueCounter()
    words = normalise("it\u2019s cafe\u0301 su\u200bre SURE, SAR", "here", issues)
    assert words == ["it's", "caf\u00e9", "sure", "sure", "SAr"]
    assert issues.counts == {
        "words with apostrophes of other forms: with '": 1,
        "words with decomposed characters: composed (Unicode NFC)": 1,
        "words with invisible characters: without": 1,
        "words with punctuation: without": 1,
        "words in another case: as in the lexicon": 1,
        "words in another case than several of the lexicon: the first of these": 1,
    }
