"""Stage rescore: n-best lists of a decoding run under a mixture of its n-gram LM and a recurrent LM.

The mixture is linear per word: P(w | h) = m P_lstm(w | h) + (1 - m) P_ngram(w | h), with m by EM on the transcripts of
dev. It replaces the n-gram LM in the graph cost of a sentence. Costs of pronunciations and transitions, acoustic costs
and times stay. For every LM scale of the grid the best sentences go into a CTM file as in stage decode. Stage score
chooses among these on dev.

Shapes: C candidates of an utterance, K LM scales, N words and sentence ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import kaldialign
import numpy as np
from scipy.special import softmax

from asr_am.data.manifests import read_supervisions
from asr_am.data.textfile import write_lines
from asr_am.decode.ctm import CtmWord, write_ctm
from asr_am.decode.decode_set import ctm_name, reference_words
from asr_am.decode.hypotheses import nonspeech_words, time_words
from asr_am.decode.lattice import Lattice, LmScale, read_lattices
from asr_am.decode.loading import load_lang, load_states
from asr_am.decode.nbest import nbest
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa, read_arpa
from asr_am.lang.lang_dir import Lang, vocabulary
from asr_am.lang.mixture import Sentences, best_weight, counted, mixed, ngram_logprobs, perplexity
from asr_am.lang.transcripts import read_transcripts
from asr_am.lang.units import Units
from asr_am.model.lm_file import load_lm
from asr_am.model.lm_scorer import word_logprobs
from asr_am.model.lstm_lm import LstmLm
from asr_am.parallel import parallel_map

log = logging.getLogger(__name__)

BATCH = 256  # lattices in memory at once


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
        InputError: a file of the decoding run is missing or damaged.
    """
    system = System.load(decoded)
    path = decoded / "lattices" / f"{subset}.ark"
    found: Candidates = {}
    lattices = read_lattices(path)
    work = partial(_candidates, system.lang_dir, system.states, system.lm_scale, count)
    while part := list(islice(lattices, BATCH)):
        found |= zip((name for name, _ in part), parallel_map(work, part, jobs, f"n-best of {subset}"), strict=True)
    if not found:
        raise InputError(f"{path}: has no lattices; run stage 7 (decode) again")
    return found


def _candidates(
    lang_dir: Path, states_path: Path, scale: LmScale, count: int, item: tuple[str, Lattice]
) -> list[Candidate]:
    lang, states = load_lang(lang_dir), load_states(states_path)
    lattice = item[1]
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
class LmMixture:
    """A linear mixture of an n-gram LM and a recurrent LM.

    Attributes:
        arpa: the n-gram LM.
        lstm: the recurrent LM.
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


def rescore(
    decoded: Path, data_dir: Path, arpa: Path, lm: Path, out: Path, *, grid: Sequence[LmScale], count: int, jobs: int
) -> None:
    """Rescores dev and test of a decoding run. Writes the CTM files and rescore.json.

    Args:
        decoded: folder of the decoding run.
        data_dir: output of stage data.
        arpa: the n-gram LM that the run used.
        lm: checkpoint of the recurrent LM.
        out: output folder.
        grid: LM scales to write CTM files for.
        count: maximum number of candidates per utterance.
        jobs: number of processes.

    Raises:
        InputError: `count` is below 1, or a file is missing or damaged.
    """
    if count < 1:
        raise InputError(f"lm.nbest={count}: must be at least 1")
    lang = load_lang(System.load(decoded).lang_dir)
    lstm, units, _ = load_lm(lm)
    mixture = LmMixture(read_arpa(arpa), lstm, units)
    mixture, perplexities = _fit_weight(mixture, data_dir, vocabulary(lang.words))
    report: dict[str, object] = {"weight": round(mixture.weight, 4)}
    for subset in ("dev", "test"):
        candidates = read_candidates(decoded, subset, count, jobs)
        rescored = dict(zip(candidates, score_candidates(mixture, candidates), strict=True))
        write_set(out, subset, data_dir, candidates, rescored, grid)
        record: dict[str, object] = {"perplexity": asdict(perplexities[subset])}
        if subset == "dev":
            record["errors"] = dev_errors(candidates, rescored, data_dir, lang, grid)
        report[subset] = record
    write_lines(out / "rescore.json", [json.dumps(report, indent=1)])


def _fit_weight(
    mixture: LmMixture, data_dir: Path, lexicon: Sequence[str]
) -> tuple[LmMixture, dict[str, Perplexities]]:
    """Returns the mixture with the weight that is best on dev, and the perplexities of dev and test."""
    found = {}
    for subset in ("dev", "test"):
        sentences = [words for _, words in read_transcripts(data_dir, subset)]
        flags_N = counted(sentences, lexicon)
        lstm, ngram = mixture.logprobs(sentences)
        if subset == "dev":
            mixture = replace(mixture, weight=best_weight(lstm, ngram, flags_N))
        mixture_logprobs = mixed(lstm, ngram, mixture.weight)
        found[subset] = Perplexities(*(perplexity(logprobs, flags_N) for logprobs in (ngram, lstm, mixture_logprobs)))
        log.info(
            "perplexity of %s: n-gram %.2f, recurrent %.2f, mixture %.2f (weight of the recurrent LM %.2f)",
            subset, found[subset].ngram, found[subset].lstm, found[subset].mixture, mixture.weight,
        )  # fmt: skip
    return mixture, found


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


def dev_errors(
    candidates: Candidates, rescored: dict[str, Costs], data_dir: Path, lang: Lang, grid: Sequence[LmScale]
) -> dict[str, int]:
    """Counts word errors on dev at the best scale: each LM alone, the mixture, and the oracle of the n-best lists."""
    dropped = frozenset(lang.word_names[word] for word in nonspeech_words(lang))
    total_K = {name: np.zeros(len(grid), dtype=np.int64) for name in ("ngram", "lstm", "mixture")}
    oracle = 0
    for segment in read_supervisions(data_dir, "dev"):
        reference = reference_words(segment.text or "", dropped)
        group = candidates.get(segment.id)
        if group is None:
            continue
        wrong_C = np.array([kaldialign.edit_distance(reference, [w.word for w in c.timed])["total"] for c in group])
        scores = rescored[segment.id]
        oracle += int(wrong_C.min())
        for name, errors_K in total_K.items():
            errors_K += wrong_C[scores.costs(getattr(scores, f"{name}_C"), grid).argmin(axis=0)]
    errors = {name: int(errors_K.min()) for name, errors_K in total_K.items()} | {"oracle": oracle}
    log.info("dev errors in the n-best lists: %s", ", ".join(f"{name} {count}" for name, count in errors.items()))
    return errors


def write_set(
    out: Path, subset: str, data_dir: Path, candidates: Candidates, rescored: dict[str, Costs],
    grid: Sequence[LmScale],
) -> None:  # fmt: skip
    """Writes the CTM file of each scale: best sentences under the mixture, confidences from all candidates."""
    segments = {segment.id: segment for segment in read_supervisions(data_dir, subset)}
    (out / "ctm").mkdir(exist_ok=True)
    words: list[dict[str, list[CtmWord]]] = [{} for _ in grid]
    for utterance, group in candidates.items():
        scores = rescored[utterance]
        best_K = scores.costs(scores.mixture_C, grid).argmin(axis=0)
        done: dict[tuple[int, float], list[CtmWord]] = {}
        for k, scale in enumerate(grid):
            key = int(best_K[k]), scale.lm
            if key not in done:
                posterior_C = softmax(-scores.costs(scores.mixture_C, [LmScale(scale.lm)])[:, 0])
                done[key] = confidences(group[key[0]], group, posterior_C.tolist())
            words[k][utterance] = done[key]
    for scale, found in zip(grid, words, strict=True):
        write_ctm(out / "ctm" / ctm_name(subset, scale), segments, found)
