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
from asr_am.lang.ngram_automaton import EMPTY, LmPair, NgramAutomaton
from asr_am.lang.prepare import prepare_lm
from asr_am.lang.prune import prune
from tests.support.decoding_corpus import write_system
from tests.support.lattice_paths import WORDS, cost_of, paths, random_lattice, random_lm, sentence_cost


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
    rescored = Lattice.from_arrays(rescore(lattice, pair, LmScale(10.0), beam=1000.0))
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
    whole, narrow = (Lattice.from_arrays(rescore(lattice, pair, LmScale(10.0), beam)) for beam in (1000.0, 2.0))
    assert len(narrow.source_A) < len(whole.source_A)
    assert beam_excess(narrow, LmScale(10.0)).max() <= 2.0
    words = [[int(w) for w in one.word_A[best_paths(one, [LmScale(10.0)])[0]] if w] for one in (whole, narrow)]
    assert words[0] == words[1]


def test_a_path_that_the_model_does_not_have_may_be_longer_than_all_others() -> None:
    """The sentences a and bbbb, and a model that goes on after b with b only."""
    a, b, end = WORDS["a"], WORDS["b"], WORDS["</s>"]
    no_backoff = np.full(2, -1, dtype=np.int32), np.zeros(2, dtype=np.float32)
    large = NgramAutomaton(
        np.array([0, 3, 4]), np.array([a, b, end, b], dtype=np.int32), np.ones(4, dtype=np.float32),
        np.array([0, 1, 0, 1], dtype=np.int32), *no_backoff, start=0, end=end,
    )  # fmt: skip
    small = NgramAutomaton.from_arpa(random_lm(1, np.random.default_rng(0)), WORDS)
    arcs = [(0, 4, 1, a), (0, 1, 1, b), (1, 2, 1, b), (2, 3, 1, b), (3, 4, 1, b)]
    final_S2 = np.full((5, 2), np.inf)
    final_S2[4] = 0.0
    lattice = Lattice.from_arrays(FstArrays.build(0, np.array(arcs), np.zeros((5, 2)), final_S2))
    rescored = Lattice.from_arrays(rescore(lattice, LmPair(small, large), LmScale(10.0), beam=100.0))
    assert [rescored.word_A[path].tolist() for path in paths(rescored)] == [[a, 0]]


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
