"""Rescoring of lattices with a larger n-gram model, against costs of enumerated paths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asr_am.decode.decode_set import decodable
from asr_am.decode.graph import build_hclg
from asr_am.decode.lattice import Lattice, LmScale, beam_excess, best_paths, read_lattices
from asr_am.decode.ngram_rescore import rescore, step
from asr_am.decode.search import SearchOptions
from asr_am.decode.shards import DecodeOptions, Job, load_decoder
from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree
from asr_am.lang.arpa import Arpa
from asr_am.lang.ngram import estimate
from asr_am.lang.ngram_automaton import EMPTY, LmPair, NgramAutomaton
from asr_am.lang.prepare import prepare_lm
from asr_am.lang.prune import prune
from tests.support.decoding_corpus import write_system

WORDS = {name: number for number, name in enumerate(["<eps>", *"abcdef", "<s>", "</s>", "<unk>"])}
NAMES = {number: name for name, number in WORDS.items()}


def random_lm(order: int, rng: np.random.Generator) -> Arpa:
    sentences = [
        list(rng.choice(list("abcdef"), size=rng.integers(1, 9), p=[0.4, 0.25, 0.15, 0.1, 0.06, 0.04]))
        for _ in range(60)
    ]
    return estimate(sentences, list("abcdef"), order)


def random_lattice(small: Arpa, rng: np.random.Generator, num_states: int = 9) -> Lattice:
    """Returns a lattice whose graph costs are those of `small` along some path, plus a part that rescoring keeps."""
    arcs, weights = [], []
    for source in range(num_states - 1):
        for _ in range(3):
            target = int(rng.integers(source + 1, min(num_states, source + 4)))
            arcs.append((source, target, 1, int(rng.choice([0, 1, 2, 3, 4, 5, 6]))))
            weights.append((rng.uniform(0, 3), rng.uniform(-30, 30)))
    final_S2 = np.full((num_states, 2), np.inf)
    final_S2[num_states - 1] = 0.5, 2.0
    final_S2[num_states - 2] = 1.5, 1.0
    return Lattice.from_arrays(FstArrays.build(0, np.array(arcs), np.array(weights), final_S2))


def sentence_cost(arpa: Arpa, words: list[int]) -> float:
    history, total = ["<s>"], 0.0
    for word in [*(NAMES[w] for w in words), "</s>"]:
        total -= np.log(10) * arpa.logprob(history, word)
        history.append(word)
    return total


def paths(lattice: Lattice) -> list[list[int]]:
    """Enumerates all paths as lists of arcs."""
    found, todo = [], [(0, [])]
    while todo:
        state, path = todo.pop()
        if state == lattice.num_states - 1:
            found.append(path)
        todo += [(int(lattice.target_A[a]), [*path, int(a)]) for a in np.flatnonzero(lattice.source_A == state)]
    return found


def cost_of(lattice: Lattice, path: list[int], lm_weight: float) -> tuple[tuple, float]:
    words = tuple(int(w) for w in lattice.word_A[path] if w)
    acoustic = tuple(np.round(lattice.acoustic_A[path], 4))
    return (words, acoustic), float((lattice.graph_A[path] + lattice.acoustic_A[path] / lm_weight).sum())


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_steps_cost_what_the_model_says(order: int) -> None:
    rng = np.random.default_rng(order)
    arpa = random_lm(order, rng)
    automaton = NgramAutomaton.from_arpa(arpa, WORDS)
    for _ in range(200):
        words = rng.integers(1, 7, size=rng.integers(0, 7)).tolist()
        state, total = automaton.start, 0.0
        for word in [*words, automaton.end]:
            state, cost = step(automaton, state, word)
            total += cost
        assert total == pytest.approx(sentence_cost(arpa, words), rel=1e-5)
    assert step(automaton, EMPTY, 99)[1] == np.inf


@pytest.mark.parametrize("seed", range(8))
def test_every_path_gets_the_cost_of_the_large_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    large = random_lm(3, rng)
    small = prune(large, 12)
    assert len(small.logprobs) < 3 or len(small.logprobs[2]) < len(large.logprobs[2])
    pair = LmPair(*(NgramAutomaton.from_arpa(arpa, WORDS) for arpa in (small, large)))
    lattice = random_lattice(small, rng)
    rescored = Lattice.from_arrays(rescore(lattice, pair, lm_weight=10.0, beam=1000.0))
    expected: dict[tuple, float] = {}
    for path in paths(lattice):
        key, cost = cost_of(lattice, path, 10.0)
        cost += sentence_cost(large, list(key[0])) - sentence_cost(small, list(key[0]))
        expected[key] = min(cost, expected.get(key, np.inf))
    found = dict(cost_of(rescored, path, 10.0) for path in paths(rescored))
    assert found.keys() == expected.keys()
    assert [found[key] for key in found] == pytest.approx([expected[key] for key in found], abs=1e-4)


def test_the_beam_keeps_the_best_path_and_bounds_the_others() -> None:
    rng = np.random.default_rng(5)
    large = random_lm(3, rng)
    pair = LmPair(*(NgramAutomaton.from_arpa(arpa, WORDS) for arpa in (prune(large, 5), large)))
    lattice = random_lattice(large, rng, num_states=25)
    whole, narrow = (Lattice.from_arrays(rescore(lattice, pair, 10.0, beam)) for beam in (1000.0, 2.0))
    assert len(narrow.source_A) < len(whole.source_A)
    assert beam_excess(narrow, LmScale(10.0)).max() <= 2.0
    words = [[int(w) for w in one.word_A[best_paths(one, [LmScale(10.0)])[0]] if w] for one in (whole, narrow)]
    assert words[0] == words[1]


def test_files_of_automata(tmp_path: Path) -> None:
    automaton = NgramAutomaton.from_arpa(random_lm(3, np.random.default_rng(0)), WORDS)
    automaton.save(tmp_path / "lm.npz")
    for name, value in automaton._asdict().items():
        np.testing.assert_array_equal(value, getattr(NgramAutomaton.load(tmp_path / "lm.npz"), name))
    (tmp_path / "lm.npz").write_bytes((tmp_path / "lm.npz").read_bytes()[:-50])
    with pytest.raises(InputError, match=r"lm\.npz: not readable.*run stage 1"):
        NgramAutomaton.load(tmp_path / "lm.npz")


def test_a_pruned_graph_decodes_as_the_whole_model_does(tmp_path: Path) -> None:
    whole = write_system(tmp_path)
    (tmp_path / "small_lm").mkdir()
    (tmp_path / "small_graph").mkdir()
    options = {"name": "lm", "order": 2, "arpa": None, "text": "train"}
    prepare_lm(tmp_path / "data", whole.lang_dir, tmp_path / "small_lm", **options, max_ngrams=1)  # type: ignore[arg-type]
    states = StateTable.load(whole.states)
    tree = DecisionTree.load(whole.align_dir / "tree.json")
    build_hclg(whole.lang_dir, tmp_path / "small_lm", states, tree, tmp_path / "small_graph")
    how = DecodeOptions(SearchOptions(beam=40.0, lattice_beam=12.0, max_active=0), (LmScale(10.0),), nbest=0)
    utterance, *_ = decodable(whole, tmp_path / "data", "dev")
    found = []
    for graph in (whole.graph, tmp_path / "small_graph/HCLG.fst"):
        decoder = load_decoder(Job(whole.source("dev"), graph, whole.lang_dir, whole.states, how))
        assert (decoder.lms is None) == (graph == whole.graph)
        decoded, data = decoder.decode(utterance)
        (tmp_path / "one.lat").write_bytes(b"utterance " + data)
        ((_, lattice),) = read_lattices(tmp_path / "one.lat")
        (best,) = best_paths(lattice, [LmScale(10.0)])
        found.append(([word.word for word in decoded.words[0]], cost_of(lattice, best.tolist(), 10.0)[1]))
    assert found[0][0] == found[1][0] and found[0][1] == pytest.approx(found[1][1], rel=1e-5)
