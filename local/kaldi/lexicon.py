"""Reads the user's lexicon (Kaldi's lexicon.txt or lexiconp.txt, or CMUdict) and writes it in the recipe's form.

Phones of silence and noise are named SIL, SPN and NSN, whatever their case. Further ones may be listed in
silence_phones.txt next to the lexicon, as in Kaldi. A word with the single phone SIL (`!SIL`) is silence, `<UNK>` and
the like are the unknown word, and any other word with one such phone is a noise.

Names of phones stay as they are: in X-SAMPA, t` and t' are two phones. Words lose invisible characters and have one
form of apostrophe, except where two words of the lexicon would become one: these stay as they are.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.textfile import numbered_lines, split_words, write_lines
from asr_am.errors import InputError
from asr_am.lang.lexicon import NONSPOKEN_NOISE, RESERVED_WORDS, SILENCE, SPOKEN_NOISE, UNKNOWN
from local.kaldi.words import clean, count_cleaned, is_mark

VARIANT = re.compile(r"(?P<word>.+)\((?:\d+)\)")  # WORD(2) in CMUdict
POSITION = re.compile(r".+_[BIES]")
UNKNOWNS = frozenset({UNKNOWN, "<unknown>", "<oov>", "[unk]", "[oov]", "<spoken_noise>"})
NUMBER = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)
APART = "words of the lexicon that differ only in case, apostrophes or invisible characters: kept apart (--unify-words)"
ONE = "words of the lexicon that differ only in case, apostrophes or invisible characters: one"
FORM = "every line is `WORD PHONE PHONE ...`, or every line `WORD PROBABILITY PHONE ...`"


@dataclass
class Lexicon:
    """The user's lexicon.

    Attributes:
        entries: word to its pronunciations.
        noises: word to its silence phone.
        silence: words that are silence.
        unknown: words that mean the unknown word.
        probabilities: of words and their phones, where the lexicon has them.
    """

    entries: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    noises: dict[str, str] = field(default_factory=dict)
    silence: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    probabilities: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    @property
    def vocabulary(self) -> set[str]:
        return self.entries.keys() | self.noises.keys() | {UNKNOWN}

    def scored(self, text: str) -> str:
        """Returns the words of a transcript that count in a word error rate, without noises and marks.

        `<unk>` counts, as in Kaldi: it stands for a spoken word, which no CTM file has.
        """
        return " ".join(
            word
            for word in text.split()
            if word in self.entries or word == UNKNOWN or not (word in self.noises or is_mark(word))
        )

    def write(self, data_dir: Path) -> None:
        """Writes lexicon.txt and, if there are noises or probabilities, nonspeech.txt or lexiconp.txt."""
        lines = [f"{word} {' '.join(phones)}" for word in sorted(self.entries) for phones in self.entries[word]]
        write_lines(data_dir / "lexicon.txt", lines)
        if self.probabilities:
            known = ((word, phones, self.probabilities.get((word, phones))) for word in sorted(self.entries)
                     for phones in self.entries[word])  # fmt: skip
            lines = [f"{word} {p:g} {' '.join(phones)}" for word, phones, p in known if p is not None]
            write_lines(data_dir / "lexiconp.txt", lines)
        if self.noises:
            write_lines(data_dir / "nonspeech.txt", [f"{word} {phone}" for word, phone in sorted(self.noises.items())])


def read_lexicon(path: Path, issues: IssueCounter, *, unify: bool = False) -> Lexicon:
    """Reads a lexicon.

    Args:
        path: the user's file.
        issues: counts issues.
        unify: make words that differ only in case, apostrophes or invisible characters one, spelt as the first of them.

    Raises:
        InputError: with file and line, for a word without phones, a silence phone among others, a reserved name, or a
            lexicon of nothing but noises.
    """
    lines = _split(path)
    with_probability = _has_probabilities(path, lines)
    silence_phones = _silence_phones(path)
    marked = all(
        POSITION.fullmatch(p) for _, _, phones in lines for p in phones[with_probability:] if p not in silence_phones
    )
    spelling = _spelling(lines, issues, unify=unify)
    _count_alike(lines, silence_phones, issues)
    lexicon = Lexicon()
    for where, word, fields in lines:
        phones = tuple(_phone(name, silence_phones, marked, where) for name in fields[with_probability:])
        if not phones:
            raise InputError(f"{where}: {word!r} has no phones; {FORM}")
        name = spelling[_without_number(word)]
        _add(lexicon, name, phones, where, silence_phones, issues)
        if with_probability:
            lexicon.probabilities.setdefault((name, phones), float(fields[0]))
    if not lexicon.entries:
        raise InputError(f"{path}: has no word made of speech phones; {FORM}")
    if marked:
        issues.add("phones with word-position markers: without", lines[0][0])
    return lexicon


def _split(path: Path) -> list[tuple[str, str, list[str]]]:
    """Returns (where, word, other fields) of each line that is neither blank nor a comment."""
    lines, joined = [], []
    for number, line in numbered_lines(path, FORM):
        fields = [field for field in line.split() if clean(field)]
        if "#" in fields[2:]:  # a comment in CMUdict
            fields = fields[: fields.index("#", 2)]
        if fields and not fields[0].startswith((";;;", "##")):
            lines.append((f"{path}:{number}", fields[0], fields[1:]))
            if len(split_words(line)[0].split()) > 1:
                joined.append((f"{path}:{number}", split_words(line)[0]))
    if not lines:
        raise InputError(f"{path}: is empty; {FORM}")
    if 0 < len(joined) < len(lines):  # in all lines it separates the word from its phones
        where, text = joined[0]
        raise InputError(
            f"{where}: {text!a} has a Unicode blank: write _ if it is one word, or a space if phones follow"
        )
    return lines


def _without_number(word: str) -> str:
    """Returns WORD for WORD(2)."""
    variant = VARIANT.fullmatch(word)
    return variant["word"] if variant else word


def _spelling(lines: list[tuple[str, str, list[str]]], issues: IssueCounter, *, unify: bool) -> dict[str, str]:
    """Maps each word of the file to our spelling of it, and counts what changes or could be taken for another word."""
    groups: dict[str, dict[str, str]] = {}  # words that differ only in case and forms of characters, with their places
    for where, word, _ in lines:
        name = _without_number(word)
        groups.setdefault(clean(name).casefold(), {}).setdefault(name, where)
    spelling: dict[str, str] = {}
    for words in groups.values():
        spoken = [word for word in words if word.lower() not in UNKNOWNS | RESERVED_WORDS]
        cleaned = {word: clean(word) for word in words}
        several = len(spoken) > 1
        if several:
            issues.add(ONE if unify else APART, f"{words[spoken[1]]}: {' '.join(spoken)}", len(spoken))
        if several and unify:
            cleaned = dict.fromkeys(words, cleaned[spoken[0]])
        elif len(set(cleaned.values())) < len(words):
            cleaned = {word: word for word in words}
        for word, spelt in cleaned.items():
            if not (several and unify) and spelt != word:
                count_cleaned(word, words[word], issues)
        spelling |= cleaned
    return spelling


def _count_alike(lines: list[tuple[str, str, list[str]]], silence: dict[str, str], issues: IssueCounter) -> None:
    """Counts phones that look like one name, which stay apart, and phones of silence whose names become one."""
    phones: dict[str, dict[str, str]] = {}  # by how they look, or by our name of silence
    for where, _, fields in lines:
        for name in fields:
            phones.setdefault(silence.get(name, clean(name, apostrophes=False)), {}).setdefault(name, where)
    for seen, names in phones.items():
        if len(names) > 1:
            if seen in silence.values():
                what = f"names of the silence phone {seen}: one"
            else:
                what = "phones that differ only in invisible characters or Unicode form: kept apart"
            issues.add(what, f"{list(names.values())[1]}: {seen}", len(names))


def _has_probabilities(path: Path, lines: list[tuple[str, str, list[str]]]) -> bool:
    """Returns True if every line has a probability. If most lines have one, a line without is an error. Phones may be
    integers.
    """
    if all(len(fields) > 1 and _is_probability(fields[0]) for _, _, fields in lines):
        return True
    fractions = [len(fields) > 1 and _is_fraction(fields[0]) and _is_probability(fields[0]) for _, _, fields in lines]
    if sum(fractions) > len(fractions) / 2:
        where, word, _ = lines[fractions.index(False)]
        raise InputError(
            f"{where}: {word!r} has no probability above 0 and up to 1, but most words of {path} have one; "
            "add or remove them"
        )
    return False


def _is_probability(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None and "," not in text and 0 < float(text) <= 1


def _is_fraction(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None and not text.isdigit()


def _silence_phones(path: Path) -> dict[str, str]:
    """Returns the phones of silence and noise, from the user's name to ours."""
    names = {name: name for name in (SILENCE, SPOKEN_NOISE, NONSPOKEN_NOISE)}
    names |= {name.lower(): name for name in names} | {name.capitalize(): name for name in names}
    beside = path.with_name("silence_phones.txt")
    if beside.exists():
        for _, line in numbered_lines(beside):
            for phone in line.split():
                names.setdefault(phone, phone)
    return names


def _phone(name: str, silence: dict[str, str], marked: bool, where: str) -> str:
    if name == "<eps>" or name.startswith("#"):
        raise InputError(f"{where}: the phone name {name} is reserved; rename the phone")
    if any(unicodedata.category(c) == "Cc" for c in name):
        raise InputError(f"{where}: the phone name {name!r} has a control character; remove it")
    if _is_fraction(name):
        raise InputError(
            f"{where}: {name} is a number where a phone should be; {FORM}, with one number above 0 and up to 1; "
            "instead of lexiconp_silprob.txt give lexiconp.txt or lexicon.txt"
        )
    return silence.get(name, name.rsplit("_", 1)[0] if marked and POSITION.fullmatch(name) else name)


def _add(
    lexicon: Lexicon, word: str, phones: tuple[str, ...], where: str, silence: dict[str, str], issues: IssueCounter
) -> None:
    noise = [phone for phone in phones if phone in silence.values()]
    if noise and len(phones) > 1:
        raise InputError(
            f"{where}: {noise[0]} is a phone of silence or noise and cannot be part of the pronunciation of {word!r}; "
            "correct the line, or rename the phone"
        )
    if word.lower() in UNKNOWNS:
        lexicon.unknown.add(word)
    elif word in RESERVED_WORDS or phones == (SILENCE,):
        lexicon.silence.add(word)
    elif noise:
        lexicon.noises[word] = noise[0]
    elif phones in lexicon.entries.setdefault(word, []):
        issues.add("pronunciation a second time: once is enough", where)
    else:
        lexicon.entries[word].append(phones)
