"""Pronounces words that the lexicon lacks with espeak-ng, in the phones of the lexicon, or without one in espeak's.

espeak returns IPA symbols. The phones for each symbol are learnt from words that both know: every symbol becomes none,
one or two phones, by Viterbi training of a one-state joint model (a small Sequitur, Bisani and Ney, Speech
Communication 50, 2008, with chunks of one symbol on one side). A tenth of the known words is held out to measure the
phone error rate. If it is too high, the phone sets do not match and no pronunciations are made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

import kaldialign

from asr_am.errors import InputError
from local.kaldi.lexicon import Lexicon

logger = logging.getLogger(__name__)

Phones = tuple[str, ...]
MAX_WORDS = 3000  # for training
MIN_WORDS = 40
MAX_PHONE_ERRORS = 0.35  # on held-out words
ITERATIONS = 8
LONGEST = 2  # phones per symbol


class Mapping:
    """Counts of the chunks of phones seen with each IPA symbol."""

    def __init__(self, counts: dict[str, Counter[Phones]]) -> None:
        self._counts = counts
        self._best = {symbol: max(sorted(chunks), key=chunks.__getitem__) for symbol, chunks in counts.items()}

    @classmethod
    def learn(cls, pairs: Sequence[tuple[Sequence[str], Phones]]) -> Mapping:
        """Learns from (symbols, phones) of known words. The first counts come from chunks near the diagonal."""
        counts: dict[str, Counter[Phones]] = defaultdict(Counter)
        for symbols, phones in pairs:
            for i, symbol in enumerate(symbols):
                middle = (i + 0.5) * len(phones) / len(symbols)
                for start in range(len(phones)):
                    counts[symbol][phones[start : start + 1]] += math.exp(-2 * abs(start + 0.5 - middle))  # type: ignore[assignment]
        for _ in range(ITERATIONS):
            model = cls(counts)
            counts = defaultdict(Counter)
            for symbols, phones in pairs:
                for symbol, chunk in model._align(symbols, phones):
                    counts[symbol][chunk] += 1
        return cls(counts)

    def _align(self, symbols: Sequence[str], phones: Phones) -> list[tuple[str, Phones]]:
        """Returns the cheapest division of `phones` among `symbols`, [] if there is none."""
        best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
        for symbol in symbols:
            row: dict[int, tuple[float, int]] = {}
            for start, (cost, _) in best[-1].items():
                for end in range(start, min(start + LONGEST, len(phones)) + 1):
                    total = cost + self._cost(symbol, phones[start:end])
                    if total < row.get(end, (math.inf, 0))[0]:
                        row[end] = (total, start)
            best.append(row)
        end, chunks = len(phones), []
        if end not in best[-1]:
            return []
        for symbol, row in zip(reversed(symbols), reversed(best[1:]), strict=True):
            start = row[end][1]
            chunks.append((symbol, phones[start:end]))
            end = start
        return chunks[::-1]

    def _cost(self, symbol: str, chunk: Phones) -> float:
        """Returns -log P(chunk | symbol), smoothed. An unseen chunk of two phones is composed of its parts."""
        seen = self._counts.get(symbol, Counter())
        count = seen[chunk] if chunk in seen else 0.5 * min((seen[(p,)] for p in chunk), default=0.3) if chunk else 0.3
        return -math.log((count + 0.05) / (sum(seen.values()) + 1.0)) + 0.5 * abs(len(chunk) - 1)

    def phones(self, symbols: Sequence[str]) -> Phones | None:
        """Returns the best chunks of all symbols, None if a symbol is unknown or the result is empty."""
        if not all(symbol in self._best for symbol in symbols):
            return None
        return tuple(phone for symbol in symbols for phone in self._best[symbol]) or None


def pronounce(words: Collection[str], lexicon: Lexicon, voice: str) -> dict[str, Phones]:
    """Returns pronunciations of those of `words` that can be pronounced.

    Args:
        words: words to pronounce.
        lexicon: known pronunciations. Without any, the phones are espeak's IPA symbols.
        voice: espeak-ng voice, such as "en-US".

    Raises:
        InputError: espeak-ng is not installed, or its phones cannot be mapped.
    """
    if importlib.util.find_spec("espeakng_loader") is None:
        raise InputError(
            "--g2p espeak: needs espeak-ng, whose wheel espeakng-loader (GPL 3, hence optional) is not installed; run "
            ".venv/bin/pip install '.[minicts]', or leave --g2p out"
        )
    from local.minicts.espeak import Espeak

    if not lexicon.entries:
        with Espeak(seed=0) as espeak:
            espeak.set_voice(voice)
            spoken = {word: tuple(_symbols(espeak, word)) for word in words if letters(word)}
        return {word: phones for word, phones in spoken.items() if phones}
    known = sample(word for word in lexicon.entries if letters(word))[:MAX_WORDS]
    alphabet = set().union(*map(letters, known))
    spelt = [word for word in words if letters(word) and letters(word) <= alphabet]
    with Espeak(seed=0) as espeak:
        espeak.set_voice(voice)
        symbols = {word: _symbols(espeak, word) for word in [*known, *spelt]}
    pairs = [(symbols[word], lexicon.entries[word][0]) for word in known if symbols[word]]
    if len(pairs) < MIN_WORDS:
        raise InputError(
            f"--g2p espeak: the lexicon has {len(pairs)} words that espeak-ng can pronounce; {MIN_WORDS} are needed "
            "to learn how its sounds map to your phones; add pronunciations to the lexicon, or leave --g2p out"
        )
    cut = max(len(pairs) // 10, 5)
    errors = held_out_errors(pairs, cut)
    if errors > MAX_PHONE_ERRORS:
        raise InputError(
            f"--g2p espeak: {errors:.0%} of the phones of {cut} known words are wrong (at most "
            f"{MAX_PHONE_ERRORS:.0%} is of use): the voice {voice} (corpus.prepare.g2p_voice) does not speak the "
            "language of the lexicon, or its phones do not stand for sounds; leave --g2p out"
        )
    logger.info("espeak-ng's sounds as phones of the lexicon: %.0f %% wrong on %d known words", 100 * errors, cut)
    mapping = Mapping.learn(pairs)
    made = {word: mapping.phones(symbols[word]) for word in spelt}
    return {word: phones for word, phones in made.items() if phones}


def held_out_errors(pairs: Sequence[tuple[Sequence[str], Phones]], cut: int) -> float:
    """Returns the phone error rate on the first `cut` pairs of a mapping that is learnt from the others."""
    mapping = Mapping.learn(pairs[cut:])
    return phone_error_rate((phones, mapping.phones(symbols) or ()) for symbols, phones in pairs[:cut])


def letters(word: str) -> set[str]:
    """Returns the letters of a word without accents, {} unless it consists of letters, apostrophes and hyphens."""
    marks = unicodedata.normalize("NFD", word.casefold())
    base = {c for c in marks if c not in "'-" and unicodedata.category(c)[0] != "M"}
    return base if all(c.isalpha() for c in base) else set()


def phone_error_rate(pairs: Iterable[tuple[Phones, Phones]]) -> float:
    """Returns insertions, deletions and substitutions per phone of (expected, found). Stress, a digit at the end, is
    ignored.
    """
    wrong = total = 0
    for pair in pairs:
        expected, found = ([phone.rstrip("0123456789") or phone for phone in side] for side in pair)
        wrong += kaldialign.edit_distance(expected, found)["total"]
        total += len(expected)
    return wrong / max(total, 1)


def sample(words: Iterable[str]) -> list[str]:
    """Returns words in an order that depends on each word alone."""
    return sorted(words, key=lambda word: hashlib.sha256(word.encode()).digest())


def _symbols(espeak: object, word: str) -> list[str]:
    groups = espeak.ipa(word.lower())  # type: ignore[attr-defined]
    return [symbol for group in groups for symbol in group if "(" not in symbol]  # (en) marks another language
