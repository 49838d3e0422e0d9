"""H, self-loops and FST arrays compared with enumeration."""

from __future__ import annotations

from pathlib import Path

import kaldifst
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable
from asr_am.hmm.transducer import add_self_loops, h_transducer, is_disambiguation, merge_windows
from tests.support.hmm_reference import LeftTree, MonoTree, paths_of, small_lang, small_states


@st.composite
def fsts(draw: st.DrawFn) -> str:
    """Draws the text of a random FST without loops, with labels up to 6 on both sides."""
    states = draw(st.integers(2, 5))
    arcs = draw(
        st.lists(
            st.tuples(
                st.integers(0, states - 2), st.integers(1, states - 1), st.integers(0, 6), st.integers(0, 6),
                st.integers(0, 8),
            ),
            min_size=1,
            max_size=8,
        )
    )  # fmt: skip
    lines = [f"{s} {max(t, s + 1)} {i} {o} {w / 4}" for s, t, i, o, w in arcs]
    start = min(range(len(arcs)), key=lambda k: arcs[k][0])  # fstcompile starts at the first line's source
    return "\n".join([lines[start], *lines[:start], *lines[start + 1 :], f"{states - 1} 0.5"]) + "\n"


@given(fsts())
def test_conversion_to_arrays_and_back_keeps_the_fst(text: str) -> None:
    fst = kaldifst.compile(text)
    assert FstArrays.from_fst(fst).to_fst().to_str(show_weight_one=True) == fst.to_str(show_weight_one=True)


def test_an_empty_fst_stays_empty() -> None:
    assert FstArrays.from_fst(kaldifst.StdVectorFst()).to_fst().num_states == 0


def six_labels() -> StateTable:
    labels_L3 = np.array([[1, 0, 0], [1, 1, 1], [2, 0, 2], [2, 1, 3], [3, 0, 4], [3, 1, 5]], dtype=np.int32)
    stay_L = np.array([0.3, 0.4, 0.5, 0.6, 0.7, 0.8], dtype=np.float32)
    return StateTable(labels_L3, np.log(stay_L), np.log1p(-stay_L), {1: 2, 2: 2, 3: 2}, 6)


@given(fsts(), st.sampled_from([0.0, 0.1, 1.0]))
def test_self_loops_give_each_label_a_geometric_duration(text: str, scale: float) -> None:
    """Each path becomes all paths that repeat its labels, at the cost of the label's loop per repetition."""
    states = six_labels()
    plain = kaldifst.compile(text)
    frames = 5
    looped = add_self_loops(plain, states, self_loop_scale=scale)
    expected: dict = {}
    for (labels, words), cost in paths_of(plain, frames).items():
        for stretched, extra in stretchings(labels, states, scale, frames):
            key = (stretched, words)
            expected[key] = -np.logaddexp(-expected.get(key, np.inf), -(cost + extra))
    assert paths_of(looped, frames) == pytest.approx(expected, abs=1e-3)


def test_a_start_state_with_incoming_arcs_has_no_self_loop() -> None:
    """In a graph with a cycle through its start, a label's self-loop follows only an arc with that label."""
    states = six_labels()
    plain = kaldifst.compile("0 1 1 7 0.5\n1 0 2 0 0.25\n0 0.125\n")
    found = paths_of(add_self_loops(plain, states, self_loop_scale=0.5), 4)
    expected = {
        (stretched, words): cost + extra
        for (labels, words), cost in paths_of(plain, 4).items()
        for stretched, extra in stretchings(labels, states, 0.5, 4)
    }
    assert found == pytest.approx(expected, abs=1e-3)


def stretchings(labels: tuple[int, ...], states: StateTable, scale: float, frames: int):
    if not labels:
        yield (), 0.0
        return
    first, rest = labels[0], labels[1:]
    for n in range(1, frames - len(rest) + 1):
        cost = -scale * (states.next_L[first - 1] + (n - 1) * states.loop_L[first - 1])
        for tail, tail_cost in stretchings(rest, states, scale, frames - n):
            yield (first,) * n + tail, float(cost) + tail_cost


def test_windows_with_the_same_hmm_are_merged(tmp_path: Path) -> None:
    lang = small_lang(tmp_path)
    tree = LeftTree()
    states = small_states(lang, tree)
    aa, bb = lang.nonsilence_phones
    windows = [[], [0], [-lang.disambig[0]], [-lang.disambig[1]], [0, aa, bb], [0, aa, aa], [bb, aa, bb], [1, aa, 0]]
    merged_W, sequences = merge_windows(windows, states, tree)
    assert merged_W[0] == 0
    assert len({int(m) for m in merged_W[1:4]}) == 3, "every disambiguation symbol keeps its own label"
    assert merged_W[4] == merged_W[5]
    assert (merged_W[6] == merged_W[4]) == (bb % 2 == 0)
    assert [sequences[m] == () for m in merged_W] == [True] * 4 + [False] * 4


def test_h_maps_label_sequences_to_windows(tmp_path: Path) -> None:
    """H maps the labels of a sequence of windows, and nothing else, to that sequence."""
    lang = small_lang(tmp_path)
    states = small_states(lang, MonoTree())
    windows = [[], [-lang.disambig[0]], *([phone] for phone in states.states_P)]
    _, sequences = merge_windows(windows, states, MonoTree())
    num_labels = len(states.labels_L3)
    found = paths_of(h_transducer(sequences, num_labels), 3)
    inputs_of = {1: (num_labels + 1,)} | {w: labels for w, labels in enumerate(sequences) if labels}
    expected = {
        (tuple(label for w in line for label in inputs_of[w]), line)
        for count in range(4)
        for line in lines(sorted(inputs_of), count)
    }
    assert set(found) == {pair for pair in expected if len(pair[0]) <= 3}
    assert set(found.values()) == {0.0}


def lines(symbols: list[int], count: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    return [(first, *rest) for first in symbols for rest in lines(symbols, count - 1)]


def test_disambiguation_symbols_are_recognised() -> None:
    assert [is_disambiguation(w) for w in ([-7], [0], [7], [0, 1, 2], [])] == [True, True, False, False, False]
