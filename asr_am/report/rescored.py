"""Report section on LM rescoring: perplexities, and each rescored system against the same system with its n-gram
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asr_am.data.record import read_record
from asr_am.errors import InputError
from asr_am.report import tables
from asr_am.report.comparisons import VERDICT_RULE, Versus, compare, shared_seeds, verdict
from asr_am.report.markup import table
from asr_am.report.results import Family, explain

MODELS = ("ngram", "lstm", "mixture")
SETS = ("dev", "test")


def rescored_sections(corpus_dir: Path, families: Sequence[Family]) -> list[str]:
    """Returns the Markdown of the section, empty if no scored system was rescored.

    Raises:
        InputError: a rescore.json is missing or malformed.
    """
    rescored = [family for family in families if _record(corpus_dir, family).parent.is_dir()]
    rows = {family.lm: _perplexity_row(_record(corpus_dir, family), family.lm) for family in rescored}
    if not rows:
        return []
    return [
        "## Rescored by the recurrent LM",
        "Words under the linear mixture of n-gram and recurrent LM, its weight chosen on dev. Perplexity per "
        "word and sentence end, words outside the lexicon left out.",
        table(
            ["LM", "weight", *(f"{subset}: {model}" for subset in SETS for model in ("n-gram", "recurrent", "both"))],
            rows.values(),
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


def _perplexity_row(path: Path, lm: str) -> list[str]:
    """Returns the name of a mixture, the weight of its recurrent LM, and for each set the perplexities of `MODELS`."""
    content = read_record(path)
    try:
        found = [float(content[subset]["perplexity"][model]) for subset in SETS for model in MODELS]
        return [lm, f"{float(content['weight']):.2f}", *(f"{perplexity:.1f}" for perplexity in found)]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {explain(error)}; run stage 8 (rescore) again") from error


def _row(pair: Versus) -> list[str]:
    change = tables.signed_interval(pair.outcome.difference)
    return [pair.system.system, pair.system.lm, pair.baseline.lm, change, verdict(pair)]
