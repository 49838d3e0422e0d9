"""The pronunciation lexicon: reading, checks, silence phones, position markers, disambiguation symbols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from asr_am.data.textfile import numbered_lines, split_words
from asr_am.errors import InputError

SILENCE, SPOKEN_NOISE, NONSPOKEN_NOISE = "SIL", "SPN", "NSN"
UNKNOWN = "<unk>"
BEGIN, END, INTERNAL, SINGLETON = POSITIONS = ("_B", "_E", "_I", "_S")
RESERVED_WORDS = frozenset({"<eps>", "#0", "<s>", "</s>"})


@dataclass(frozen=True)
class Pronunciation:
    """A line of a lexicon. `probability` is that of the phones given the word, or relative to its likeliest ones."""

    word: str
    phones: tuple[str, ...]
    probability: float = field(default=1.0, compare=False)


@dataclass(frozen=True)
class Lexicon:
    """All pronunciations with the phones they use.

    Attributes:
        entries: the pronunciations, sorted.
        silence_phones: SIL SPN NSN and further phones of nonspeech.txt. They have no position markers.
        nonsilence_phones: the other phones in the order of phones.txt.
        roots: phones that share a root of the decision tree.
        position_dependent: whether speech phones have position markers.
    """

    entries: tuple[Pronunciation, ...]
    silence_phones: tuple[str, ...]
    nonsilence_phones: tuple[str, ...]
    roots: tuple[tuple[str, ...], ...]
    position_dependent: bool = False

    @property
    def words(self) -> list[str]:
        """All words, sorted by code point."""
        return sorted({entry.word for entry in self.entries})


def read_lexicon(
    lexicon_path: Path, nonspeech_path: Path | None = None, probabilities_path: Path | None = None
) -> Lexicon:
    """Reads `WORD PHONE...` lines and optional `WORD PHONE` lines for noises. Adds `<unk>` (SPN) and silence.

    Probabilities are optional `WORD PROBABILITY PHONE...` lines for some of the pronunciations. The others have 1.

    A word of lexicon.txt with a single silence phone as its pronunciation counts as a noise too.

    Raises:
        InputError: with file and line, for entries that cannot be in a transducer or make a phone both silence and
            speech.
    """
    noises = _read_entries(nonspeech_path) if nonspeech_path is not None and nonspeech_path.exists() else {}
    for noise, where in noises.items():
        if len(noise.phones) != 1:
            raise InputError(f"{where}: a noise has exactly one phone, {noise.word!r} has {len(noise.phones)}")
    defaults = (SILENCE, SPOKEN_NOISE, NONSPOKEN_NOISE)
    further = {noise.phones[0] for noise in noises} - set(defaults)
    silence_phones = (*defaults, *sorted(further))
    spoken = _read_entries(lexicon_path)
    if probabilities_path is not None and probabilities_path.exists():
        known = _read_probabilities(probabilities_path)
        spoken = {Pronunciation(e.word, e.phones, known.get((e.word, e.phones), 1.0)): w for e, w in spoken.items()}
    for entry, where in spoken.items():
        _check_spoken(entry, where, frozenset(silence_phones))
        if entry in noises:
            raise InputError(f"{where}: {entry.word!r} is also in {noises[entry]}; remove one")
    nonsilence_phones = {phone for entry in spoken for phone in entry.phones} - set(silence_phones)
    if not nonsilence_phones:
        raise InputError(f"{lexicon_path}: has no pronunciation made of speech phones; add one")
    for entry, where in (noises | spoken).items():
        if entry.word == UNKNOWN and entry.phones != (SPOKEN_NOISE,):
            raise InputError(f"{where}: {UNKNOWN} must be pronounced {SPOKEN_NOISE}; remove the line")
    entries = {Pronunciation(UNKNOWN, (SPOKEN_NOISE,)), *noises, *spoken}
    ordered = tuple(sorted(nonsilence_phones))
    return Lexicon(
        entries=tuple(sorted(entries, key=lambda entry: (entry.word, entry.phones))),
        silence_phones=silence_phones,
        nonsilence_phones=ordered,
        roots=(*((phone,) for phone in silence_phones), *_roots(ordered)),
    )


def base_phone(phone: str) -> str:
    """Returns the phone without trailing digits, which mark stress or tone. A name of digits only stays."""
    return phone.rstrip("0123456789") or phone


def strip_position(phone: str) -> str:
    """Returns the phone without its position marker, if any."""
    return phone[:-2] if phone.endswith(POSITIONS) else phone


def _roots(phones: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups phones that differ only in stress or tone, as Kaldi does. The tree may ask for the digit."""
    groups: dict[str, list[str]] = {}
    for phone in phones:
        groups.setdefault(base_phone(phone), []).append(phone)
    return [tuple(group) for group in groups.values()]


def _read_entries(path: Path) -> dict[Pronunciation, str]:
    """Returns the pronunciations, each with its place (`file:line`)."""
    entries: dict[Pronunciation, str] = {}
    for number, line in numbered_lines(path, "run stage 0 (data) again"):
        where = f"{path}:{number}"
        fields = split_words(line)
        if len(fields) < 2:
            what = f"the word {fields[0]!r} has an empty pronunciation" if fields else "is an empty line"
            raise InputError(f"{where}: {what}; write WORD PHONE1 PHONE2 ...")
        entry = Pronunciation(fields[0], tuple(fields[1:]))
        if entry.word in RESERVED_WORDS:
            raise InputError(f"{where}: the word {entry.word} is reserved; remove the line")
        for phone in entry.phones:
            if phone == "<eps>" or phone.startswith("#"):
                raise InputError(f"{where}: the phone name {phone} is reserved; rename the phone")
        if entry in entries:
            raise InputError(f"{where}: the same pronunciation of {entry.word!r} as in {entries[entry]}; remove one")
        entries[entry] = where
    if not entries:
        raise InputError(f"{path}: is empty; write WORD PHONE1 PHONE2 ...")
    return entries


def _read_probabilities(path: Path) -> dict[tuple[str, tuple[str, ...]], float]:
    """Returns the probability of each (word, phones)."""
    found = {}
    for number, line in numbered_lines(path, "run stage 0 (data) again"):
        word, text, *phones = [*split_words(line), "", ""]
        try:
            found[word, tuple(phone for phone in phones if phone)] = probability = float(text)
        except ValueError:
            probability = 0.0
        if not 0 < probability <= 1:
            raise InputError(f"{path}:{number}: the probability must be above 0 and at most 1, not {text!r}")
    return found


def _check_spoken(entry: Pronunciation, where: str, silence_phones: frozenset[str]) -> None:
    both = [phone for phone in entry.phones if phone in silence_phones]
    if both and len(entry.phones) > 1:
        raise InputError(
            f"{where}: {both[0]} is a silence phone and cannot be part of the pronunciation of {entry.word!r}; "
            "rename the phone, or give the word in nonspeech.txt"
        )


def mark_positions(lexicon: Lexicon) -> Lexicon:
    """Adds _B, _I, _E or _S to every speech phone, by its position in the word.

    Raises:
        InputError: a marked name is another phone's name (a lexicon that has markers already).
    """
    marked = tuple(phone + position for phone in lexicon.nonsilence_phones for position in POSITIONS)
    taken = set(lexicon.nonsilence_phones) | set(lexicon.silence_phones)
    for name in marked:
        if name in taken:
            raise InputError(
                f"lexicon.txt: the phone {name} looks like the phone {name[:-2]} with a position marker; "
                "take the markers out of the lexicon"
            )
    silence = frozenset(lexicon.silence_phones)
    return Lexicon(
        entries=tuple(Pronunciation(e.word, _positioned(e.phones, silence), e.probability) for e in lexicon.entries),
        silence_phones=lexicon.silence_phones,
        nonsilence_phones=marked,
        roots=tuple(
            root if root[0] in silence else tuple(phone + position for phone in root for position in POSITIONS)
            for root in lexicon.roots
        ),
        position_dependent=True,
    )


def _positioned(phones: tuple[str, ...], silence: frozenset[str]) -> tuple[str, ...]:
    if phones[0] in silence:
        return phones
    if len(phones) == 1:
        return (phones[0] + SINGLETON,)
    return (phones[0] + BEGIN, *(phone + INTERNAL for phone in phones[1:-1]), phones[-1] + END)


def disambiguate(entries: tuple[Pronunciation, ...]) -> tuple[list[tuple[Pronunciation, int]], int]:
    """Assigns disambiguation symbols as Kaldi's add_lex_disambig.pl does.

    A pronunciation needs a symbol if another word has the same or if it is a prefix of another. Otherwise L composed
    with G could not be determinized.

    Returns:
        Each pronunciation with the number k of the symbol #k that ends it (0: none), and the largest k.
    """
    how_often = Counter(entry.phones for entry in entries)
    prefixes = {phones[:length] for phones in how_often for length in range(1, len(phones))}
    used: Counter[tuple[str, ...]] = Counter()
    numbered = []
    for entry in entries:
        number = 0
        if how_often[entry.phones] > 1 or entry.phones in prefixes:
            used[entry.phones] += 1
            number = used[entry.phones]
        numbered.append((entry, number))
    return numbered, max(used.values(), default=0)
