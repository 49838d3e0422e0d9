"""Rescoring of n-best lists with a mixture of n-gram and recurrent LM.

Confidences of words are posteriors over the sentences of the list.

Shapes: C candidates of an utterance, K LM scales, N words and sentence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.special import softmax

from asr_am.decode.ctm import CtmWord
from asr_am.decode.hypotheses import nonspeech_words, time_words
from asr_am.decode.lattice import Lattice, LmScale
from asr_am.decode.lattice_map import map_lattices
from asr_am.decode.lm_mixture import LmMixture
from asr_am.decode.loading import load_lang, load_states
from asr_am.decode.nbest import nbest
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.lang.mixture import mixed


@dataclass(frozen=True)
class Candidate:
    """A sentence of an n-best list.

    Attributes:
        words: all its words, as language models see them.
        graph: graph cost of its best path, n-gram LM included.
        acoustic: unscaled acoustic cost of its best path.
        timed: the words that are scored, with times in frames and confidence 1.
    """

    words: list[str]
    graph: float
    acoustic: float
    timed: list[CtmWord]


Candidates = dict[str, list[Candidate]]  # by utterance


def read_candidates(decoded: Path, subset: str, count: int, jobs: int) -> Candidates:
    """Makes n-best lists from the lattices of a decoding run.

    Args:
        decoded: folder of the decoding run.
        subset: name of the set.
        count: maximum number of distinct sentences per utterance.
        jobs: number of processes.

    Returns:
        The candidates of each utterance that has a lattice, best first under the scale that stage decode chose.

    Raises:
        InputError: `count` is below 1, or a file of the decoding run is missing or damaged.
    """
    if count < 1:
        raise InputError(f"lm.nbest={count}: must be at least 1")
    system = System.load(decoded)
    work = partial(_candidates, system.lang_dir, system.states, system.lm_scale, count)
    return map_lattices(decoded, subset, work, jobs, f"n-best of {subset}")


def _candidates(lang_dir: Path, states_path: Path, scale: LmScale, count: int, lattice: Lattice) -> list[Candidate]:
    lang, states = load_lang(lang_dir), load_states(states_path)
    nonspeech = nonspeech_words(lang)
    result = []
    for sentence in nbest(lattice, scale, count):
        labels = lattice.label_A[sentence.arcs]
        timed = [
            CtmWord(word.start, word.frames, lang.word_names[word.word], 1.0)
            for word in time_words(sentence.words, labels[labels > 0], states, lang)
            if word.frames > 0 and word.word not in nonspeech
        ]
        words = [lang.word_names[word] for word in sentence.words]
        result.append(Candidate(words, sentence.graph, sentence.acoustic, timed))
    return result


def confidences(chosen: Candidate, candidates: Sequence[Candidate], posteriors: Sequence[float]) -> list[CtmWord]:
    """Returns the words of the chosen sentence with confidences.

    The confidence of a word is the summed posterior of the candidates that have it at an overlapping time.
    """
    words = []
    for word in chosen.timed:
        share = sum(
            posterior
            for candidate, posterior in zip(candidates, posteriors, strict=True)
            if any(other.word == word.word and _overlap(other, word) for other in candidate.timed)
        )
        words.append(word._replace(confidence=round(min(1.0, share), 4)))
    return words


def _overlap(a: CtmWord, b: CtmWord) -> bool:
    return a.start < b.start + b.frames and b.start < a.start + a.frames


@dataclass(frozen=True)
class Costs:
    """Costs of an utterance's candidates, with those of the LMs separated.

    Attributes:
        non_lm_C: graph cost without the n-gram LM.
        acoustic_C: unscaled acoustic cost.
        length_C: number of words.
        ngram_C, lstm_C, mixture_C: negative log-probability under each LM.
    """

    non_lm_C: np.ndarray
    acoustic_C: np.ndarray
    length_C: np.ndarray
    ngram_C: np.ndarray
    lstm_C: np.ndarray
    mixture_C: np.ndarray

    def costs(self, lm_C: np.ndarray, scales: Sequence[LmScale]) -> np.ndarray:
        """Returns float64 [C, K]: total costs with the LM costs `lm_C`, as `asr_am.decode.lattice.costs`."""
        lm_K, insertion_K = np.array(scales, dtype=np.float64).T
        cost_CK = (self.non_lm_C + lm_C)[:, None] + self.acoustic_C[:, None] / lm_K
        return cost_CK + self.length_C[:, None] * insertion_K


def rescore_lists(
    decoded: Path, subset: str, mixture: LmMixture, grid: Sequence[LmScale], count: int, jobs: int
) -> dict[str, list[list[CtmWord]]]:
    """Rescores a set.

    Args:
        decoded: folder of the decoding run.
        subset: name of the set.
        mixture: the mixture.
        grid: the LM scales.
        count: maximum number of candidates per utterance.
        jobs: number of processes.

    Returns:
        By utterance the best sentence under each LM scale.
    """
    candidates = read_candidates(decoded, subset, count, jobs)
    rescored = dict(zip(candidates, score_candidates(mixture, candidates), strict=True))
    return {utterance: _best_words(group, rescored[utterance], grid) for utterance, group in candidates.items()}


def _best_words(group: Sequence[Candidate], scores: Costs, grid: Sequence[LmScale]) -> list[list[CtmWord]]:
    """Returns the best sentence under each LM scale, with confidences from all candidates."""
    best_K = scores.costs(scores.mixture_C, grid).argmin(axis=0)
    done: dict[tuple[int, float], list[CtmWord]] = {}
    for best, scale in zip(best_K.tolist(), grid, strict=True):
        if (best, scale.lm) not in done:
            posterior_C = softmax(-scores.costs(scores.mixture_C, [LmScale(scale.lm)])[:, 0])
            done[best, scale.lm] = confidences(group[best], group, posterior_C.tolist())
    return [done[best, scale.lm] for best, scale in zip(best_K.tolist(), grid, strict=True)]


def score_candidates(mixture: LmMixture, candidates: Candidates) -> list[Costs]:
    """Returns the costs of all candidates, one `Costs` per utterance."""
    sentences = [candidate.words for group in candidates.values() for candidate in group]
    lstm, ngram = mixture.logprobs(sentences)
    lstm_N, ngram_N, mixed_N = (
        -np.array([logprobs.sum() for logprobs in model]) for model in (lstm, ngram, mixed(lstm, ngram, mixture.weight))
    )
    result, first = [], 0
    for group in candidates.values():
        rows = slice(first, first + len(group))
        graph_C, acoustic_C = (np.array([getattr(c, cost) for c in group]) for cost in ("graph", "acoustic"))
        length_C = np.array([len(c.words) for c in group])
        costs = ngram_N[rows], lstm_N[rows], mixed_N[rows]
        result.append(Costs(graph_C - ngram_N[rows], acoustic_C, length_C, *costs))
        first += len(group)
    return result
