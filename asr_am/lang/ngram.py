"""Interpolated modified Kneser-Ney n-gram estimation.

S. F. Chen and J. Goodman, "An empirical study of smoothing techniques for language modeling", Harvard TR-10-98,
section 3 (modified Kneser-Ney, equations 18 to 26), with these conventions, which SRILM and KenLM share. A `<s>` opens
each sentence and is never predicted. An n-gram that begins with `<s>` keeps its raw count in the lower orders, as
nothing can precede it. Unigrams are interpolated with the uniform distribution over the vocabulary, `</s>` and `<unk>`.

Shapes: T tokens of the text, N distinct n-grams of one order, H those of the order below (the histories), V words.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa

log = logging.getLogger(__name__)
BOS, EOS, UNK = 0, 1, 2  # word ids of <s>, </s>, <unk>
SPECIAL = ("<s>", "</s>", "<unk>")
MAX_ORDER = 4


@dataclass(frozen=True)
class _Ngrams:
    """The distinct n-grams of one order with their counts.

    Attributes:
        word_N: last word.
        history_N, suffix_N: row, in the order below, of the n-gram without its last word and without its first word.
        count_N: occurrences, or in lower orders the number of distinct left neighbours.
        listed_N: whether the model lists the n-gram.
    """

    word_N: np.ndarray
    history_N: np.ndarray
    suffix_N: np.ndarray
    count_N: np.ndarray
    listed_N: np.ndarray


def estimate(sentences: Iterable[Sequence[str]], vocabulary: Iterable[str], order: int, min_count: int = 1) -> Arpa:
    """Estimates an n-gram model over `vocabulary`, `</s>` and `<unk>` that sums to one after every history.

    Words outside the vocabulary count as `<unk>`. Words of the vocabulary that do not occur get their share of the
    uniform distribution.

    Args:
        order: from 1 to 4.
        min_count: occurrences of a trigram or longer n-gram to be listed (SRILM's default for them is 2). The mass of
            the others goes to the shorter n-grams.

    Raises:
        InputError: order or count is out of range, or the text has no n-gram of that order.
    """
    if not isinstance(order, int) or not 1 <= order <= MAX_ORDER:
        raise InputError(f"language model order {order}: must be a whole number from 1 to {MAX_ORDER}")
    if not isinstance(min_count, int) or min_count < 1:
        raise InputError(f"language model min_count {min_count}: must be a whole number, at least 1")
    names = [*SPECIAL, *sorted(set(vocabulary) - set(SPECIAL))]
    token_T, position_T = _number_tokens(sentences, {name: i for i, name in enumerate(names)})
    if len(token_T) == 0:
        raise InputError("the language model's training text has no sentence; give another")
    orders = _count(token_T, position_T, order, len(names), min_count)
    if len(orders[-1].word_N) == 0:
        raise InputError(f"the language model's training text has no {order}-gram; choose a lower order")
    probs, backoffs = _probabilities(orders, len(names))
    return _to_arpa(names, orders, probs, backoffs)


def _number_tokens(sentences: Iterable[Sequence[str]], ids: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the word ids of the text with `<s>` and `</s>`, and each token's position in its sentence."""
    tokens: list[int] = []
    lengths: list[int] = []
    for sentence in sentences:
        words = [ids.get(word, UNK) for word in sentence]
        tokens += [BOS, *words, EOS]
        lengths.append(len(words) + 2)
    starts = np.cumsum([0, *lengths])[:-1]
    position_T = np.arange(len(tokens)) - np.repeat(starts, lengths)
    return np.array(tokens, dtype=np.int64), position_T


def _count(token_T: np.ndarray, position_T: np.ndarray, order: int, num_words: int, min_count: int) -> list[_Ngrams]:
    """Returns the n-grams of orders 1 to `order`. Row i of order 1 is word i, so that every word has a row."""
    orders: list[_Ngrams] = []
    zero_V = np.zeros(num_words, dtype=np.int64)
    row_T = token_T  # row of the n-gram that ends at each token
    for n in range(1, order + 1):
        if n == 1:
            raw_V = np.bincount(token_T, minlength=num_words)
            raw_V[BOS] = 0  # never predicted
            orders.append(_Ngrams(np.arange(num_words), zero_V, zero_V, raw_V, np.ones(num_words, bool)))
            continue
        end_T = np.flatnonzero(position_T >= n - 1)  # tokens with n - 1 predecessors in their sentence
        key = row_T[end_T - 1] * num_words + token_T[end_T]
        keys_N, first_N, inverse, raw_N = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        listed_N = raw_N >= (min_count if n > 2 else 1)
        ngrams = _Ngrams(keys_N % num_words, keys_N // num_words, row_T[end_T[first_N]], raw_N, listed_N)
        orders[-1] = _continuation(orders[-1], ngrams)
        orders.append(ngrams)
        row_T = np.full(len(token_T), -1)
        row_T[end_T] = inverse
    return orders


def _continuation(lower: _Ngrams, higher: _Ngrams) -> _Ngrams:
    """Replaces the counts of `lower` by the number of distinct words before each n-gram (Chen & Goodman eq. 20)."""
    left_H = np.bincount(higher.suffix_N, minlength=len(lower.word_N))
    # An n-gram that begins with <s> is the suffix of no other and keeps its raw count.
    count_H = np.where(left_H > 0, left_H, lower.count_N)
    return replace(lower, count_N=count_H)


def _discounts(count_N: np.ndarray) -> np.ndarray:
    """Returns the discounts of counts 0, 1, 2, 3 or more (eq. 26), plain Kneser-Ney if the text is too small for it."""
    n1, n2, n3, n4 = (int(np.count_nonzero(count_N == c)) for c in (1, 2, 3, 4))
    if n1 and n2 and n3:
        y = n1 / (n1 + 2 * n2)
        three = np.array([1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if n4 and np.all(three > 0):
            return np.array([0.0, *three])
    plain = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
    return np.array([0.0, plain, plain, plain])


def _probabilities(orders: list[_Ngrams], num_words: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns probabilities per order, and backoff weights for all but the highest (1 if no n-gram extends it)."""
    probs: list[np.ndarray] = []
    backoffs: list[np.ndarray] = []
    lower_prob = np.full(num_words, 1.0 / (num_words - 1))  # uniform, without <s>
    for n, ngrams in enumerate(orders, start=1):
        discounts = _discounts(ngrams.count_N)
        log.debug("order %d: %d n-grams, discounts %s", n, len(ngrams.word_N), np.round(discounts[1:], 4).tolist())
        taken_N = np.where(ngrams.listed_N, discounts[np.minimum(ngrams.count_N, 3)], ngrams.count_N)
        num_histories = 1 if n == 1 else len(orders[n - 2].word_N)
        total_H = np.bincount(ngrams.history_N, ngrams.count_N, num_histories)
        seen_H = np.maximum(total_H, 1)
        gamma_H = np.bincount(ngrams.history_N, taken_N, num_histories) / seen_H
        prob_N = (ngrams.count_N - taken_N) / seen_H[ngrams.history_N]
        prob_N += gamma_H[ngrams.history_N] * lower_prob[ngrams.suffix_N if n > 1 else ngrams.word_N]
        if n == 1:
            prob_N[BOS] = 0.0
        else:
            backoffs.append(np.where(total_H > 0, gamma_H, 1.0))
        probs.append(prob_N)
        lower_prob = prob_N
    return probs, backoffs


def _to_arpa(names: list[str], orders: list[_Ngrams], probs: list[np.ndarray], backoffs: list[np.ndarray]) -> Arpa:
    arpa = Arpa(logprobs=[], backoffs={})
    below: list[tuple[str, ...] | None] = [()]  # None: not listed, so no n-gram that begins with it is
    for n, (ngrams, prob_N) in enumerate(zip(orders, probs, strict=True), start=1):
        rows = zip(ngrams.history_N.tolist(), ngrams.word_N.tolist(), ngrams.listed_N.tolist(), strict=True)
        keys = [(*(below[history] or ()), names[word]) if listed else None for history, word, listed in rows]
        pairs = zip(keys, prob_N.tolist(), strict=True)
        arpa.logprobs.append({key: math.log10(p) if p > 0 else Arpa.ZERO for key, p in pairs if key is not None})
        if n < len(orders):
            weights = zip(keys, backoffs[n - 1].tolist(), strict=True)
            arpa.backoffs.update((key, math.log10(w)) for key, w in weights if key is not None and w != 1.0)
        below = keys
    while not arpa.logprobs[-1]:  # all of them too rare
        arpa.logprobs.pop()
    return arpa
