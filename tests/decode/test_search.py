"""Search and lattices: the best path under any LM scale is what a search with that scale finds."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import NamedTuple

import kaldi_decoder
import kaldifst
import numpy as np
import pytest

from asr_am.decode import lattice as paths
from asr_am.decode.lattice import Lattice, LmScale, arc_posteriors, beam_excess, best_paths, costs, read_lattices
from asr_am.decode.nbest import nbest
from asr_am.decode.search import SearchOptions, search
from asr_am.decode.search_graph import SearchGraph
from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable
from asr_am.hmm.training_graph import read_lexicon_fst, training_graph
from asr_am.lang.lang_dir import Lang
from tests.support.hmm_reference import LeftTree, small_lang, small_states
from tests.support.synthetic_lattices import alignment, first_pronunciations, log_likelihoods, search_graph, small_graph

WIDE = SearchOptions(beam=200.0, lattice_beam=200.0, acoustic_scale=0.1)
GRID = [LmScale(lm, insertion) for lm in (1.0, 5.0, 10.0, 20.0) for insertion in (-1.0, 0.0, 1.0)]


class Small(NamedTuple):
    """A small lexicon, its states and its decoding graph."""

    lang: Lang
    states: StateTable
    fst: kaldifst.StdVectorFst
    graph: SearchGraph


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    lang = small_lang(folder)
    states = small_states(lang, LeftTree())
    fst = small_graph(lang, states, LeftTree(), folder)
    return Small(lang, states, fst, search_graph(fst))


def noisy(small: Small, text: str, seed: int, clarity: float = 2.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    phones = first_pronunciations(small.lang.word_ids(text), small.lang)
    frames = alignment(phones, small.states, LeftTree(), rng, longest=2)
    return log_likelihoods([label for label, _ in frames], small.states, rng, clarity, noise=2.0)


def lattice_of(small: Small, scores_TP: np.ndarray, options: SearchOptions = WIDE) -> Lattice:
    return Lattice.from_arrays(search(small.graph, scores_TP, small.states, options).arrays)


def words_of(lattice: Lattice, path: np.ndarray) -> tuple[int, ...]:
    return tuple(lattice.word_A[path][lattice.word_A[path] > 0].tolist())


def test_ctrl_c_during_a_search_is_an_exception(small: Small) -> None:
    """Numba crashes if it makes its result by Python code that raises."""
    scores_TP = np.tile(noisy(small, "AB A B2", 0), (2000, 1))
    search(small.graph, scores_TP[:10], small.states, WIDE)  # compiles it
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
            search(small.graph, scores_TP, small.states, WIDE)
        except KeyboardInterrupt:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def searched_again(small: Small, scores_TP: np.ndarray, scale: LmScale) -> float:
    """Returns the cost of the best path by a Viterbi search of a graph that has the insertion penalty in its arcs."""
    graph = FstArrays.from_fst(small.fst)
    words = (graph.olabel_A > 0).astype(np.float32)
    penalized = FstArrays(
        graph.start, graph.source_A, graph.target_A, graph.ilabel_A, graph.olabel_A,
        graph.weight_A + np.float32(scale.insertion) * words, graph.final_S,
    ).to_fst()  # fmt: skip
    options = kaldi_decoder.FasterDecoderOptions(beam=1000.0)
    decoder = kaldi_decoder.FasterDecoder(penalized, options)
    scaled_TL = np.ascontiguousarray(scores_TP[:, small.states.pdf_L] / np.float32(scale.lm))
    decoder.decode(kaldi_decoder.DecodableCtc(scaled_TL))
    assert decoder.reached_final()
    _, best = decoder.get_best_path()
    raw = kaldifst.Lattice(best)
    fields = [line.split() for line in raw.to_str(show_weight_one=True).splitlines()]
    return sum(float(number) for line in fields for number in line[-1].split(","))


@pytest.mark.parametrize(("text", "seed"), [("A B", 1), ("AB A B2", 2), ("B B2 A AB", 3), ("A A", 4)])
def test_every_weighting_gives_what_searching_again_gives(small: Small, text: str, seed: int) -> None:
    scores_TP = noisy(small, text, seed)
    lattice = lattice_of(small, scores_TP)
    assert lattice.num_frames == len(scores_TP)
    cost_AK = costs(lattice, GRID)
    for scale, cost_A, path in zip(GRID, cost_AK.T, best_paths(lattice, GRID), strict=True):
        assert cost_A[path].sum() == pytest.approx(searched_again(small, scores_TP, scale), abs=2e-2), scale


def test_weightings_in_parts_give_the_same_paths(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    lattice = lattice_of(small, noisy(small, "AB A B2", 2))
    whole = best_paths(lattice, GRID)
    monkeypatch.setattr(paths, "MAX_CELLS", 2 * len(lattice.source_A))
    for path, other in zip(best_paths(lattice, GRID), whole, strict=True):
        assert np.array_equal(path, other)


def test_paths_are_paths(small: Small) -> None:
    lattice = lattice_of(small, noisy(small, "A AB B", 5))
    for path in best_paths(lattice, GRID):
        assert lattice.source_A[path[0]] == 0
        assert lattice.target_A[path[-1]] == lattice.num_states - 1
        assert (lattice.target_A[path[:-1]] == lattice.source_A[path[1:]]).all()
        assert np.count_nonzero(lattice.label_A[path]) == lattice.num_frames


def test_acoustic_costs_are_the_scores_and_unscaled(small: Small) -> None:
    scores_TP = noisy(small, "AB B", 6)
    lattice = lattice_of(small, scores_TP, SearchOptions(beam=50.0, lattice_beam=10.0, acoustic_scale=0.05))
    frame_A = lattice.frame_S[lattice.source_A]
    emitting = lattice.label_A > 0
    pdfs = small.states.pdf_L[lattice.label_A[emitting] - 1]
    expected = -scores_TP[frame_A[emitting], pdfs]
    assert lattice.acoustic_A[emitting] == pytest.approx(expected, abs=2e-3)
    assert not lattice.acoustic_A[~emitting].any()


def test_every_frame_has_posteriors_that_sum_to_one(small: Small) -> None:
    lattice = lattice_of(small, noisy(small, "A B A", 7, clarity=1.0))
    frame_A = lattice.frame_S[lattice.source_A]
    emitting = lattice.label_A > 0
    for posterior_A in arc_posteriors(lattice, GRID).T:
        sums = np.bincount(frame_A[emitting], posterior_A[emitting])
        assert sums == pytest.approx(np.ones(lattice.num_frames), abs=1e-6)


def all_sentences(lattice: Lattice, scale: LmScale) -> dict[tuple[int, ...], float]:
    """Returns each word sequence with the cost of its best path, by walking every path."""
    cost_A = costs(lattice, [scale])[:, 0]
    found: dict[int, dict[tuple[int, ...], float]] = {0: {(): 0.0}}
    for arc in range(len(lattice.source_A)):  # sorted by target, and every arc leads to a later state
        for words, cost in found.get(int(lattice.source_A[arc]), {}).items():
            longer = words + (int(lattice.word_A[arc]),) * bool(lattice.word_A[arc])
            target = found.setdefault(int(lattice.target_A[arc]), {})
            target[longer] = min(target.get(longer, np.inf), cost + float(cost_A[arc]))
    return found[lattice.num_states - 1]


def test_nbest_is_the_cheapest_of_all_sentences(small: Small) -> None:
    scale = LmScale(8.0, 0.5)
    lattice = lattice_of(small, noisy(small, "A AB", 8), SearchOptions(beam=100.0, lattice_beam=20.0))
    every = sorted(all_sentences(lattice, scale).items(), key=lambda item: item[1])
    assert len(every) > 10
    found = nbest(lattice, scale, 10)
    assert len({s.words for s in found}) == 10
    cost = [s.graph + s.acoustic / scale.lm + scale.insertion * len(s.words) for s in found]
    assert cost == pytest.approx([c for _, c in every[:10]], abs=1e-2)
    assert [s.words for s in found[:3]] == [w for w, _ in every[:3]]


def test_beam_excess_is_zero_on_the_best_path_only(small: Small) -> None:
    lattice = lattice_of(small, noisy(small, "B A", 9))
    excess_A = beam_excess(lattice, LmScale(10.0))
    best = best_paths(lattice, [LmScale(10.0)])[0]
    assert excess_A[best] == pytest.approx(np.zeros(len(best)), abs=1e-9)
    assert (excess_A > -1e-9).all() and excess_A.max() > 0.1


def test_an_utterance_that_ends_too_soon_keeps_what_was_said(small: Small) -> None:
    """The words need eight states. After five frames the lattice ends in the states within the beam."""
    words = small.lang.word_ids("AB AB")
    lexicon = read_lexicon_fst(small.lang.directory / "L.fst")
    graph = search_graph(training_graph(words, lexicon, small.states, LeftTree()))
    scores_TP = noisy(small, "AB AB", 10)
    assert search(graph, scores_TP, small.states, WIDE).complete
    cut = search(graph, scores_TP[:5], small.states, WIDE)
    assert not cut.complete
    assert Lattice.from_arrays(cut.arrays).num_frames == 5


def test_an_utterance_without_frames_has_no_lattice(small: Small) -> None:
    result = search(small.graph, np.empty((0, small.states.num_pdfs), np.float32), small.states, WIDE)
    assert (result.data, result.complete) == (b"", False)


def write_archive(path: Path, small: Small) -> dict[str, Lattice]:
    lattices = {}
    with path.open("wb") as file:
        for seed, text in enumerate(["A B", "AB", "B2 A B"]):
            result = search(small.graph, noisy(small, text, seed), small.states, SearchOptions(lattice_beam=4.0))
            lattices[f"utt-{seed}"] = Lattice.from_arrays(result.arrays)
            file.write(f"utt-{seed} ".encode() + result.data)
    return lattices


def test_archives_come_back_as_written(small: Small, tmp_path: Path) -> None:
    written = write_archive(tmp_path / "x.ark", small)
    read = dict(read_lattices(tmp_path / "x.ark"))
    assert list(read) == list(written)
    for utterance, lattice in read.items():
        for name in vars(lattice):
            assert (getattr(lattice, name) == getattr(written[utterance], name)).all()


def test_archives_have_kaldis_format(small: Small, tmp_path: Path) -> None:
    """Checks key, blank, OpenFst magic, `vector`, `lattice4`: Kaldi's LatticeHolder::Read accepts these as binary."""
    write_archive(tmp_path / "x.ark", small)
    data = (tmp_path / "x.ark").read_bytes()
    assert data.startswith(b"utt-0 \xd6\xfd\xb2\x7e\x06\x00\x00\x00vector\x08\x00\x00\x00lattice4\x02\x00\x00\x00")
    (tmp_path / "one.fst").write_bytes(data[len(b"utt-0 ") :])
    again = kaldifst.Lattice.read(str(tmp_path / "one.fst"))
    assert again is not None and again.num_states > 0


def test_damaged_archives_are_refused(small: Small, tmp_path: Path) -> None:
    """Truncated and changed archives raise InputError, or give lattices that are well formed."""
    path = tmp_path / "x.ark"
    write_archive(path, small)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(150):
        data = bytearray(whole[: int(rng.integers(1, len(whole)))] if trial % 2 else whole)
        for _ in range(3):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(data)
        try:
            for _, lattice in read_lattices(path):
                assert (lattice.level_S[lattice.source_A] < lattice.level_S[lattice.target_A]).all()
        except InputError as error:
            assert "x.ark: damaged at byte" in str(error)
            refused += 1
    assert refused >= 75
