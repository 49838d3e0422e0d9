"""A linear mixture of an n-gram LM and a recurrent LM, with its weight chosen on dev.

P(w | h) = m P_lstm(w | h) + (1 - m) P_ngram(w | h) for every word, with m by EM on the transcripts of dev.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asr_am.lang.arpa import Arpa
from asr_am.lang.mixture import Sentences, best_weight, counted, mixed, ngram_logprobs, perplexity
from asr_am.lang.transcripts import read_transcripts
from asr_am.lang.units import Units
from asr_am.models.lm_scorer import word_logprobs
from asr_am.models.lstm_lm import LstmLm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LmMixture:
    """A linear mixture of an n-gram LM and a recurrent LM.

    Attributes:
        units: units that the recurrent LM predicts.
        weight: weight of the recurrent LM, from 0 to 1.
    """

    arpa: Arpa
    lstm: LstmLm
    units: Units
    weight: float = 0.5

    def logprobs(self, sentences: Sentences) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the log-probabilities of all words: of the recurrent LM, of the n-gram LM."""
        return word_logprobs(self.lstm, self.units, sentences), ngram_logprobs(self.arpa, sentences)


@dataclass(frozen=True)
class Perplexities:
    """Perplexities of a set's transcripts under each LM alone and under the mixture."""

    ngram: float
    lstm: float
    mixture: float


def fit_weight(
    mixtures: Mapping[str, LmMixture], data_dir: Path, lexicon: Sequence[str]
) -> tuple[dict[str, LmMixture], dict[str, Perplexities]]:
    """Returns the mixtures for dev and test with the weight that is best on dev, and the perplexities of both sets.

    Words that the n-gram LM lacks do not count, for neither LM.
    """
    fitted, found = {}, {}
    weight = mixtures["dev"].weight
    for subset in ("dev", "test"):
        mixture = mixtures[subset]
        sentences = [words for _, words in read_transcripts(data_dir, subset)]
        flags_N = counted(sentences, [word for word in lexicon if (word,) in mixture.arpa.logprobs[0]])
        lstm, ngram = mixture.logprobs(sentences)
        if subset == "dev":
            weight = best_weight(lstm, ngram, flags_N)
        fitted[subset] = replace(mixture, weight=weight)
        mixture_logprobs = mixed(lstm, ngram, weight)
        found[subset] = Perplexities(*(perplexity(logprobs, flags_N) for logprobs in (ngram, lstm, mixture_logprobs)))
        log.info(
            "perplexity of %s: n-gram %.2f, recurrent %.2f, mixture %.2f (weight of the recurrent LM %.2f)",
            subset, found[subset].ngram, found[subset].lstm, found[subset].mixture, weight,
        )  # fmt: skip
    return fitted, found
