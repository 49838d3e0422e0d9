"""Is a system's WER lower than another's, or was it the choice of the test set? Families of seeds compared in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asr_am.errors import InputError
from asr_am.report.results import GMM_SYSTEMS, Family
from asr_am.score.significance import Comparison, paired_bootstrap


@dataclass(frozen=True)
class Versus:
    """The outcome for `system` (b) against `baseline` (a), which use the same LM."""

    system: Family
    baseline: Family
    outcome: Comparison


def against_gmm(families: Sequence[Family]) -> list[Versus]:
    """Each system that is no GMM against the last GMM of `families` with the same LM, where there is one."""
    baselines = {family.lm: family for family in families if family.system in GMM_SYSTEMS}
    hybrids = [family for family in families if family.system not in GMM_SYSTEMS and family.lm in baselines]
    return [compare(hybrid, baselines[hybrid.lm]) for hybrid in hybrids]


def compare(system: Family, baseline: Family) -> Versus:
    """Paired bootstrap over segments, in each of which errors and words are summed over the family's seeds.

    InputError: the runs are not all scored on the same segments.
    """
    names = sorted(baseline.scores[0].segments)
    errors_a, words_a = _per_segment(baseline, names)
    errors_b, words_b = _per_segment(system, names)
    return Versus(system, baseline, paired_bootstrap(errors_a, errors_b, words_a, words_b=words_b))


def _per_segment(family: Family, names: Sequence[str]) -> tuple[list[int], list[int]]:
    for score in family.scores:
        if sorted(score.segments) != names:
            raise InputError(
                f"score/{score.run}: its segments are not those of the runs beside it; run stage 9 (score) again"
            )
    errors = [sum(score.segments[name][0] for score in family.scores) for name in names]
    return errors, [sum(score.segments[name][1] for score in family.scores) for name in names]
