"""Word probabilities of n-gram models, linear mixtures of two models, and perplexity from word probabilities.

A text is a list of sentences. Its log-probabilities are natural, one float64 array per sentence: one for each word and
one for the sentence end. Perplexity is counted as in `asr_am.lang.arpa.perplexity`: sentence ends count, words outside
the vocabulary do not, but they are part of the history of later words.

Shapes: N words and sentence ends of a text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from scipy.special import expit

from asr_am.lang.arpa import Arpa

Sentences = Sequence[Sequence[str]]
MIN_LOGPROB = Arpa.ZERO * math.log(10.0)  # log-probability of a word with probability 0
ITERATIONS = 100


def ngram_logprobs(arpa: Arpa, sentences: Sentences) -> list[np.ndarray]:
    """Returns the log-probabilities of all words under an n-gram model, `MIN_LOGPROB` for words it lacks."""
    found = []
    for sentence in sentences:
        history, logprobs = ["<s>"], []
        for word in [*sentence, "</s>"]:
            logprobs.append(arpa.logprob(history, word))
            history = [*history[-arpa.order :], word]
        found.append(np.maximum(np.array(logprobs) * math.log(10.0), MIN_LOGPROB))
    return found


def counted(sentences: Sentences, vocabulary: Collection[str]) -> np.ndarray:
    """Returns bool [N]: which words and sentence ends perplexity counts."""
    known = set(vocabulary) - {"<unk>"}
    flags = [[*(word in known for word in sentence), True] for sentence in sentences]
    return np.array([flag for sentence in flags for flag in sentence], dtype=bool)


def perplexity(logprobs: Sequence[np.ndarray], counted_N: np.ndarray) -> float:
    """Computes perplexity from log-probabilities, NaN for a text without sentences."""
    if not counted_N.any():
        return math.nan
    return float(np.exp(-np.concatenate(logprobs)[counted_N].mean()))


def mixed(first: Sequence[np.ndarray], second: Sequence[np.ndarray], weight: float) -> list[np.ndarray]:
    """Returns log(weight x first + (1 - weight) x second) for every word, for a weight from 0 to 1."""
    if weight in (0.0, 1.0):
        return list(first if weight else second)
    log_first, log_second = math.log(weight), math.log1p(-weight)
    return [np.logaddexp(log_first + a, log_second + b) for a, b in zip(first, second, strict=True)]


def best_weight(first: Sequence[np.ndarray], second: Sequence[np.ndarray], counted_N: np.ndarray) -> float:
    """Returns the weight of `first` that minimizes the perplexity of the mixture on this text, by EM."""
    a_N, b_N = (np.concatenate(logprobs)[counted_N] for logprobs in (first, second))
    weight = 0.5
    for _ in range(ITERATIONS):
        odds_N = math.log(weight) + a_N - math.log1p(-weight) - b_N
        weight = min(max(float(expit(odds_N).mean()), 1e-6), 1 - 1e-6)
    return weight
