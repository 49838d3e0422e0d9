from __future__ import annotations

import math
import random

import pytest

from asr_am.lang.arpa import Arpa, perplexity
from asr_am.lang.ngram import estimate
from asr_am.lang.prune import prune

WORDS = list("abcdefgh")


def sentences(seed: int, count: int) -> list[list[str]]:
    """Samples a language in which a word is mostly followed by the next one or by itself."""
    dice = random.Random(seed)
    made = []
    for _ in range(count):
        word, sentence = dice.randrange(8), []
        for _ in range(dice.randrange(1, 9)):
            sentence.append(WORDS[word])
            word = (word + dice.choice((0, 1, 1, 1, dice.randrange(8)))) % 8
        made.append(sentence)
    return made


@pytest.fixture(scope="module")
def model() -> Arpa:
    return estimate(sentences(0, 300), WORDS, 3)


def size(arpa: Arpa) -> int:
    return sum(map(len, arpa.logprobs[1:]))


@pytest.mark.parametrize("limit", [0, 3, 20, 60])
def test_no_more_ngrams_than_asked_for_and_every_history_sums_to_one(model: Arpa, limit: int) -> None:
    pruned = prune(model, limit)
    assert size(pruned) == limit < size(model)
    histories = {ngram[:-1] for level in pruned.logprobs[1:] for ngram in level} | {("a",), ("h", "g")}
    for history in histories:
        total = sum(10 ** pruned.logprob(history, word) for word in [*WORDS, "</s>", "<unk>"])
        assert math.isclose(total, 1, abs_tol=1e-6), history
    assert all(len(n) == 1 or n[:-1] in pruned.logprobs[len(n) - 2] for level in pruned.logprobs[1:] for n in level)


def test_a_model_that_is_small_enough_stays(model: Arpa) -> None:
    assert prune(model, size(model)) is model


def test_the_ngrams_that_matter_stay(model: Arpa) -> None:
    """Perplexity rises slowly, much less than up to that of the unigrams."""
    held_out = sentences(1, 200)
    full, half = (perplexity(arpa, held_out).perplexity for arpa in (model, prune(model, size(model) // 2)))
    unigrams = perplexity(prune(model, 0), held_out).perplexity
    assert full <= half * 1.02 and half - full < 0.1 * (unigrams - full)
