"""Reference costs of all paths of a graph, by enumeration from the definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import kaldifst
import numpy as np

from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable, Tree
from asr_am.lang.lang_dir import Lang
from asr_am.lang.prepare import prepare_lang

Paths = dict[tuple[tuple[int, ...], tuple[int, ...]], float]  # (inputs, outputs) -> cost, equal paths summed
SILENCE_PROB = 0.4

# A has two pronunciations, AB is pronounced like A B, and B like B2.
LEXICON = "A aa\nA bb aa\nAB aa bb\nB bb\nB2 bb\n"


def small_lang(folder: Path) -> Lang:
    """Writes a lang directory with two phones."""
    data, lang_dir = folder / "data", folder / "lang"
    data.mkdir()
    lang_dir.mkdir()
    (data / "lexicon.txt").write_text(LEXICON)
    prepare_lang(data, lang_dir, position_dependent=False, silence_prob=SILENCE_PROB)
    return Lang.load(lang_dir)


class ByWindow:
    """The pdfs of many windows, one at a time."""

    pdf: Callable[[tuple[int, ...], int], int]

    def pdfs(self, windows_MC: np.ndarray, state_M: np.ndarray) -> np.ndarray:
        pairs = zip(windows_MC.tolist(), state_M.tolist(), strict=True)
        return np.array([self.pdf(tuple(window), state) for window, state in pairs], np.int32)


class LeftTree(ByWindow):
    """A triphone tree whose pdfs depend on the phone and on whether its left neighbour is odd."""

    width = 3

    def pdf(self, window: tuple[int, ...], state: int) -> int:
        return window[1] * 4 + state * 2 + window[0] % 2


class RightTree(ByWindow):
    """A triphone tree whose pdfs depend on the phone and on whether silence or the edge follows."""

    width = 3

    def pdf(self, window: tuple[int, ...], state: int) -> int:
        return window[1] * 4 + state * 2 + (window[2] <= 1)


class MonoTree(ByWindow):
    """A monophone tree with one pdf per state."""

    width = 1

    def pdf(self, window: tuple[int, ...], state: int) -> int:
        return window[0] * 2 + state


def small_states(lang: Lang, tree: Tree) -> StateTable:
    """Returns nonsilence phones of two states and silence phones of one, with different probabilities everywhere."""
    states_P = dict.fromkeys(lang.nonsilence_phones, 2) | dict.fromkeys(lang.silence_phones, 1)
    phones = list(states_P)
    triples = {
        (phone, state, tree.pdf((phone,) if tree.width == 1 else (left, phone, right), state))
        for left, phone, right in itertools.product([0, *phones], phones, [0, *phones])
        for state in range(states_P[phone])
    }
    labels_L3 = np.array(sorted(triples), dtype=np.int32)
    stay_L = np.linspace(0.2, 0.9, len(labels_L3)).astype(np.float32)
    num_pdfs = int(labels_L3[:, 2].max()) + 1
    return StateTable(labels_L3, np.log(stay_L), np.log1p(-stay_L), states_P, num_pdfs)


def add(paths: Paths, key: tuple[tuple[int, ...], tuple[int, ...]], cost: float) -> None:
    """Adds the probability of another path with these labels."""
    known = paths.get(key)
    paths[key] = cost if known is None else -float(np.logaddexp(-known, -cost))


def paths_of(fst: kaldifst.StdVectorFst, max_inputs: int) -> Paths:
    """Returns all paths of an FST without epsilon loops that have at most `max_inputs` input labels."""
    graph = FstArrays.from_fst(fst)
    arcs_S: list[list[tuple[int, int, int, float]]] = [[] for _ in range(graph.num_states)]
    columns = (graph.source_A, graph.target_A, graph.ilabel_A, graph.olabel_A, graph.weight_A)
    for source, *arc in zip(*(column.tolist() for column in columns), strict=True):
        arcs_S[source].append(tuple(arc))
    found: Paths = {}
    todo: list[tuple[int, tuple[int, ...], tuple[int, ...], float]] = [(graph.start, (), (), 0.0)]
    while todo:
        state, inputs, outputs, cost = todo.pop()
        if np.isfinite(graph.final_S[state]):
            add(found, (inputs, outputs), cost + float(graph.final_S[state]))
        for target, label, word, weight in arcs_S[state]:
            if label == 0 or len(inputs) < max_inputs:
                longer = inputs + (label,) * (label > 0), outputs + (word,) * (word > 0)
                todo.append((target, *longer, cost + weight))
    return found


def sentences_said(
    sentences: Mapping[tuple[int, ...], float], lang: Lang, states: StateTable, tree: Tree, frames: int, scale: float
) -> Paths:
    """Returns all paths of `sentences` (word ids -> cost) as graph labels, with their costs.

    Args:
        sentences: cost of each sentence.
        frames: maximum length of a path.
        scale: self-loop scale.
    """
    found: Paths = {}
    for words, cost in sentences.items():
        for phones, phone_cost in _pronounced(words, lang):
            for labels, label_cost in _states_of(phones, states, tree, frames, scale):
                add(found, (labels, words), cost + phone_cost + label_cost)
    return found


def _pronounced(words: tuple[int, ...], lang: Lang) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields every phone sequence. Silence is optional before the first word and after each word."""
    choices = [lang.pronunciations[lang.word_names[word]] for word in words]
    for pronunciations in itertools.product(*choices):
        for silences in itertools.product([False, True], repeat=len(words) + 1):
            pieces = [(lang.optional_silence,) * silences[0]]
            for phones, silence in zip(pronunciations, silences[1:], strict=True):
                pieces += [phones, (lang.optional_silence,) * silence]
            cost = -sum(math.log(SILENCE_PROB if silence else 1 - SILENCE_PROB) for silence in silences)
            yield tuple(itertools.chain(*pieces)), cost


def _states_of(
    phones: tuple[int, ...], states: StateTable, tree: Tree, frames: int, scale: float
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields every sequence of at most `frames` graph labels of a phone sequence."""
    padded = (0, *phones, 0)
    labels = [
        states.label(phone, s, tree.pdf((phone,) if tree.width == 1 else padded[i : i + 3], s))
        for i, phone in enumerate(phones)
        for s in range(states.states_P[phone])
    ]
    for lengths in _lengths(len(labels), frames):
        cost = sum(
            -scale * (float(states.next_L[label - 1]) + (n - 1) * float(states.loop_L[label - 1]))
            for label, n in zip(labels, lengths, strict=True)
        )
        yield tuple(label for label, n in zip(labels, lengths, strict=True) for _ in range(n)), cost


def _lengths(count: int, frames: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to distribute at most `frames` frames over `count` states, at least one each."""
    if count == 0:
        yield ()
    for first in range(1, frames - count + 2 if count else 0):
        for rest in _lengths(count - 1, frames - first):
            yield (first, *rest)
