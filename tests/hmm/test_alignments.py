"""Runs of an alignment, and the transition probabilities and tree statistics accumulated from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asr_am.hmm.alignments import runs_of
from asr_am.hmm.hmm_topology import FLOOR, estimate_transitions, phone_states, state_table
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import monophone_tree
from asr_am.hmm.tree_build import accumulate_tree_stats
from tests.support.synthetic_speech import store

STATES_P = phone_states([2, 3], [1], phone_length=2, silence_length=2)


def table() -> StateTable:
    return state_table(monophone_tree([[1], [2], [3]], STATES_P), STATES_P)


def labelled(states: StateTable, text: str) -> np.ndarray:
    """Converts text such as "1a 1a 1b -" to labels: phone and state of each frame, "-" for no alignment."""
    pairs = [(0, 0) if token == "-" else (int(token[0]), "ab".index(token[1])) for token in text.split()]
    labels = [states.label(phone, state, 2 * (phone - 1) + state) if phone else 0 for phone, state in pairs]
    return np.array(labels, dtype=np.int32)


def test_windows_end_at_edges_and_repeated_phones_are_separate() -> None:
    states = table()
    labels_N = labelled(states, "1a 1b 1b 2a 2b  2a 2b 2b  - - -  3a 3a 3b")
    runs = runs_of(labels_N, np.array([0, 5, 8, 11, 14]), states)
    assert runs.length_R.tolist() == [1, 2, 1, 1, 1, 2, 2, 1]
    assert runs.start_R.tolist() == [0, 1, 3, 4, 5, 6, 11, 13]
    assert runs.state_R.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    expected = [[0, 1, 2], [0, 1, 2], [1, 2, 0], [1, 2, 0], [0, 2, 0], [0, 2, 0], [0, 3, 0], [0, 3, 0]]
    assert runs.windows_R3.tolist() == expected

    twice = runs_of(labelled(states, "2a 2b 2a 2b"), np.array([0, 4]), states)
    assert twice.windows_R3.tolist() == [[0, 2, 2], [0, 2, 2], [2, 2, 0], [2, 2, 0]]


def test_transition_probabilities_are_recovered() -> None:
    states = table()
    rng = np.random.default_rng(0)
    stay = {1: 0.6, 2: 0.9}  # for both states of silence and phone 2. Phone 3 does not occur.
    pieces = []
    for _ in range(3000):
        for phone, state in ((1, "a"), (1, "b"), (2, "a"), (2, "b")):
            pieces += [f"{phone}{state}"] * int(rng.geometric(1 - stay[phone]))
    labels_N = labelled(states, " ".join(pieces))
    found = estimate_transitions(states, [runs_of(labels_N, np.array([0, len(labels_N)]), states)])
    loop_L = np.exp(found.loop_L)
    np.testing.assert_allclose(loop_L, [0.6, 0.6, 0.9, 0.9, 0.75, 0.75], atol=0.02)
    np.testing.assert_allclose(np.exp(found.next_L) + loop_L, 1.0, rtol=1e-5)
    assert found.labels_L3 is states.labels_L3


def test_transitions_are_floored() -> None:
    states = table()
    labels_N = labelled(states, "1a 1b " * 5000)
    found = estimate_transitions(states, [runs_of(labels_N, np.array([0, len(labels_N)]), states)])
    np.testing.assert_allclose(np.exp(found.loop_L[:2]), FLOOR, rtol=1e-5)


def test_tree_statistics_are_sums_over_the_frames(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("asr_am.hmm.tree_build.BLOCK", 3)
    states = table()
    labels_N = labelled(states, "1a 1b 1b 2a 2b 1a 1b  - -  1a 1b 2a 2a 2b 2b 1a 1b")
    x_ND = np.random.default_rng(0).normal(size=(len(labels_N), 2)).astype(np.float32)
    frames = store(tmp_path / "frames", {"a": x_ND[:7], "b": x_ND[7:9], "c": x_ND[9:]})
    stats = accumulate_tree_stats(frames, labels_N, states, 2)
    rows = {
        (*window, state): row
        for row, (window, state) in enumerate(zip(stats.windows_M3.tolist(), stats.state_M, strict=True))
    }
    assert len(rows) == 6 and stats.sums_MF[:, 0].sum() == 15
    x = x_ND[[4, 13, 14]]  # second state of phone 2 between silences
    np.testing.assert_allclose(stats.sums_MF[rows[1, 2, 1, 1]], [3, *x.sum(axis=0), *(x**2).sum(axis=0)], rtol=1e-6)
    x = x_ND[[5, 15]]  # first state of final silences
    np.testing.assert_allclose(stats.sums_MF[rows[2, 1, 0, 0]], [2, *x.sum(axis=0), *(x**2).sum(axis=0)], rtol=1e-6)
