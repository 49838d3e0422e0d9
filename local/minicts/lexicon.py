"""The pronouncing dictionary: espeak's own phonemes, in the accents of the training speakers, as ARPAbet-like phones.

A word has the pronunciations that espeak uses for it alone and inside sentences (weak forms, flaps, linking r), without
the rare ones.
"""

from __future__ import annotations

from collections import defaultdict

from asr_am.errors import InputError
from local.minicts.conditions import SW
from local.minicts.espeak import Espeak
from local.minicts.text import Token

_SENTENCES = 2000  # that weak forms are counted in, at most
_MIN_SHARE = 0.06  # of a word's occurrences, below which a pronunciation is left out
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


def pronunciations(vocabulary: list[str], sentences: list[list[Token]], seed: int) -> dict[str, list[str]]:
    """Word -> its pronunciations, the most frequent first. Raises InputError where espeak pronounces nothing known."""
    counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with Espeak(seed) as espeak:
        for accent, weight in SW.accents.items():
            espeak.set_voice(accent)
            for word in vocabulary:
                counts[word][to_arpabet([phone for group in espeak.ipa(word.lower()) for phone in group], word)] += (
                    weight
                )
            for tokens in sentences[:_SENTENCES]:
                words = [token.word for token in tokens if not token.cut_from and not token.word.startswith("[")]
                groups = espeak.ipa(" ".join(word.lower() for word in words))
                if len(groups) != len(words):
                    continue  # espeak ran words together ("in the")
                for word, group in zip(words, groups, strict=True):
                    counts[word][to_arpabet(group, word)] += weight
    return {word: _frequent(counts[word]) for word in sorted(counts)}


def to_arpabet(ipa: list[str], word: str) -> str:
    """ "DH AX" for ["ð", "ə"]. Raises InputError for a symbol the table lacks."""
    unknown = [symbol for symbol in ipa if symbol not in _ARPABET]
    if unknown or not ipa:
        raise InputError(
            f"local/minicts/lexicon.py: espeak-ng says {ipa} for {word!r}; add {unknown} to the table there"
        )
    return " ".join(_ARPABET[symbol] for symbol in ipa)


def _frequent(counts: dict[str, float]) -> list[str]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_MAX_VARIANTS]
    return [phones for phones, count in ranked if count >= _MIN_SHARE * sum(counts.values())]
