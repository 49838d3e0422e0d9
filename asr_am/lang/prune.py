"""Relative-entropy pruning of backoff n-gram models, for decoding graphs that fit into memory.

A. Stolcke, "Entropy-based pruning of backoff language models", DARPA Broadcast News Workshop 1998. Equation 4 is the
relative entropy that removing one n-gram costs. Here the n-grams of lowest cost are removed until at most the wanted
number is left, each scored against the unpruned model. Probabilities of the others do not change. Backoff weights are
recomputed.
"""

from __future__ import annotations

import math
from collections import defaultdict

from asr_am.lang.arpa import Arpa, Ngram


def prune(arpa: Arpa, max_ngrams: int) -> Arpa:
    """Returns the model with at most `max_ngrams` n-grams of order 2 and above, itself if it has no more.

    Unigrams are never removed.
    """
    if sum(map(len, arpa.logprobs[1:])) <= max_ngrams:
        return arpa
    costs = _costs(arpa)
    ranked = sorted(costs, key=lambda ngram: (-costs[ngram], len(ngram), ngram))
    kept = set(ranked[:max_ngrams])
    logprobs = [arpa.logprobs[0], *({n: p for n, p in level.items() if n in kept} for level in arpa.logprobs[1:])]
    while len(logprobs) > 1 and not logprobs[-1]:
        logprobs.pop()
    return _with_backoffs(logprobs)


def _costs(arpa: Arpa) -> dict[Ngram, float]:
    """Returns the cost of each n-gram of order 2 and above, at least that of the n-grams whose history it is."""
    costs: dict[Ngram, float] = {}
    for level in reversed(arpa.logprobs[1:]):
        by_history: dict[Ngram, list[Ngram]] = defaultdict(list)
        for ngram in level:
            by_history[ngram[:-1]].append(ngram)
        for history, ngrams in by_history.items():
            explicit = sum(10 ** level[ngram] for ngram in ngrams)
            shorter = {ngram: 10 ** arpa.logprob(ngram[1:-1], ngram[-1]) for ngram in ngrams}
            left, left_shorter = max(1 - explicit, 1e-12), max(1 - sum(shorter.values()), 1e-12)
            weight = 10 ** _history_logprob(arpa, history)
            for ngram in ngrams:
                cost = weight * _divergence(10 ** level[ngram], shorter[ngram], left, left_shorter)
                costs[ngram] = max(costs.get(ngram, 0.0), cost)
                if len(history) > 1:
                    costs[history] = max(costs.get(history, 0.0), costs[ngram])
    return costs


def _divergence(p: float, shorter: float, left: float, left_shorter: float) -> float:
    """Computes equation 4 without the factor P(history).

    Args:
        p: probability of the n-gram.
        shorter: probability of the n-gram without its first word.
        left, left_shorter: probability mass left for backoff, and that of the same words in the shorter model.
    """
    old = math.log(left / left_shorter)
    new = math.log((left + p) / (left_shorter + shorter))
    if p <= 0 or shorter <= 0:
        return math.inf  # the shorter n-gram cannot replace it
    return -(p * (math.log(shorter) + new - math.log(p)) + left * (new - old))


def _history_logprob(arpa: Arpa, history: Ngram) -> float:
    start = 1 if history[0] == "<s>" else 0
    return sum(arpa.logprob(history[:position], history[position]) for position in range(start, len(history)))


def _with_backoffs(logprobs: list[dict[Ngram, float]]) -> Arpa:
    """Returns the model of these probabilities with backoff weights that make every history sum to one."""
    arpa = Arpa(logprobs, {})
    for level in logprobs[1:]:
        sums: dict[Ngram, list[float]] = defaultdict(lambda: [1.0, 1.0])
        for ngram, logprob in level.items():
            left = sums[ngram[:-1]]
            left[0] -= 10**logprob
            left[1] -= 10 ** arpa.logprob(ngram[1:-1], ngram[-1])
        for history, (explicit, shorter) in sums.items():
            arpa.backoffs[history] = math.log10(max(explicit, 1e-9) / max(shorter, 1e-9))
    return arpa
