"""Words of the Switchboard and Fisher transcripts as Kaldi's recipe (egs/swbd/s5c) writes them: lower case, noises as
[noise], [laughter] and [vocalized-noise], fragments with a hyphen. Acronyms are single letters, as in the references.

    MS98     [laughter-yeah] they_1 ab[solute]- [it'n/isn't] IBM's  ->  yeah they ab- it'n i b m's
    Fisher   (( i think )) t._v. [breath] 'cause                    ->  i think t v [noise] cause
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asr_am.data.textfile import numbered_lines, write_lines
from asr_am.errors import InputError

REMEDY = "get a complete copy of the release"
NOISES = {"[noise]": "NSN", "[laughter]": "LAU", "[vocalized-noise]": "SPN"}
LETTERS = {
    "a": "ey", "b": "b iy", "c": "s iy", "d": "d iy", "e": "iy", "f": "eh f", "g": "jh iy", "h": "ey ch", "i": "ay",
    "j": "jh ey", "k": "k ey", "l": "eh l", "m": "eh m", "n": "eh n", "o": "ow", "p": "p iy", "q": "k y uw",
    "r": "aa r", "s": "eh s", "t": "t iy", "u": "y uw", "v": "v iy", "w": "d ah b ax l y uw", "x": "eh k s",
    "y": "w ay", "z": "z iy",
}  # fmt: skip
SIBILANTS, VOICELESS = ("s", "ch"), ("f",)

# Rewriting of a word of the Mississippi State transcripts and of their dictionary. Brackets hold what was not said.
MS98_RULES = [
    (re.compile(r"(-?)\[laughter-(.+)\](-?)", re.IGNORECASE), r"\1\2\3"),  # said while laughing
    (re.compile(r"\[(.+)/.+\](-?)"), r"\1\2"),  # said / meant
    (re.compile(r"-?\[[^][]+\](.+)"), r"-\1"),  # the beginning was not said
    (re.compile(r"(.+)\[[^][]+\]-?"), r"\1-"),  # nor the end
    (re.compile(r"([^][]+)\[.+\]"), r"\1"),
    (re.compile(r"\{(.+)\}"), r"\1"),  # a coined word
    (re.compile(r"(.*\w)\[[^][]+\](\w.*)"), r"\1-\2"),  # nor the middle
]
ASIDES = ("<b_aside>", "<e_aside>", "[silence]")
VARIANT = re.compile(r"_\d")  # of a pronunciation: them_1

FISHER_NOISES = {
    "[breath]": "[noise]", "[cough]": "[noise]", "[lipsmack]": "[noise]", "[sigh]": "[noise]", "[sneeze]": "[noise]",
    "[noise]": "[noise]", "[mn]": "[vocalized-noise]", "[laugh]": "[laughter]", "[laughter]": "[laughter]",
}  # fmt: skip
FISHER_ACRONYM = re.compile(r"((?:[a-z]\._)*[a-z])\.('?s)?")
SHORT_FORMS = re.compile(r"'(blade|cause|course|frisco|okay|plain|specially)")
QUOTED = re.compile(r"(?<!\S)'(\S.*?)'(?!\S)")
# Marked as fragments, but words.
WHOLE_WORDS = {
    "acceptable", "arthritis", "ball", "cause", "comes", "course", "eight", "eighty", "field", "giving", "heard",
    "hood", "how", "king", "ninety", "okay", "paper", "press", "scripts", "store", "till", "vascular", "wood",
    "what", "york",
}  # fmt: skip


class Dictionary:
    """The Mississippi State dictionary as the recipe's lexicon.

    Attributes:
        entries: pronunciations of each word.
        acronyms: letters of words such as IBM, IBMs and IBM's, which are spelt in capital letters there.
    """

    def __init__(self, path: Path) -> None:
        """Raises InputError if the file is missing or has no pronunciation."""
        self.entries: dict[str, set[str]] = {letter: {phones} for letter, phones in LETTERS.items()}
        self.acronyms: dict[str, list[str]] = {}
        self.entries |= {f"{letter}'s": {_possessive(phones)} for letter, phones in LETTERS.items()}
        found = False
        for _, line in numbered_lines(path):
            fields = line.split()
            if len(fields) < 2 or fields[0].startswith("#"):
                continue
            found = True
            word, phones = ms98_word(fields[0]), " ".join(fields[1:])
            letters = _spelt_letters(word, phones)
            if letters:
                self.acronyms[word] = letters
            elif word and word.lower() not in NOISES and phones != "sil":
                self.entries.setdefault(word.lower(), set()).add(phones)
        if not found:
            raise InputError(f"{path}: has no pronunciation; {REMEDY}")

    def write(self, folder: Path) -> Path:
        """Writes lexicon.txt, and silence_phones.txt beside it. Returns the former."""
        lines = [f"{word} {phones}" for word, variants in sorted(self.entries.items()) for phones in sorted(variants)]
        noises = [f"{word} {phone}" for word, phone in NOISES.items()]
        write_lines(folder / "lexicon.txt", [*noises, *lines])
        write_lines(folder / "silence_phones.txt", ["SIL", *sorted(NOISES.values())])
        return folder / "lexicon.txt"


def _possessive(phones: str) -> str:
    last = phones.split()[-1]
    return f"{phones} {'ax z' if last in SIBILANTS else 's' if last in VOICELESS else 'z'}"


def _spelt_letters(word: str, phones: str) -> list[str]:
    """Returns the letters of an acronym, [] for a word that is not pronounced as its capital letters."""
    match = re.fullmatch(r"([A-Z]{2,})('?s)?", word)
    if not match:
        return []
    letters = list(match[1].lower())
    if match[2]:
        letters[-1] += "'s"
    said = [LETTERS[x] for x in match[1].lower()]
    endings = [[], ["s"], ["z"], ["ax", "z"]] if match[2] else [[]]
    return letters if any(phones.split() == [*" ".join(said).split(), *ending] for ending in endings) else []


def ms98_word(word: str) -> str:
    """Returns a word of the Mississippi State transcripts without their marks, in their case."""
    if word.lower() in NOISES:
        return word.lower()
    for pattern, replacement in MS98_RULES:
        word = re.sub(f"^(?:{pattern.pattern})$", replacement, word, flags=pattern.flags)
    return VARIANT.sub("", word)


def ms98_words(words: Sequence[str], acronyms: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the words of a segment of the Mississippi State transcripts."""
    kept = [ms98_word(word) for word in words if word.lower() not in ASIDES]
    spelt = [letter for word in kept if word for letter in acronyms.get(word, [word])]
    return [word.lower() for word in spelt]


def fisher_words(text: str) -> list[str]:
    """Returns the words of a segment of the Fisher transcripts."""
    text = re.sub(r"<[^>]*>|\[\[skip\]\]|\[pause\]", " ", text.lower())
    text = re.sub(r"[*()?]", "", text).replace(",", " ")
    text = " ".join(text.split())
    text = SHORT_FORMS.sub(r"\1", text).replace("'em", "-em")
    text = QUOTED.sub(r"\1", text)
    words = []
    for word in text.split():
        if match := FISHER_ACRONYM.fullmatch(word):
            letters = match[1].split("._")
            words += [*letters[:-1], letters[-1] + ("'s" if match[2] else "")]
        elif word.startswith("non-") and len(word) > 4:
            words += ["non", word[4:]]
        elif word.strip("-") in WHOLE_WORDS:
            words.append(word.strip("-"))
        elif word.strip("-'"):
            words.append(FISHER_NOISES.get(word, re.sub("^'", "-", word)))
    return words


def ms98_segments(paths: Sequence[Path]) -> Iterator[tuple[str, int, float, float, str]]:
    """Yields file and line, channel, begin, end, text of each segment of a call, given the files of its sides."""
    for path in paths:
        for number, line in numbered_lines(path):
            if line.strip():
                fields = line.split(maxsplit=3)
                try:
                    channel, begin, end = "AB".index(fields[0][6]), float(fields[1]), float(fields[2])
                    if not 0 <= begin <= end < math.inf:
                        raise ValueError
                except (IndexError, ValueError) as error:
                    raise InputError(f"{path}:{number}: not `sw<call><A|B>-... begin end words`; {REMEDY}") from error
                yield f"{path}:{number}", channel, begin, end, "".join(fields[3:])


def fisher_segments(paths: Sequence[Path]) -> Iterator[tuple[str, int, float, float, str]]:
    """Yields file and line, channel, begin, end, text of each segment of a call."""
    for path in paths:
        for number, line in numbered_lines(path):
            match = re.fullmatch(r"(\d+(?:\.\d*)?)\s+(\d+(?:\.\d*)?)\s+([AB]):\s*(.*)", line.strip())
            if match:
                begin, end = float(match[1]), float(match[2])
                if path.stem == "fe_03_11487" and (begin, end) == (31.09, 234.06):  # a known error
                    begin = 231.09
                yield f"{path}:{number}", "AB".index(match[3]), begin, end, match[4]
            elif line.strip() and not line.startswith("#"):
                raise InputError(f"{path}:{number}: not `begin end A: words`; {REMEDY}")
