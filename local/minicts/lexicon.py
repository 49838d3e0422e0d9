"""Pronouncing dictionary: espeak's phonemes in the accents of the training speakers, as ARPAbet-like phones.

A word has the pronunciations that espeak uses for it alone and in sentences (weak forms, flaps, linking r), except rare
ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from asr_am.errors import InputError
from local.minicts.conditions import SW
from local.minicts.espeak import Espeak
from local.minicts.text import Token

_SENTENCES = 2000  # at most, to count weak forms
_MIN_SHARE = 0.04  # smallest share of a word's occurrences for a pronunciation
_MAX_VARIANTS = 4

_ARPABET = {
    "p": "P", "b": "B", "t": "T", "d": "D", "k": "K", "ɡ": "G", "ɾ": "DX", "ʔ": "T", "tʃ": "CH", "dʒ": "JH",
    "f": "F", "v": "V", "θ": "TH", "ð": "DH", "s": "S", "z": "Z", "ʃ": "SH", "ʒ": "ZH", "h": "HH",
    "m": "M", "n": "N", "ŋ": "NG", "n̩": "AX N", "m̩": "AX M", "l": "L", "əl": "AX L", "ɹ": "R", "r": "R",
    "w": "W", "j": "Y",
    "iː": "IY", "i": "IY", "ɪ": "IH", "ᵻ": "IH", "ɛ": "EH", "e": "EH", "æ": "AE", "a": "AE", "ɛə": "AE",
    "ɑː": "AA", "ɑ": "AA", "ɒ": "AO", "ɔː": "AO", "ɔ": "AO", "ʌ": "AH", "ʊ": "UH", "uː": "UW", "u": "UW",
    "ə": "AX", "ɐ": "AX", "ɚ": "ER", "ɜː": "ER", "əɪ": "ER",
    "eɪ": "EY", "aɪ": "AY", "ɔɪ": "OY", "aʊ": "AW", "oʊ": "OW", "əʊ": "OW",
    "iə": "IH AX", "eə": "EH AX", "ʊə": "UH AX", "aɪə": "AY AX", "aʊə": "AW AX", "aɪɚ": "AY ER", "aʊɚ": "AW ER",
    "ɑːɹ": "AA R", "ɔːɹ": "AO R", "oːɹ": "AO R", "ɛɹ": "EH R", "ɪɹ": "IH R", "ʊɹ": "UH R", "iːɹ": "IH R", "uːɹ": "UH R",
}  # fmt: skip


Counts = dict[str, dict[str, float]]  # word -> pronunciation -> how often


def pronunciations(vocabulary: list[str], sentences: list[list[Token]], seed: int) -> dict[str, list[str]]:
    """Returns the pronunciations of each word, the most frequent first.

    Args:
        vocabulary: words to pronounce.
        sentences: text to count weak forms in.
        seed: of the voices.

    Raises:
        InputError: the table lacks a phoneme.
    """
    counts: Counts = defaultdict(lambda: defaultdict(float))
    known = set(vocabulary)
    texts = [[token.word for token in tokens if token.word in known] for tokens in sentences[:_SENTENCES]]
    with Espeak(seed) as espeak:
        for accent, weight in SW.accents.items():
            espeak.set_voice(accent)
            for word in vocabulary:
                ipa = [phone for group in espeak.ipa(word.lower()) for phone in group]
                phones = to_arpabet(ipa)
                if not phones:
                    raise InputError(f"local/minicts/lexicon.py: its table lacks a phoneme of {word!r}, {ipa}; add it")
                counts[word][phones] += weight
            for words in texts:
                _count_in_sentence(words, espeak, weight, counts)
            _count_run_together(Counter(pair for words in texts for pair in pairwise(words)), espeak, weight, counts)
    return {word: _frequent(counts[word]) for word in sorted(counts)}


def to_arpabet(ipa: list[str]) -> str | None:
    """Returns "DH AX" for ["ð", "ə"], None for symbols that the table lacks."""
    return " ".join(_ARPABET[symbol] for symbol in ipa) if _ARPABET.keys() >= set(ipa) else None


def _count_in_sentence(words: list[str], espeak: Espeak, weight: float, counts: Counts) -> None:
    groups = espeak.ipa(" ".join(words).lower())
    if len(groups) != len(words):
        return  # espeak joined words, see below
    for word, group in zip(words, groups, strict=True):
        if phones := to_arpabet(group):
            counts[word][phones] += weight


def _count_run_together(pairs: Counter[tuple[str, str]], espeak: Espeak, weight: float, counts: Counts) -> None:
    """Counts pairs like "for the" that espeak joins: the first word is the rest before a known form of the second."""
    for (first, second), times in pairs.items():
        groups = espeak.ipa(f"{first} {second}".lower())
        joined = to_arpabet(groups[0]) if len(groups) == 1 else None
        for ending in list(counts[second]):
            if joined and joined.endswith(f" {ending}"):
                counts[first][joined.removesuffix(f" {ending}")] += weight * times
                break


def _frequent(counts: dict[str, float]) -> list[str]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_MAX_VARIANTS]
    return [phones for phones, count in ranked if count >= _MIN_SHARE * sum(counts.values())]
