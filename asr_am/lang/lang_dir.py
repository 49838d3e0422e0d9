"""The lang directory in memory: what later stages need to know about phones and words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from asr_am.data.textfile import load_json, numbered_lines, split_words
from asr_am.errors import InputError
from asr_am.lang.lexicon import BEGIN, END, RESERVED_WORDS, SINGLETON

NUMBER = re.compile("[0-9]{1,9}")
REDO = "run stage 1 (lang) again"
UNSEEN = "unseen"  # folder in that of an LM that knows dev: another LM, to decode dev with


@dataclass(frozen=True)
class Lang:
    """A lang directory. Phones and words are Kaldi symbol ids, 0 is epsilon.

    Attributes:
        directory: where it was read from.
        phones, words: symbol -> id.
        silence_phones, nonsilence_phones: phone ids.
        optional_silence: phone id of SIL.
        unk: word id of `<unk>`.
        pronunciations: word -> its pronunciations in phone ids, without disambiguation symbols.
        disambig: phone ids of #0 #1 ... in that order.
        roots: lists of phone ids that share a root of the decision tree. Together they are all silence and nonsilence
            phones.
        position_dependent: whether speech phones have position markers.
        phone_names, word_names: id -> symbol.
    """

    directory: Path
    phones: dict[str, int]
    words: dict[str, int]
    silence_phones: list[int]
    nonsilence_phones: list[int]
    optional_silence: int
    unk: int
    pronunciations: dict[str, list[tuple[int, ...]]]
    disambig: list[int]
    roots: list[list[int]]
    position_dependent: bool
    phone_names: dict[int, str] = field(init=False, repr=False)
    word_names: dict[int, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "phone_names", {number: name for name, number in self.phones.items()})
        object.__setattr__(self, "word_names", {number: name for name, number in self.words.items()})

    @classmethod
    def load(cls, lang_dir: Path) -> Lang:
        """Reads a directory that `prepare_lang` wrote. Raises InputError if files are missing or inconsistent."""
        lang_dir = Path(lang_dir)
        phones = read_symbols(lang_dir / "phones.txt")
        words = read_symbols(lang_dir / "words.txt")
        path = lang_dir / "lang.json"
        try:
            description = load_json(path)
            return cls(
                directory=lang_dir,
                phones=phones,
                words=words,
                silence_phones=[phones[name] for name in description["silence_phones"]],
                nonsilence_phones=[phones[name] for name in description["nonsilence_phones"]],
                optional_silence=phones[description["optional_silence"]],
                unk=words[description["unk"]],
                pronunciations=_read_pronunciations(lang_dir / "lexicon.txt", phones, words),
                disambig=[number for name, number in phones.items() if name.startswith("#")],
                roots=[[phones[name] for name in root] for root in description["roots"]],
                position_dependent=bool(description["position_dependent"]),
            )
        except KeyError as error:
            raise InputError(f"{path}: {error.args[0]!r} is missing here or in a symbol table; {REDO}") from error
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); {REDO}") from error

    def word_ids(self, text: str) -> list[int]:
        """Returns the word ids of a transcript, `<unk>` for words outside the lexicon."""
        return [self.words.get(word, self.unk) for word in split_words(text)]

    def is_word_begin(self, phone: int) -> bool:
        """True if the phone is marked as the first of a word. False for silence phones and without markers."""
        return self._is_marked(phone) and self.phone_names[phone].endswith((BEGIN, SINGLETON))

    def is_word_end(self, phone: int) -> bool:
        """True if the phone is marked as the last of a word. False for silence phones and without markers."""
        return self._is_marked(phone) and self.phone_names[phone].endswith((END, SINGLETON))

    def _is_marked(self, phone: int) -> bool:
        return self.position_dependent and phone not in self.silence_phones and phone not in self.disambig


def write_symbols(path: Path, symbols: dict[str, int]) -> None:
    """Writes a Kaldi symbol table."""
    path.write_text("".join(f"{name} {number}\n" for name, number in symbols.items()), encoding="utf-8")


def read_symbols(path: Path, remedy: str = REDO) -> dict[str, int]:
    """Reads a Kaldi symbol table in the order of the file. Raises InputError with the remedy if it is not one."""
    symbols: dict[str, int] = {}
    for number, line in numbered_lines(path, remedy):
        fields = split_words(line)
        if len(fields) != 2 or not NUMBER.fullmatch(fields[1]) or fields[0] in symbols:
            raise InputError(f"{path}:{number}: not a symbol and its number, or a duplicate: {line!r}; {remedy}")
        symbols[fields[0]] = int(fields[1])
    if symbols.get("<eps>") != 0 or "#0" not in symbols or len(set(symbols.values())) != len(symbols):
        raise InputError(f"{path}: lacks <eps> 0 or #0, or has a duplicate number; {remedy}")
    return symbols


def vocabulary(words: dict[str, int]) -> list[str]:
    """Returns the words of words.txt that an LM may predict: all with a pronunciation, including `<unk>`."""
    return [word for word in words if word not in RESERVED_WORDS]


def _read_pronunciations(path: Path, phones: dict[str, int], words: dict[str, int]) -> dict[str, list[tuple[int, ...]]]:
    pronunciations: dict[str, list[tuple[int, ...]]] = {}
    for number, line in numbered_lines(path, REDO):
        word, *names = split_words(line) or [""]
        if not names or any(name not in phones for name in names):
            raise InputError(f"{path}:{number}: has no phones or one that phones.txt lacks; {REDO}")
        pronunciations.setdefault(word, []).append(tuple(phones[name] for name in names))
    if pronunciations.keys() != set(vocabulary(words)):
        raise InputError(f"{path}: has other words than words.txt; {REDO}")
    return pronunciations
