"""Tests pronunciations in the lexicon's phones: by espeak-ng, by a model of the lexicon, or none."""

from __future__ import annotations

import importlib.util
import random

import pytest

from asr_am.errors import InputError
from local.kaldi import trained_g2p
from local.kaldi.g2p import held_out_errors, pronounce
from local.kaldi.lexicon import Lexicon

needs_phonetisaurus = pytest.mark.skipif(importlib.util.find_spec("phonetisaurus") is None, reason="no phonetisaurus")
needs_espeak = pytest.mark.skipif(importlib.util.find_spec("espeakng_loader") is None, reason="no espeakng-loader")

# CMUdict's pronunciations.
LEXICON = """\
APPLE AE P AH L|APRIL EY P R AH L|AREA EH R IY AH|AUGUST AO G AH S T|CODE K OW D|DECEMBER D IH S EH M B ER|EIGHT EY T
EIGHTEEN EY T IY N|EIGHTY EY T IY|ELEVEN IH L EH V AH N|ENTER EH N T ER|ERASE IH R EY S|FEBRUARY F EH B Y AH W EH R IY
FIFTEEN F IH F T IY N|FIFTY F IH F T IY|FIRST F ER S T|FIVE F AY V|FORTY F AO R T IY|FOUR F AO R
FOURTEEN F AO R T IY N|GO G OW|HALF HH AE F|HELP HH EH L P|HUNDRED HH AH N D R AH D|JANUARY JH AE N Y UW EH R IY
JULY JH UH L AY|JUNE JH UW N|MARCH M AA R CH|MAY M EY|NINE N AY N|NINETEEN N AY N T IY N|NINETY N AY N T IY|NO N OW
NOVEMBER N OW V EH M B ER|NUMBER N AH M B ER|OCTOBER AA K T OW B ER|ONE W AH N|REPEAT R IH P IY T|RUBOUT R AH B AW T
SECOND S EH K AH N D|SEPTEMBER S EH P T EH M B ER|SEVEN S EH V AH N|SEVENTEEN S EH V AH N T IY N
SEVENTY S EH V AH N T IY|SIX S IH K S|SIXTEEN S IH K S T IY N|SIXTY S IH K S T IY|START S T AA R T|STOP S T AA P
TEN T EH N|THIRD TH ER D|THIRTEEN TH ER T IY N|THIRTY TH ER D IY|THOUSAND TH AW Z AH N D|THREE TH R IY
TWELVE T W EH L V|TWENTY T W EH N T IY|TWO T UW|WEST W EH S T|YES Y EH S|ZERO Z IY R OW|STREET S T R IY T
AVENUE AE V AH N UW|PARK P AA R K|ROAD R OW D|DRIVE D R AY V|SHIP SH IH P
"""


def cmu() -> Lexicon:
    lines = [entry.split() for entry in LEXICON.replace("\n", "|").strip("|").split("|")]
    return Lexicon(entries={word: [tuple(phones)] for word, *phones in lines})


def test_a_hidden_table_is_found_again() -> None:
    """For symbols that stand for none, one or two phones, held-out words have no errors."""
    dice = random.Random(0)
    table = {f"s{n}": (f"P{n}",) for n in range(20)} | {"pair": ("P1", "X"), "mute": ()}
    words = [[dice.choice(list(table)) for _ in range(dice.randrange(2, 8))] for _ in range(400)]
    pairs = [(symbols, tuple(phone for symbol in symbols for phone in table[symbol])) for symbols in words]
    pairs = [pair for pair in pairs if pair[1]]
    assert held_out_errors(pairs, 50) < 0.02
    shuffled = [(symbols, dice.choice(pairs)[1]) for symbols, _ in pairs]
    assert held_out_errors(shuffled, 50) > 0.5


@needs_espeak
def test_unknown_words_are_pronounced_in_the_phones_of_the_lexicon() -> None:
    lexicon = cmu()
    made = pronounce(["FORTIES", "STEP", "\u8a71", "[NOISE]", "4"], lexicon, "en-US")
    assert made["STEP"] == ("S", "T", "EH", "P")
    assert made.keys() <= {"FORTIES", "STEP"}


@needs_espeak
def test_phones_that_are_no_sounds_are_refused() -> None:
    dice = random.Random(0)
    nonsense = Lexicon(entries={word: [tuple(dice.choices("QXZW", k=6))] for word in cmu().entries})
    with pytest.raises(InputError, match="of the phones of 6 known words are wrong"):
        pronounce(["STEP"], nonsense, "en-US")


@needs_espeak
def test_a_small_lexicon_is_refused() -> None:
    few = Lexicon(entries=dict(list(cmu().entries.items())[:10]))
    with pytest.raises(InputError, match="the lexicon has 10 words"):
        pronounce(["STEP"], few, "en-US")


def test_without_espeak_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install '.\[minicts\]'"):
        pronounce(["STEP"], cmu(), "en-US")


def spelt_as_spoken(words: int) -> Lexicon:
    """Returns words of one to three syllables, whose letters tell their phones: sh is one, and x is two."""
    dice, entries = random.Random(0), {}
    phones = {"b": "B", "d": "D", "k": "K", "sh": "S_H", "s": "S", "x": "K S", "a": "A|1", "i": "I", "o": "O"}
    while len(entries) < words:
        parts = [(dice.choice(["b", "d", "k", "sh", "s", "x"]), dice.choice("aio")) for _ in range(dice.randint(1, 3))]
        spelling = [letter for part in parts for letter in part]
        entries["".join(spelling).upper()] = [tuple(" ".join(phones[part] for part in spelling).split())]
    return Lexicon(entries=entries)


@needs_phonetisaurus
def test_a_model_of_the_lexicon_pronounces_words_like_it() -> None:
    lexicon = spelt_as_spoken(600)
    hidden = {word: lexicon.entries.pop(word)[0] for word in list(lexicon.entries)[-50:]}
    made = trained_g2p.pronounce([*hidden, "\u8a71", "WEX", "4"], lexicon)
    assert made.keys() == hidden.keys()
    assert sum(made[word] == phones for word, phones in hidden.items()) >= 45
    dice = random.Random(0)
    nonsense = Lexicon(entries={word: [tuple(dice.choices("QXZW", k=6))] for word in lexicon.entries})
    with pytest.raises(InputError, match=r"of the phones of 27 known words are wrong .*spelling of these words"):
        trained_g2p.pronounce(["BAX"], nonsense)
    with pytest.raises(InputError, match=r"the lexicon has 6\d words; 200 are needed"):
        trained_g2p.pronounce(["STEP"], cmu())


def test_without_phonetisaurus_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install phonetisaurus, or leave"):
        trained_g2p.pronounce(["STEP"], cmu())
