r"""Transcripts in the spelling of the lexicon: case, punctuation, Unicode forms, words that mean silence.

    "Yes, I'm  SURE.\u00a0[cough]"  with a lexicon in upper case  ->  YES I'M SURE [cough]

A word of the lexicon is kept. Any other is looked up with one form of apostrophe and without invisible characters,
then without regard to case, then without punctuation around it. If that fails too, it is kept without punctuation and
trained as the unknown word. Marks in brackets that the lexicon lacks ([cough], <noise>, {laugh}) are kept, because they
contain no word. So are fragments (th-, -ing), as NIST's scoring knows them: `a-` is not the word `a`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection

from asr_am.data.issue_counter import IssueCounter
from asr_am.lang.lexicon import UNKNOWN

OUTSIDE = "words outside the lexicon: the unknown word"
MARK = re.compile(r"\[.*\]|<.*>|\{.*\}|\*.*\*")
FRAGMENT = re.compile(r"-?\w[\w']*-|-\w[\w']*")
APOSTROPHES = str.maketrans("\u2018\u2019\u02bc\u00b4`", "'''''")
NIST_MARKUP = str.maketrans("", "", "(){};\\*")  # they have a meaning in NIST's references


def clean(text: str, *, apostrophes: bool = True) -> str:
    """Normalises Unicode to composed form, unifies apostrophes, and removes invisible characters."""
    text = unicodedata.normalize("NFC", text)
    text = text.translate(APOSTROPHES) if apostrophes else text
    return "".join(c for c in text if c.isspace() or unicodedata.category(c) not in ("Cc", "Cf"))


def count_cleaned(word: str, where: str, issues: IssueCounter) -> None:
    """Counts what `clean` does to a word, by its true names."""
    composed = unicodedata.normalize("NFC", word)
    if composed != word:
        issues.add("words with decomposed characters: composed (Unicode NFC)", where)
    if composed.translate(APOSTROPHES) != composed:
        issues.add("words with apostrophes of other forms: with '", where)
    if clean(word, apostrophes=False) != composed:
        issues.add("words with invisible characters: without", where)


def is_mark(word: str) -> bool:
    """Returns True for a transcriber's remark in brackets."""
    return MARK.fullmatch(word) is not None


class Spelling:
    """Spelling of words in the lexicon."""

    def __init__(self, vocabulary: Collection[str]) -> None:
        self.vocabulary = frozenset(vocabulary)
        self._folded: dict[str, str] = {}
        self._several: set[str] = set()  # what two words of the lexicon become without case
        for word in sorted(vocabulary):
            folded = clean(word).casefold()
            if self._folded.setdefault(folded, word) != word:
                self._several.add(folded)

    def find(self, word: str) -> str | None:
        """Returns the word if it is in the lexicon, else the same word in another case, else None. Expects a `clean`
        word.
        """
        return word if word in self.vocabulary else self._folded.get(word.casefold())

    def is_ambiguous(self, word: str) -> bool:
        """True for a word that the lexicon lacks, while several of its words differ from it only in case."""
        return word not in self.vocabulary and word.casefold() in self._several


class Normaliser:
    """Spells words as in the lexicon. `unknown` counts those that it lacks."""

    def __init__(
        self, vocabulary: Collection[str], silence: Collection[str], unknown: Collection[str], *, unify: bool = False
    ) -> None:
        """Args:
        vocabulary: words of the lexicon.
        silence: words that are silence.
        unknown: words that mean `<unk>`.
        unify: write words that the lexicon lacks in lower case, where its own words have no common case.
        """
        self._spelling = Spelling(vocabulary)
        self._silence = frozenset(silence)
        self._unknown = frozenset(unknown) | {UNKNOWN}
        cased = [word for word in vocabulary if word.upper() != word.lower() and word != UNKNOWN]
        upper = sum(word.isupper() for word in cased)
        lower = sum(word.islower() for word in cased)
        self._upper = upper > 0.8 * len(cased)
        self._lower = lower > 0.8 * len(cased) or (unify and not self._upper)
        self.unknown: Counter[str] = Counter()

    @property
    def has_lexicon(self) -> bool:
        """False if all words will be pronounced later."""
        return self._spelling.vocabulary > {UNKNOWN}

    def __call__(self, text: str, where: str, issues: IssueCounter) -> list[str]:
        """Returns the words of `text` and counts corrections in `issues`."""
        words = []
        for written in text.split():
            word = written if written in self._spelling.vocabulary else clean(written)
            if word != written:
                count_cleaned(written, where, issues)
            if not word:
                continue
            if word in self._silence or word in ("<s>", "</s>"):
                issues.add("silence words in transcripts: taken out", where)
                continue
            spelt = UNKNOWN if word in self._unknown else self._spell(word, where, issues)
            if not spelt:
                issues.add("punctuation by itself: taken out", where)
                continue
            if spelt not in self._spelling.vocabulary:
                if self.has_lexicon:
                    issues.add(OUTSIDE, f"{where}: {spelt}")
                self.unknown[spelt] += 1
            words.append(spelt)
        return words

    def _spell(self, word: str, where: str, issues: IssueCounter) -> str:
        if word in self._spelling.vocabulary:
            return word
        if is_mark(word):
            return self._spelling.find(word) or word
        if FRAGMENT.fullmatch(bare := _without_punctuation(word, keep="'-")):
            return self._spelling.find(bare) or self._unlisted(bare, word, where, issues)
        bare = _without_punctuation(bare, keep="'").translate(NIST_MARKUP)
        for candidate in (word, bare, _without_punctuation(bare, keep="")):
            found = self._spelling.find(candidate)
            if found is not None:
                if candidate != word:
                    issues.add("words with punctuation: without", where)
                if self._spelling.is_ambiguous(candidate):
                    issues.add("words in another case than several of the lexicon: the first of these", where)
                elif found != candidate:
                    issues.add("words in another case: as in the lexicon", where)
                return found
        return self._unlisted(bare, word, where, issues) if bare.strip("'") else ""

    def _unlisted(self, bare: str, word: str, where: str, issues: IssueCounter) -> str:
        """Returns a word that the lexicon lacks without its punctuation, in the case of most others."""
        spelt = bare.upper() if self._upper else bare.lower() if self._lower else bare
        if bare != word:
            issues.add("words with punctuation: without", where)
        if spelt != bare:
            issues.add("words outside the lexicon: in the case of most of its words", where)
        return spelt


def _without_punctuation(word: str, keep: str) -> str:
    begin, end = 0, len(word)
    while begin < end and _is_punctuation(word[begin], keep):
        begin += 1
    while end > begin and _is_punctuation(word[end - 1], keep):
        end -= 1
    return word[begin:end]


def _is_punctuation(character: str, keep: str) -> bool:
    return character not in keep and unicodedata.category(character)[0] in "PS"


def most_frequent(words: Counter[str], number: int = 10) -> str:
    """Formats the most frequent words: "21 UH, 3 ERM, ..."."""
    ranked = sorted(words.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {word}" for word, count in ranked[:number]) + (", ..." if len(ranked) > number else "")
