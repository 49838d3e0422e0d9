"""Sentences to choose among in a second pass: n-best lists of a decoding run's lattices, with the times of words.

Stage rescore: n-best lists of a decoding run under a mixture of its n-gram model and a recurrent one.

The mixture is linear, word by word: P(w | h) = m P_lstm(w | h) + (1 - m) P_ngram(w | h), m by EM on the transcripts of
dev. In the graph cost of a sentence it takes the n-gram's place; what pronunciations and transitions cost, acoustic
costs and times stay. For every LM weight and insertion penalty the best sentence goes into a CTM, as stage decode
writes them, and stage score chooses among them on dev.

Shapes: C candidates of an utterance, K weightings.
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

BATCH = 256  # lattices in memory


@dataclass(frozen=True)
class Candidate:
    """words: all of them, as language models see them. timed: those that are scored, in frames, with confidence 1.
    graph, acoustic: costs of the best path, the n-gram model's among them, and unscaled.
    """

    words: list[str]
    graph: float
    acoustic: float
    timed: list[CtmWord]


Candidates = dict[str, list[Candidate]]  # by utterance


def read_candidates(decoded: Path, subset: str, count: int, jobs: int) -> Candidates:
    """Up to `count` distinct sentences of each utterance, best first under the weights that stage decode chose.

    An utterance without a lattice is left out. InputError where the decoding run or its lattices are not whole.
    """
    system = System.load(decoded)
    path = decoded / "lattices" / f"{subset}.ark"
    found: Candidates = {}
    lattices = read_lattices(path)
    work = partial(_candidates, system.lang_dir, system.states, system.lm_scale, count)
    while part := list(islice(lattices, BATCH)):
        found |= zip((name for name, _ in part), parallel_map(work, part, jobs, f"n-best of {subset}"), strict=True)
    if not found:
        raise InputError(f"{path}: holds no lattice; run stage 7 (decode) again")
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
    """The chosen sentence's words, each with the share of those candidates that have it at an overlapping time."""
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


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LmMixture:
    """An n-gram model and a recurrent one, which has `weight`."""

    arpa: Arpa
    lstm: LstmLm
    units: Units
    weight: float = 0.5

    def logprobs(self, sentences: Sentences) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probabilities of all words (`asr_am.lang.mixture`): of the recurrent model, of the n-gram model."""
        return word_logprobs(self.lstm, self.units, sentences), ngram_logprobs(self.arpa, sentences)


@dataclass(frozen=True)
class Perplexities:
    """Of one set's transcripts, for each model alone and for the mixture."""

    ngram: float
    lstm: float
    mixture: float


@dataclass(frozen=True)
class Costs:
    """Of an utterance's candidates, with the n-gram model's cost taken out of the graph cost and the models' put apart.

    others_C: graph cost without LM; acoustic_C: unscaled; ngram_C, lstm_C, mixture_C: minus log-probabilities.
    """

    non_lm_C: np.ndarray
    acoustic_C: np.ndarray
    length_C: np.ndarray
    ngram_C: np.ndarray
    lstm_C: np.ndarray
    mixture_C: np.ndarray

    def costs(self, lm_C: np.ndarray, scales: Sequence[LmScale]) -> np.ndarray:
        """float64 [C, K]: with the costs `lm_C` of one of the models, as `asr_am.decode.lattice.costs` weighs them."""
        lm_K, insertion_K = np.array(scales, dtype=np.float64).T
        cost_CK = (self.non_lm_C + lm_C)[:, None] + self.acoustic_C[:, None] / lm_K
        return cost_CK + self.length_C[:, None] * insertion_K


def rescore(
    decoded: Path, data_dir: Path, arpa: Path, lm: Path, out: Path, *, grid: Sequence[LmScale], count: int, jobs: int
) -> None:
    """Rescore dev and test of the run `decoded`, which used the n-gram model `arpa`, with the recurrent model `lm`.

    Writes ctm/<set>_<LM weight>_<insertion penalty>.ctm and rescore.json. count: candidates of an utterance.
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
    """The mixture with the weight that is best on dev, and the perplexities of dev and test."""
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
            "perplexity of %s: n-gram %.2f, recurrent %.2f, both %.2f with weight %.2f of the recurrent model",
            subset, found[subset].ngram, found[subset].lstm, found[subset].mixture, mixture.weight,
        )  # fmt: skip
    return mixture, found


def score_candidates(mixture: LmMixture, candidates: Candidates) -> list[Costs]:
    """The costs of all candidates, utterance by utterance."""
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
    """Word errors at the best weights, with each model alone, with the mixture, and of the best candidates at all."""
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
    """The CTM of each weighting: the best sentences under the mixture, with confidences from all candidates."""
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
