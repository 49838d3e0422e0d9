"""Words and pieces as numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from asr_am.errors import InputError
from asr_am.lang.units import BOUNDARY, UNKNOWN, make_units

LEXICON = ["GO", "GOING", "SEE", "SEEING", "<unk>", "RARE"]
COUNTS = Counter({"GO": 30, "SEE": 20, "GOING": 20, "SEEING": 10, "<unk>": 5, "OUTSIDE": 2})


def test_words_are_numbered_by_falling_frequency() -> None:
    units = make_units("word", LEXICON, COUNTS, size=0)
    assert units.names == ["</s>", "<unk>", "GO", "GOING", "SEE", "SEEING", "RARE"]
    assert units.of("GOING") == (3,) and units.of("<unk>") == units.of("OUTSIDE") == (UNKNOWN,)
    assert BOUNDARY == 0 and len(units) == 7


def test_pieces_spell_every_word_and_are_numbered_by_falling_frequency() -> None:
    units = make_units("sentencepiece", LEXICON, COUNTS, size=15)
    assert len(units) == 16 and units.names[:2] == ["</s>", "<unk>"]
    for word in ("GO", "GOING", "SEE", "SEEING", "OUTSIDE"):
        assert "".join(units.names[unit] for unit in units.of(word)) == f"▁{word}"
    assert UNKNOWN in units.of("RARE"), "a letter that the text does not have"
    frequency: Counter[int] = Counter()
    for word in COUNTS.keys() - {"<unk>"}:
        for unit in units.of(word):
            frequency[unit] += COUNTS[word]
    counts = [frequency[unit] for unit in range(2, len(units))]
    assert counts == sorted(counts, reverse=True) and max(map(len, units.spelling.values())) > 1
    assert make_units("sentencepiece", LEXICON, COUNTS, size=15) == units


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match=r"lm.pieces=5000: sentencepiece cannot learn that many \(.*too high.*<= \d+"):
        make_units("sentencepiece", LEXICON, COUNTS, size=5000)
    with pytest.raises(InputError, match=r"lm\.units=letters"):
        make_units("letters", LEXICON, COUNTS, size=10)  # type: ignore[arg-type]


def test_frequent_long_words_are_learned_from() -> None:
    """sentencepiece ignores lines above a limit in bytes. The Tamil word has 45 characters, 135 bytes."""
    long, tamil = "ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHIJKLMNOPQRS", "தமிழ்" * 9
    units = make_units("sentencepiece", [long, tamil], Counter({long: 100, tamil: 1000, "GO": 3}), size=36)
    for word in (long, tamil):
        assert "".join(units.names[unit] for unit in units.of(word)) == f"▁{word}"


def test_a_word_without_pieces_is_unknown() -> None:
    units = make_units("sentencepiece", [*LEXICON, "▁"], COUNTS, size=15)
    assert units.spelling["▁"] == () and units.of("▁") == (UNKNOWN,)
