"""Kneser-Ney compared with a slow reference written from Chen & Goodman (1998), section 3."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_am.errors import InputError
from asr_am.lang.ngram import estimate

WORDS = ["a", "b", "c", "d", "e"]


class Reference:
    """Equations 19 to 26, one probability at a time."""

    def __init__(
        self, sentences: Sequence[Sequence[str]], vocabulary: Sequence[str], order: int, min_count: int = 1
    ) -> None:
        self.order, self.min_count = order, min_count
        self.outcomes = [*vocabulary, "</s>", "<unk>"]
        known = set(vocabulary)
        padded = [["<s>", *(w if w in known else "<unk>" for w in s), "</s>"] for s in sentences]
        raw = Counter(tuple(s[i : i + n]) for s in padded for n in range(1, order + 1) for i in range(len(s) - n + 1))
        self.raw = raw
        self.count: Counter[tuple[str, ...]] = Counter()
        for ngram in raw:
            if len(ngram) == order or (ngram[0] == "<s>" and len(ngram) > 1):
                self.count[ngram] = raw[ngram]
            if len(ngram) > 1:
                self.count[ngram[1:]] += 1  # one more distinct word to the left
        if order == 1:
            del self.count[("<s>",)]

    def discount(self, n: int, count: int) -> float:
        sizes = Counter(c for ngram, c in self.count.items() if len(ngram) == n)
        n1, n2, n3, n4 = sizes[1], sizes[2], sizes[3], sizes[4]
        plain = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
        if n1 and n2 and n3 and n4:
            d = [1 - 2 * plain * n2 / n1, 2 - 3 * plain * n3 / n2, 3 - 4 * plain * n4 / n3]
            if min(d) > 0:
                return d[min(count, 3) - 1]
        return plain

    def prob(self, history: tuple[str, ...], word: str) -> float:
        n = len(history) + 1
        lower = self.prob(history[1:], word) if history else 1 / len(self.outcomes)
        followers = {w: self.count[(*history, w)] for w in self.outcomes if self.count[(*history, w)]}
        total = sum(followers.values())
        if not total:
            return lower
        taken = {w: self.discount(n, c) if self.listed((*history, w)) else c for w, c in followers.items()}
        kept = followers[word] - taken[word] if word in followers else 0.0
        gamma = sum(taken.values()) / total
        return kept / total + gamma * lower

    def listed(self, ngram: tuple[str, ...]) -> bool:
        return len(ngram) < 3 or self.raw[ngram] >= self.min_count

    def histories(self) -> list[tuple[str, ...]]:
        return [h for h in {g[:-1] for g in self.count} if "</s>" not in h]


corpora = st.lists(st.lists(st.sampled_from([*WORDS, "oov"]), max_size=6), min_size=1, max_size=25)


@settings(max_examples=60)
@given(sentences=corpora, order=st.integers(1, 4), min_count=st.integers(1, 3))
def test_equals_the_equations_and_sums_to_one(sentences: list[list[str]], order: int, min_count: int) -> None:
    longest = max(map(len, sentences)) + 2
    order = min(order, longest)
    vocabulary = [*WORDS, "never"]
    arpa = estimate(sentences, vocabulary, order, min_count)
    reference = Reference(sentences, vocabulary, order, min_count)
    assert all(reference.listed(ngram) for level in arpa.logprobs for ngram in level)
    for history in [*reference.histories(), ("never", "a")]:
        history = history[max(0, len(history) - order + 1) :]
        probs = {w: 10 ** arpa.logprob(history, w) for w in reference.outcomes}
        assert sum(probs.values()) == pytest.approx(1.0, abs=1e-9)
        for word, prob in probs.items():
            assert prob == pytest.approx(reference.prob(history, word), rel=1e-9)


def test_modified_discounts_are_used_where_the_text_suffices() -> None:
    generator = random.Random(1)
    words = [f"w{i}" for i in range(60)]
    weights = [1 / (i + 1) for i in range(60)]
    sentences = [generator.choices(words, weights, k=generator.randint(2, 9)) for _ in range(300)]
    reference = Reference(sentences, words, 3)
    for n in (2, 3):
        assert len({reference.discount(n, c) for c in (1, 2, 3)}) == 3  # the interesting branch of the reference
    arpa = estimate(sentences, words, 3)
    for history in generator.sample(reference.histories(), 40):
        for word in generator.sample(reference.outcomes, 5):
            assert 10 ** arpa.logprob(history, word) == pytest.approx(reference.prob(history, word), rel=1e-9)


def test_special_words() -> None:
    arpa = estimate([["a", "b"], ["b"]], ["a", "b", "<s>"], 2)
    assert arpa.logprobs[0][("<s>",)] == arpa.ZERO
    assert arpa.logprob((), "<s>") == -math.inf
    assert arpa.logprob(("a",), "zzz") == -math.inf
    assert ("b", "</s>") in arpa.logprobs[1]


def test_bad_requests() -> None:
    with pytest.raises(InputError, match="order 5"):
        estimate([["a"]], ["a"], 5)
    with pytest.raises(InputError, match="min_count 0"):
        estimate([["a"]], ["a"], 2, 0)
    with pytest.raises(InputError, match="no sentence"):
        estimate([], ["a"], 2)
    with pytest.raises(InputError, match="no 4-gram"):
        estimate([["a"]], ["a"], 4)
