"""Mixtures of LMs, compared with explicit sums and with the perplexity of `asr_am.lang.arpa`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asr_am.lang import arpa as arpa_module
from asr_am.lang.mixture import MIN_LOGPROB, best_weight, counted, mixed, ngram_logprobs, perplexity
from asr_am.lang.ngram import estimate

TEXT = [s.split() for s in ("A B A", "B A", "A A B", "C A B", "A")]
TEST = [s.split() for s in ("A B", "B <unk> A", "A X C", "")]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_perplexity_is_that_of_the_ngram_model(order: int) -> None:
    arpa = estimate(TEXT, ["A", "B", "C"], order)
    found = perplexity(ngram_logprobs(arpa, TEST), counted(TEST, ["A", "B", "C", "<unk>"]))
    expected = arpa_module.perplexity(arpa, TEST)
    assert expected.oov == 2 and found == pytest.approx(expected.perplexity, rel=1e-9)


def test_words_that_a_model_lacks_have_a_finite_cost() -> None:
    assert ngram_logprobs(estimate(TEXT, ["A", "B", "C"], 2), [["X"]])[0][0] == MIN_LOGPROB


def test_no_text_has_no_perplexity() -> None:
    assert math.isnan(perplexity([], counted([], ["A"])))


def test_a_mixture_is_linear_word_by_word() -> None:
    a, b = [np.log([0.5, 0.1])], [np.log([0.25, 0.9])]
    assert np.exp(mixed(a, b, 0.2)[0]) == pytest.approx([0.2 * 0.5 + 0.8 * 0.25, 0.2 * 0.1 + 0.8 * 0.9])
    assert mixed(a, b, 0.0)[0] is b[0] and mixed(a, b, 1.0)[0] is a[0]


def test_the_best_weight_is_that_of_a_search() -> None:
    rng = np.random.default_rng(1)
    a, b = ([np.log(rng.uniform(0.01, 0.5, 40)) for _ in range(5)] for _ in range(2))
    flags_N = rng.random(200) < 0.8
    weights = np.linspace(0.001, 0.999, 999)
    searched = weights[np.argmin([perplexity(mixed(a, b, w), flags_N) for w in weights])]
    assert best_weight(a, b, flags_N) == pytest.approx(searched, abs=1.5e-3)


def test_the_better_model_gets_nearly_all_the_weight() -> None:
    good, bad = [np.log(np.full(50, 0.5))], [np.log(np.full(50, 0.1))]
    flags_N = np.full(50, True)
    assert best_weight(good, bad, flags_N) > 0.99 and best_weight(bad, good, flags_N) < 0.01
