"""Sentences to choose among in a second pass: n-best lists of a decoding run's lattices, with the times of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

from asr_am.decode.ctm import CtmWord
from asr_am.decode.hypotheses import nonspeech_words
from asr_am.decode.lattice import Lattice, read_lattices
from asr_am.decode.nbest import nbest
from asr_am.decode.paths import Weights
from asr_am.decode.system import System
from asr_am.decode.word_times import time_words
from asr_am.errors import InputError
from asr_am.hmm.states import StateTable
from asr_am.lang.lang import Lang
from asr_am.parallel import parallel_map

AT_ONCE = 256  # lattices in memory


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
    work = partial(_candidates, system.lang_dir, system.states, system.weights, count)
    while part := list(islice(lattices, AT_ONCE)):
        found |= zip((name for name, _ in part), parallel_map(work, part, jobs, f"n-best of {subset}"), strict=True)
    if not found:
        raise InputError(f"{path}: holds no lattice; run stage 7 (decode) again")
    return found


@lru_cache(maxsize=1)
def _load(lang_dir: Path, states: Path) -> tuple[Lang, StateTable]:
    return Lang.load(lang_dir), StateTable.load(states)


def _candidates(
    lang_dir: Path, states_path: Path, weights: Weights, count: int, item: tuple[str, Lattice]
) -> list[Candidate]:
    lang, states = _load(lang_dir, states_path)
    lattice = item[1]
    silent = nonspeech_words(lang)
    result = []
    for sentence in nbest(lattice, weights, count):
        labels = lattice.label_A[sentence.arcs]
        timed = [
            CtmWord(word.start, word.frames, lang.word_names[word.word], 1.0)
            for word in time_words(sentence.words, labels[labels > 0], states, lang)
            if word.frames > 0 and word.word not in silent
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
