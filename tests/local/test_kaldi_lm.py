from __future__ import annotations

from collections import Counter

from local.kaldi.lm import beyond


def test_places_are_for_words_that_the_transcripts_lack() -> None:
    known = Counter({"a": 9, "b": 8, "c": 3, "d": 2, "e": 1})
    assert beyond("abcdef", Counter("ab"), [known], 4) == {"e", "f"}
    assert beyond("abcdef", Counter("abf"), [known], 2) == {"c", "d", "e"}  # words of the transcripts stay
    assert beyond("abcdef", Counter(), [], 6) == set()
