"""Bootstrap confidence intervals of word error rates (Bisani & Ney, ICASSP 2004).

A bootstrap sample draws as many segments as there are, with replacement. Its WER is the sum of their errors over the
sum of their words. Two systems are compared on the same samples. Legend: B samples, N segments, K columns of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asr_am.errors import InputError

SAMPLES = 10_000
LEVEL = 0.95  # of confidence
_CHUNK_CELLS = 4_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """WER or difference of WERs with the ends of its confidence interval, in percent."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of systems a and b.

    Attributes:
        probability_b_better: share of samples in which b makes fewer errors than a. Ties count half.
        difference: WER of b minus WER of a.
    """

    probability_b_better: float
    difference: Interval

    @property
    def significant(self) -> bool:
        """True if the interval of the difference excludes zero."""
        return self.difference.low > 0.0 or self.difference.high < 0.0


def bootstrap_interval(errors: Sequence[int], words: Sequence[int], seed: int = 0, samples: int = SAMPLES) -> Interval:
    """Returns the WER over segments with its percentile interval, given errors and reference words of each segment.

    Raises:
        InputError: the lengths differ, a count is negative, or there are no words.
    """
    table_NK = _table(errors, words)
    return _interval(_wer(table_NK.sum(axis=0)), _wer(_resampled_sums(table_NK, seed, samples)))


def paired_bootstrap(
    errors_a: Sequence[int], errors_b: Sequence[int], words: Sequence[int], seed: int = 0,
    words_b: Sequence[int] | None = None, samples: int = SAMPLES,
) -> Comparison:  # fmt: skip
    """Compares systems a and b over the same segments, given their errors and the reference words of each segment.

    Those of system b are others if alternations make them depend on the hypothesis.

    Raises:
        InputError: the lengths differ, a count is negative, or there are no words.
    """
    table_NK = np.concatenate(
        [_table(errors_a, words), _table(errors_b, words if words_b is None else words_b)], axis=1
    )
    total_K = table_NK.sum(axis=0)
    sums_BK = _resampled_sums(table_NK, seed, samples)
    difference_B = _wer(sums_BK[:, 2:]) - _wer(sums_BK[:, :2])
    better = float(np.mean(difference_B < 0) + 0.5 * np.mean(difference_B == 0))
    return Comparison(better, _interval(_wer(total_K[2:]) - _wer(total_K[:2]), difference_B))


def _table(errors: Sequence[int], words: Sequence[int]) -> np.ndarray:
    if len(errors) != len(words) or len(errors) == 0:
        raise InputError(f"errors of {len(errors)} segments, words of {len(words)}: both must cover the same segments")
    table_N2 = np.stack([np.asarray(errors, dtype=np.int64), np.asarray(words, dtype=np.int64)], axis=1)
    if table_N2.min() < 0 or table_N2[:, 1].sum() == 0:
        raise InputError("negative counts or no reference words: the word error rate is undefined")
    return table_N2


def _resampled_sums(table_NK: np.ndarray, seed: int, samples: int) -> np.ndarray:
    """Column sums of `samples` bootstrap samples of the rows, [B, K]."""
    generator, segments, sums = np.random.default_rng(seed), len(table_NK), []
    chunk = max(1, _CHUNK_CELLS // segments)
    for start in range(0, samples, chunk):
        rows_BN = generator.integers(segments, size=(min(chunk, samples - start), segments))
        sums.append(table_NK[rows_BN].sum(axis=1))
    return np.concatenate(sums)


def _wer(sums: np.ndarray) -> np.ndarray:
    """WER in percent. A sample without reference words counts as one word."""
    return 100.0 * sums[..., 0] / np.maximum(sums[..., 1], 1)


def _interval(value: np.ndarray, drawn_B: np.ndarray) -> Interval:
    low, high = np.quantile(drawn_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(value), float(low), float(high))
