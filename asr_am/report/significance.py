"""Paired bootstrap over segments: is one system's WER lower than another's, or was it the choice of the test set?

M. Bisani and H. Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation", ICASSP 2004.
Shapes: S segments, R resampled test sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asr_am.errors import InputError
from asr_am.report.results import Family

RESAMPLES = 10_000
BATCH = 500  # resamples at a time: bounds the memory at BATCH x S counts


@dataclass(frozen=True)
class Comparison:
    """WER of `system` minus WER of `baseline`, in percent absolute.

    interval: 95 % of the resampled test sets. improved: share of them on which the difference is below 0.
    """

    system: Family
    baseline: Family
    difference: float
    interval: tuple[float, float]
    improved: float

    @property
    def significant(self) -> bool:
        return self.interval[0] > 0 or self.interval[1] < 0


def compare(system: Family, baseline: Family, seed: int = 1) -> Comparison:
    """Paired bootstrap on the errors per segment, which are averaged over seeds first.

    InputError: the two are not scored on the same segments and words.
    """
    errors_S, words_S = _per_segment(system)
    baseline_errors_S, baseline_words_S = _per_segment(baseline)
    if not np.array_equal(words_S, baseline_words_S):
        raise InputError(f"{system.name} and {baseline.name} are scored on different references; run stage score again")
    excess_S = errors_S - baseline_errors_S
    generator = np.random.default_rng(seed)
    num_segments = len(words_S)
    even_S = np.full(num_segments, 1.0 / num_segments)
    draws = []
    for _ in range(RESAMPLES // BATCH):
        times_RS = generator.multinomial(num_segments, even_S, size=BATCH)
        draws.append(100 * (times_RS @ excess_S) / np.maximum(times_RS @ words_S, 1))
    difference_R = np.concatenate(draws)
    low, high = np.percentile(difference_R, [2.5, 97.5])
    difference = 100 * excess_S.sum() / words_S.sum()
    return Comparison(system, baseline, float(difference), (float(low), float(high)), float(np.mean(difference_R < 0)))


def _per_segment(family: Family) -> tuple[np.ndarray, np.ndarray]:
    """Mean errors over seeds, and words, of each segment in the order of its name."""
    names = sorted(family.scores[0].segments)
    for score in family.scores:
        if sorted(score.segments) != names:
            raise InputError(f"{score.run}: is scored on other segments than {family.scores[0].run}; score again")
    counts = np.array([[score.segments[name] for name in names] for score in family.scores], dtype=np.float64)
    if counts.size == 0 or counts[0, :, 1].sum() == 0:
        raise InputError(f"{family.scores[0].run}: segments.json holds no words; run stage score again")
    return counts[:, :, 0].mean(axis=0), counts[0, :, 1]
