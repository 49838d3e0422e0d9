"""Lattices, posteriors and graphs as Kaldi's files, parsed from the formats' definition and by kaldi_native_io."""

from __future__ import annotations

import struct
from pathlib import Path

import kaldi_native_io
import numpy as np
import pytest

from asr_am.decode.kaldi_lattice import (
    compact_lattice_bytes,
    frame_posteriors,
    graph_with_ids,
    posterior_bytes,
)
from asr_am.decode.lattice import Lattice
from asr_am.decode.search import SearchOptions, search
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.kaldi_model import transition_ids
from asr_am.hmm.states import StateTable
from tests.support.hmm_reference import LeftTree, small_lang, small_states
from tests.support.synthetic_lattices import alignment, log_likelihoods, search_graph, small_graph

Path_ = tuple[tuple[int, ...], tuple[int, ...], float, float]  # words, transition-ids, graph cost, acoustic cost
Parsed = tuple[list[list[tuple[int, int, float, float, tuple[int, ...]]]], list[tuple[float, float] | None]]


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> tuple[FstArrays, Lattice, StateTable]:
    """Returns a graph, and the lattice that the search makes of noisy speech with it."""
    folder = tmp_path_factory.mktemp("lattice")
    lang = small_lang(folder)
    states = small_states(lang, LeftTree())
    fst = small_graph(lang, states, LeftTree(), folder)
    rng = np.random.default_rng(3)
    frames = alignment([lang.phones[name] for name in ("SIL", "aa", "bb")], states, LeftTree(), rng, longest=2)
    scores_TP = log_likelihoods([label for label, _ in frames], states, rng, 8.0)
    found = search(search_graph(fst), scores_TP, states, SearchOptions(lattice_beam=2.0))
    return FstArrays.from_fst(fst), Lattice.from_arrays(found.arrays), states


def lattice_paths(lattice: Lattice) -> list[Path_]:
    """Enumerates the paths, with the transition-ids of each whole path as an alignment has them."""
    out: dict[int, list[int]] = {}
    for arc, source in enumerate(lattice.source_A.tolist()):
        out.setdefault(source, []).append(arc)
    found, stack = [], [(0, ())]
    while stack:
        state, arcs = stack.pop()
        if state == lattice.num_states - 1:
            chosen = np.array(arcs)
            labels, words = lattice.label_A[chosen], lattice.word_A[chosen]
            ids = transition_ids(labels[labels > 0])
            costs = float(lattice.graph_A[chosen].sum()), float(lattice.acoustic_A[chosen].sum())
            found.append((tuple(words[words > 0].tolist()), tuple(ids.tolist()), *costs))
        stack += [(int(lattice.target_A[arc]), (*arcs, arc)) for arc in out.get(state, ())]
    return found


def parsed_paths(parsed: Parsed) -> list[Path_]:
    states, finals = parsed
    found, stack = [], [(0, (), (), 0.0, 0.0)]
    while stack:
        state, words, ids, graph, acoustic = stack.pop()
        if (final := finals[state]) is not None:
            found.append((words, ids, graph + final[0], acoustic + final[1]))
        stack += [
            (target, (*words, word) if word else words, (*ids, *more), graph + g, acoustic + a)
            for target, word, g, a, more in states[state]
        ]
    return found


def parse_binary(data: bytes) -> Parsed:
    """Parses a CompactLattice by OpenFst's vector-fst.h and Kaldi's lattice-weight.h."""
    position = 0

    def take(form: str) -> tuple:
        nonlocal position
        values = struct.unpack_from("<" + form, data, position)
        position += struct.calcsize("<" + form)
        return values

    def text() -> bytes:
        return take(f"{take('i')[0]}s")[0]

    def weight() -> tuple[float, float, tuple[int, ...]]:
        graph, acoustic = take("ff")
        return graph, acoustic, take(f"{take('i')[0]}i")

    assert data[0] == 214  # by which Kaldi tells a binary lattice from text
    assert take("i") == (2125659606,) and text() == b"vector" and text() == b"compactlattice44"
    version, flags, _, start, num_states, num_arcs = take("iiQqqq")
    assert (version, flags, start) == (2, 0, 0)
    states, finals = [], []
    for _ in range(num_states):
        graph, acoustic, ids = weight()
        assert ids == ()
        finals.append(None if graph == np.inf else (graph, acoustic))
        arcs = []
        for _ in range(take("q")[0]):
            ilabel, olabel = take("ii")
            assert ilabel == olabel
            graph, acoustic, ids = weight()
            arcs.append((take("i")[0], ilabel, graph, acoustic, ids))
        states.append(arcs)
    assert position == len(data) and sum(map(len, states)) == num_arcs
    return states, finals


def test_compact_lattices_have_the_same_paths(decoded: tuple[FstArrays, Lattice, StateTable]) -> None:
    _, lattice, _ = decoded
    expected = sorted(lattice_paths(lattice))
    assert len(expected) > 20
    parsed = parse_binary(compact_lattice_bytes(lattice))
    found = sorted(parsed_paths(parsed))
    assert [path[:2] for path in found] == [path[:2] for path in expected]
    np.testing.assert_allclose([path[2:] for path in found], [path[2:] for path in expected], rtol=1e-4, atol=1e-3)
    assert len(parsed[0]) < lattice.num_states  # chains are joined


def test_a_graph_with_transition_ids_accepts_the_paths_of_the_lattice(
    decoded: tuple[FstArrays, Lattice, StateTable],
) -> None:
    graph, lattice, _ = decoded
    with_ids = graph_with_ids(graph)
    arcs: dict[int, list[tuple[int, int, float]]] = {}
    for source, target, label, weight in zip(
        with_ids.source_A.tolist(), with_ids.target_A.tolist(), with_ids.ilabel_A.tolist(),
        with_ids.weight_A.tolist(), strict=True,
    ):  # fmt: skip
        arcs.setdefault(source, []).append((target, label, weight))

    def close(states: dict[int, float]) -> dict[int, float]:
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            for target, label, weight in arcs.get(state, ()):
                if label == 0 and states[state] + weight < states.get(target, np.inf) - 1e-6:
                    states[target] = states[state] + weight
                    waiting.append(target)
        return states

    for _, ids, cost, _ in sorted(lattice_paths(lattice), key=lambda path: path[2])[:5]:
        reached = close({with_ids.start: 0.0})
        for label in ids:
            following: dict[int, float] = {}
            for state, so_far in reached.items():
                for target, other, weight in arcs.get(state, ()):
                    if other == label:
                        following[target] = min(so_far + weight, following.get(target, np.inf))
            reached = close(following)
        best = min(so_far + float(with_ids.final_S[state]) for state, so_far in reached.items())
        assert best <= cost + 1e-3


def test_kaldi_native_io_reads_the_posteriors(decoded: tuple[FstArrays, Lattice, StateTable], tmp_path: Path) -> None:
    _, lattice, _ = decoded
    frames = frame_posteriors(lattice, 10.0)
    weights = np.array([path[2] + path[3] / 10 for path in lattice_paths(lattice)])
    weights = np.exp(weights.min() - weights)
    expected: list[dict[int, float]] = [{} for _ in frames]
    for (_, ids, _, _), weight in zip(lattice_paths(lattice), weights / weights.sum(), strict=True):
        for frame, number in zip(expected, ids, strict=True):
            frame[number] = frame.get(number, 0.0) + float(weight)
    path = tmp_path / "post.ark"
    path.write_bytes(b"utt-1 " + posterior_bytes(frames) + b"utt-2 " + posterior_bytes([]))
    reader = kaldi_native_io.SequentialPosteriorReader(f"ark:{path}")
    found = dict(reader)
    assert list(found) == ["utt-1", "utt-2"] and len(found["utt-2"]) == 0
    assert len(found["utt-1"]) == len(frames)
    for frame, others in zip(found["utt-1"], expected, strict=True):
        read = dict(frame)
        assert read.keys() <= others.keys() and sum(read.values()) == pytest.approx(1.0, abs=1e-3)
        assert all(read[key] == pytest.approx(others[key], abs=1e-4) for key in read)
