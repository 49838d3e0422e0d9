"""Report section on LM rescoring: perplexities, and each rescored system against the same system with its n-gram
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asr_am.errors import InputError
from asr_am.report import tables
from asr_am.report.comparisons import VERDICT_RULE, Versus, compare, shared_seeds, verdict
from asr_am.report.markup import table
from asr_am.report.results import Family, explain, read_json

MODELS = ("ngram", "lstm", "mixture")
SETS = ("dev", "test")


@dataclass(frozen=True)
class RescoredLm:
    """Linear mixture of an n-gram and a recurrent LM.

    Attributes:
        name: of the LM in the report.
        weight: of the recurrent LM.
        perplexities: by set, one for each of `MODELS`.
    """

    name: str
    weight: float
    perplexities: Mapping[str, Sequence[float]]


def rescored_sections(corpus_dir: Path, families: Sequence[Family]) -> list[str]:
    """Returns the Markdown of the section, empty if no scored system was rescored.

    Raises:
        InputError: a rescore.json is missing or malformed.
    """
    rescored = [family for family in families if _record(corpus_dir, family).parent.is_dir()]
    lms = {family.lm: _read_rescored(_record(corpus_dir, family), family.lm) for family in rescored}
    if not lms:
        return []
    return [
        "## Rescored by the recurrent LM",
        "Words under the linear mixture of n-gram and recurrent LM, its weight chosen on dev. Perplexity per "
        "word and sentence end, words outside the lexicon left out.",
        table(
            ["LM", "weight", *(f"{subset}: {model}" for subset in SETS for model in ("n-gram", "recurrent", "both"))],
            [_perplexity_row(lm) for lm in lms.values()],
        ),
        "Against the n-gram alone, paired bootstrap over segments; WER in percent absolute. " + VERDICT_RULE,
        table(
            ["system", "LM", "against", "difference [95 %]", "verdict"], map(_row, against_ngram(families, rescored))
        ),
    ]


def against_ngram(families: Sequence[Family], rescored: Sequence[Family]) -> list[Versus]:
    """Compares each rescored system with the same system under the n-gram LM alone, over the seeds scored with both."""
    plain = {(family.system, family.lm): family for family in families}
    pairs = [(family, plain.get((family.system, family.lm.rpartition("+")[0]))) for family in rescored]
    shared = [shared_seeds(family, baseline) for family, baseline in pairs if baseline is not None]
    return [compare(*pair) for pair in shared if pair is not None]


def _record(corpus_dir: Path, family: Family) -> Path:
    """Path of the family's rescore.json. The mixture is the same for all seeds."""
    return corpus_dir / "rescore" / family.scores[0].run / "rescore.json"


def _read_rescored(path: Path, name: str) -> RescoredLm:
    content = read_json(path)
    try:
        found = {subset: [float(content[subset]["perplexity"][model]) for model in MODELS] for subset in SETS}
        return RescoredLm(name, float(content["weight"]), found)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {explain(error)}; run stage 8 (rescore) again") from error


def _perplexity_row(lm: RescoredLm) -> list[str]:
    values = [f"{value:.1f}" for subset in SETS for value in lm.perplexities[subset]]
    return [lm.name, f"{lm.weight:.2f}", *values]


def _row(pair: Versus) -> list[str]:
    change = tables.signed_interval(pair.outcome.difference)
    return [pair.system.system, pair.system.lm, pair.baseline.lm, change, verdict(pair)]
