"""The search beside kaldi_decoder's LatticeSimpleDecoder on random graphs, and the limits that only ours has."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import kaldi_decoder
import kaldifst
import numpy as np
import pytest

from asr_am.decode import search as search_module
from asr_am.decode import token_passing
from asr_am.decode.lattice import Lattice, LmScale, arc_posteriors, beam_excess, best_paths, costs
from asr_am.decode.search import SearchOptions, search
from asr_am.decode.search_graph import SearchGraph
from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays, fst_bytes
from asr_am.hmm.states import StateTable
from tests.support.synthetic_lattices import search_graph

LABELS, PDFS, SCALE = 12, 8, 0.5
NO_LIMITS = SearchOptions(acoustic_scale=SCALE, max_active=0, min_active=0)
ROUNDING = 0.02  # of float32 sums in kaldi_decoder


def states_of(rng: np.random.Generator) -> StateTable:
    """Returns a table in which labels share pdfs."""
    pdf_L = rng.integers(0, PDFS, LABELS)
    labels_L3 = np.stack([np.arange(1, LABELS + 1), np.zeros(LABELS, int), pdf_L], axis=1).astype(np.int32)
    half_L = np.full(LABELS, np.log(0.5), np.float32)
    return StateTable(labels_L3, half_L, half_L, dict.fromkeys(range(1, LABELS + 1), 1), PDFS)


def random_fst(
    rng: np.random.Generator, num_states: int, num_arcs: int, epsilons: float, finals: float = 0.2
) -> kaldifst.StdVectorFst:
    """Returns a graph in which arcs without labels lead to later states only."""
    source, target = rng.integers(0, num_states, (2, num_arcs))
    label = rng.integers(1, LABELS + 1, num_arcs)
    empty = (rng.random(num_arcs) < epsilons) & (source != target)
    label[empty] = 0
    source, target = np.where(empty, [np.minimum(source, target), np.maximum(source, target)], [source, target])
    arcs_A4 = np.stack([source, target, label, rng.integers(0, 5, num_arcs)], axis=1)
    final_S = np.where(rng.random(num_states) < finals, rng.gamma(1.0, 1.0, num_states), np.inf)
    return FstArrays.build(0, arcs_A4, rng.gamma(1.0, 1.0, num_arcs), final_S).to_fst()


def kaldi_search(
    fst: kaldifst.StdVectorFst, scores_TP: np.ndarray, states: StateTable, options: SearchOptions
) -> tuple[FstArrays | None, bool]:
    """Returns kaldi_decoder's raw lattice with unscaled acoustic costs, and whether a final state was reached."""
    scores_TL = np.ascontiguousarray(scores_TP[:, states.pdf_L] * np.float32(options.acoustic_scale))
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=options.beam, lattice_beam=options.lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(fst, config)
    decoder.decode(kaldi_decoder.DecodableCtc(scores_TL))
    complete = bool(np.isfinite(decoder.final_relative_cost()))
    found, lattice = decoder.get_raw_lattice()
    if not found or lattice.num_states == 0:
        return None, complete
    kaldifst.scale_lattice([[1.0, 0.0], [0.0, 1.0 / options.acoustic_scale]], lattice)
    return FstArrays.from_lattice(fst_bytes(lattice))[0], complete


def arcs_of(lattice: Lattice, options: SearchOptions) -> np.ndarray:
    """Returns sorted rows (frame, label, word, graph cost, acoustic cost, beam excess, posterior) of the arcs.

    Arcs at the very edge of the lattice beam are left out: rounding decides about them.
    """
    scale = LmScale(1 / options.acoustic_scale)
    excess_A, posterior_A = beam_excess(lattice, scale), arc_posteriors(lattice, [scale])[:, 0]
    columns = (
        lattice.frame_S[lattice.source_A], lattice.label_A, lattice.word_A, lattice.graph_A, lattice.acoustic_A,
        excess_A, posterior_A,
    )  # fmt: skip
    rows = np.stack(columns, axis=1)[excess_A < options.lattice_beam - ROUNDING]
    return rows[np.lexsort(rows.round(2).T[::-1])]


def assert_same_best(mine: Lattice, other: Lattice, scale: LmScale) -> None:
    (path,), (expected,) = best_paths(mine, [scale]), best_paths(other, [scale])
    assert costs(mine, [scale])[path].sum() == pytest.approx(costs(other, [scale])[expected].sum(), abs=ROUNDING)


def assert_same(mine: Lattice, other: Lattice, options: SearchOptions) -> None:
    arcs, expected = arcs_of(mine, options), arcs_of(other, options)
    assert len(arcs) == len(expected)
    np.testing.assert_array_equal(arcs[:, :3], expected[:, :3])
    np.testing.assert_allclose(arcs[:, 3:], expected[:, 3:], atol=ROUNDING)
    for scale in (LmScale(1.0), LmScale(4.0, 0.5)):
        assert_same_best(mine, other, scale)


@pytest.mark.parametrize("epsilons", [0.0, 0.1, 0.4])
@pytest.mark.parametrize(("beam", "lattice_beam"), [(1.0, 1.0), (4.0, 8.0), (100.0, 1.0), (100.0, 8.0)])
def test_lattices_are_those_of_kaldi_decoder(epsilons: float, beam: float, lattice_beam: float) -> None:
    """Many graphs have no path, or none to a final state. Lengths are on both sides of the pruning interval.

    With a narrow beam, what a lattice has beside the best path depends on the order in which tokens are expanded.
    """
    options = replace(NO_LIMITS, beam=beam, lattice_beam=lattice_beam)
    kinds: Counter[str] = Counter()
    for seed in range(25):
        rng = np.random.default_rng(seed)
        fst = random_fst(rng, int(rng.integers(2, 40)), int(rng.integers(5, 160)), epsilons, finals=0.1)
        states, graph = states_of(rng), search_graph(fst)
        scores_TP = rng.normal(0.0, 6.0, (int(rng.integers(1, 80)), PDFS)).astype(np.float32)
        found = search(graph, scores_TP, states, options)
        expected, complete = kaldi_search(fst, scores_TP, states, options)
        assert found.complete == complete
        assert (found.arrays is None) == (expected is None)
        if found.arrays is not None and expected is not None:
            mine, other = Lattice.from_arrays(found.arrays), Lattice.from_arrays(expected)
            assert_same_best(mine, other, LmScale(1 / SCALE))
            if beam == 100.0:
                assert_same(mine, other, options)
        kinds["none" if expected is None else "complete" if complete else "incomplete"] += 1
    assert kinds["complete"] >= 3 and min(kinds[kind] for kind in ("none", "incomplete")) >= 1, kinds


def large(seed: int) -> tuple[SearchGraph, StateTable, np.ndarray]:
    rng = np.random.default_rng(seed)
    fst, states = random_fst(rng, 3000, 12000, epsilons=0.1), states_of(rng)
    return search_graph(fst), states, rng.normal(0.0, 2.0, (60, PDFS)).astype(np.float32)


def test_max_active_limits_the_tokens_and_finds_a_path() -> None:
    graph, states, scores_TP = large(0)
    wide = replace(NO_LIMITS, beam=20.0, lattice_beam=2.0)
    unlimited = search(graph, scores_TP, states, wide)
    assert unlimited.active > 1000
    limited = search(graph, scores_TP, states, replace(wide, max_active=100))
    assert limited.arrays is not None and 0 < limited.active <= 101
    scale = [LmScale(1 / SCALE)]
    lattices = [Lattice.from_arrays(found.arrays) for found in (unlimited, limited) if found.arrays]
    best, cost = (costs(lattice, scale)[best_paths(lattice, scale)[0]].sum() for lattice in lattices)
    assert best <= cost + ROUNDING < best + 10.0
    enough = search(graph, scores_TP, states, replace(wide, max_active=graph.num_states))
    assert enough.data == unlimited.data


def test_min_active_widens_the_beam() -> None:
    graph, states, scores_TP = large(1)
    narrow = replace(NO_LIMITS, beam=0.5)
    assert search(graph, scores_TP, states, narrow).active < 20
    assert 90 < search(graph, scores_TP, states, replace(narrow, min_active=100)).active <= 101


def test_few_tokens_are_all_kept() -> None:
    """With fewer tokens than `min_active`, the narrowest beam is as good as none."""
    rng = np.random.default_rng(3)
    fst, states = random_fst(rng, 20, 80, epsilons=0.1), states_of(rng)
    scores_TP = rng.normal(0.0, 6.0, (40, PDFS)).astype(np.float32)
    narrow, wide = (replace(NO_LIMITS, beam=beam, lattice_beam=3.0) for beam in (0.1, 1000.0))
    graph = search_graph(fst)
    expected = search(graph, scores_TP, states, wide)
    assert search(graph, scores_TP, states, replace(narrow, min_active=200)).data == expected.data
    assert search(graph, scores_TP, states, narrow).data != expected.data


def test_the_limit_of_active_tokens_is_the_nth_cost() -> None:
    rng = np.random.default_rng(4)
    for n in (1, 7, 199):
        cost = rng.gamma(2.0, 2.0, 300).astype(np.float32) - np.float32(3)
        cost[rng.integers(0, 300, 100)] = cost[17]  # ties
        beams = token_passing.Beams(np.float32(30), np.float32(6), n, 0, np.float32(0.5))
        cutoff, adaptive_beam, best = token_passing._cutoff(cost, beams)
        assert best == cost.argmin() and cutoff == np.sort(cost)[n]
        assert adaptive_beam == pytest.approx(cutoff - cost.min() + 0.5, abs=1e-5)


def test_equal_costs_everywhere_give_every_path() -> None:
    """Two states, each with an arc to either: all tokens and all paths tie."""
    arcs_A4 = np.array([[0, 0, 1, 1], [0, 1, 1, 2], [1, 0, 1, 3], [1, 1, 1, 4]])
    fst = FstArrays.build(0, arcs_A4, np.zeros(4), np.zeros(2)).to_fst()
    states = states_of(np.random.default_rng(0))
    options = replace(NO_LIMITS, beam=1.0, lattice_beam=1.0)
    for limit in (0, 1):
        found = search(search_graph(fst), np.zeros((3, PDFS), np.float32), states, replace(options, max_active=limit))
        assert found.complete and found.arrays is not None
        assert Counter(found.arrays.olabel_A.tolist()) == {1: 3, 2: 3, 3: 2, 4: 2}


def test_serial_numbers_start_again_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled code has the constant in it, so its Python form is run."""
    graph, states, scores_TP = large(2)
    options = replace(NO_LIMITS, beam=3.0)
    expected = search(graph, scores_TP[:8], states, options)
    for name, value in vars(token_passing).items():
        if hasattr(value, "py_func"):
            monkeypatch.setattr(token_passing, name, value.py_func)
    monkeypatch.setattr(token_passing, "MAX_SERIAL", graph.num_states + 200)
    monkeypatch.setattr(search_module, "search_tokens", token_passing.search_tokens)
    assert search(graph, scores_TP[:8], states, options).data == expected.data


def test_threads_share_a_graph() -> None:
    graph, states, scores_TP = large(6)
    options = replace(NO_LIMITS, beam=6.0)
    parts = [scores_TP[begin:] for begin in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part_TP: search(graph, part_TP, states, options).data, parts))
    assert found == [search(graph, part_TP, states, options).data for part_TP in parts]


def test_graphs_that_cannot_be_searched_are_refused() -> None:
    rng = np.random.default_rng(5)
    states, scores_TP = states_of(rng), np.zeros((5, PDFS), np.float32)
    graph = search_graph(random_fst(rng, 10, 50, 0.1))
    with pytest.raises(InputError, match="do not match"):
        search(graph, scores_TP[:, 1:], states, NO_LIMITS)
    few = StateTable(states.labels_L3[:3], states.loop_L[:3], states.next_L[:3], {1: 1, 2: 1, 3: 1}, PDFS)
    with pytest.raises(InputError, match="do not match"):
        search(graph, scores_TP, few, NO_LIMITS)
    with pytest.raises(ValueError, match="header"):
        search_graph(kaldifst.StdVectorFst())


@pytest.mark.parametrize("wrong", [{"beam": 0.0}, {"max_active": -1}, {"max_active": 200}, {"min_active": -1}])
def test_wrong_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"search: .*{next(iter(wrong))}"):
        SearchOptions(**wrong)
