"""The denominator graph of MMI training, beside relative frequencies that are counted one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from asr_am.errors import InputError
from asr_am.hmm.denominator import DenominatorGraph, denominator_graph, merge_states
from asr_am.hmm.hmm_topology import phone_states, state_table
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree, Root, Split

SENTENCES = ["1 2 3 1", "1 2 2 1", "1 3 2 1", "3 2 1", "1 2 3 1"]


def table() -> StateTable:
    """Returns silence (1) of three states and phones of two. The first state of 2 depends on the next phone."""
    states_P = phone_states([2, 3], [1], phone_length=2, silence_length=3)
    two = Root((2,), (Split(2, frozenset([3]), 3, 4), 5))
    tree = DecisionTree(3, (Root((1,), (0, 1, 2)), two, Root((3,), (6, 7))))
    return state_table(tree, states_P, loop=0.6)


def label(states: StateTable, phone: int, state: int, following: int) -> int:
    pdf = {1: state, 3: 6 + state}.get(phone, 5 if state else 3 if following == 3 else 4)
    return states.label(phone, state, pdf)


def chain(states: StateTable, phone: int, following: int) -> list[int]:
    return [label(states, phone, state, following) for state in range(states.states_P[phone])]


def alignments(states: StateTable) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    found = []
    for sentence in SENTENCES:
        phones = [*map(int, sentence.split()), 0]
        labels = [x for phone, following in pairwise(phones) for x in chain(states, phone, following)]
        found.append(np.repeat(np.array(labels, np.int32), rng.integers(1, 4, len(labels))))
    return found


def graph() -> tuple[DenominatorGraph, StateTable]:
    states = table()
    return denominator_graph(iter(alignments(states)), states), states


@pytest.mark.parametrize("sentence", [*SENTENCES, "1 2 3 2 1", "2 1"])
def test_a_sentence_is_as_probable_as_its_phones(sentence: str) -> None:
    """Follows the states of a sentence, one frame each, after the end of another one."""
    found, states = graph()
    counts = Counter(
        triple
        for s in SENTENCES
        for phones in [[0, *map(int, s.split()), 0]]
        for triple in zip(phones, phones[1:], phones[2:], strict=False)
    )

    def share(before: int, left: int, phone: int) -> float:
        following = [n for (a, b, _), n in counts.items() if (a, b) == (before, left)]
        return counts[before, left, phone] / sum(following) if following else 0.0

    phones = [int(phone) for phone in sentence.split()]
    firsts = [int(s.split()[0]) for s in SENTENCES]
    expected = firsts.count(phones[0]) / len(firsts)
    for before, left, phone in zip([0, *phones], phones, phones[1:], strict=False):
        expected *= share(before, left, phone)
    labels = [
        x for phone, following in zip(phones, [*phones[1:], 0], strict=True) for x in chain(states, phone, following)
    ]

    alpha_S = follow(
        found, found.start_S, [x for p, q in [(3, 2), (2, 1), (1, 0)] for x in chain(states, p, q)], states
    )
    alpha_S = follow(found, alpha_S / alpha_S.sum(), labels, states)
    assert float(alpha_S.sum()) == pytest.approx(0.4 ** len(labels) * expected, rel=1e-4)


def follow(found: DenominatorGraph, alpha_S: np.ndarray, labels: Sequence[int], states: StateTable) -> np.ndarray:
    """Returns the probabilities of the states after frames with the pdfs of these labels."""
    for label_ in labels:
        alpha_S = (alpha_S @ found.arcs_SS) * (found.pdf_S == states.pdf_L[label_ - 1])
    return alpha_S


def test_probabilities_sum_to_one_and_start_is_stationary() -> None:
    found, states = graph()
    np.testing.assert_allclose(found.arcs_SS.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(found.start_S @ found.arcs_SS, found.start_S, atol=1e-5)
    assert found.num_pdfs == states.num_pdfs


def test_every_alignment_is_a_path() -> None:
    found, states = graph()
    assert all(follow(found, found.start_S, labels_T, states).sum() > 0 for labels_T in alignments(states))


def test_parts_make_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, states = graph()
    monkeypatch.setattr("asr_am.hmm.denominator.UTTERANCES", 2)
    parts = denominator_graph(iter(alignments(states)), states)
    assert np.array_equal(whole.arcs_SS.toarray(), parts.arcs_SS.toarray())
    assert np.array_equal(whole.pdf_S, parts.pdf_S)


def sum_of_paths(
    arcs_SS: sparse.csr_array, pdf_S: np.ndarray, start_S: np.ndarray, scores_TP: np.ndarray, leaky: float
) -> np.ndarray:
    """Returns the sums over all paths of 1 to T frames, [T]."""
    alpha_S, sums = start_S, []
    for scores_P in scores_TP:
        alpha_S = ((alpha_S + leaky * alpha_S.sum() * start_S) @ arcs_SS) * scores_P[pdf_S]
        sums.append(alpha_S.sum())
    return np.array(sums)


@pytest.mark.parametrize("leaky", [0.0, 0.1])
@pytest.mark.parametrize("backward", [False, True])
def test_copies_of_states_are_merged_without_a_change_of_sums(backward: bool, leaky: float) -> None:
    """Copies that have the same successors, or the same share of what comes from each state."""
    rng = np.random.default_rng(1)
    arcs_SS, start_S, pdf_S = rng.dirichlet(np.ones(6), 6), rng.dirichlet(np.ones(6)), np.array([0, 1, 2, 0, 1, 3])
    original_C = np.repeat(np.arange(6), [1, 3, 2, 1, 1, 2])  # the state that each of the copies is of
    member_CS = (original_C[:, None] == np.arange(6)).astype(float)
    if backward:
        share_C = np.concatenate([rng.dirichlet(np.ones(n)) for n in np.bincount(original_C)])
        start_C = share_C * start_S[original_C]
        # rows of copies differ, and their mean is the row of the state
        ahead_C = np.concatenate([rng.normal(size=n) for n in np.bincount(original_C)])
        ahead_C -= (member_CS @ (member_CS.T @ (share_C * ahead_C)[:, None]))[:, 0]
        change_S = np.array([0.01, -0.01, 0.02, -0.02, 0.01, -0.01])
        arcs_CC = (arcs_SS[original_C] + ahead_C[:, None] * change_S)[:, original_C] * share_C
    else:
        start_C = start_S[original_C] * rng.dirichlet(np.ones(10))
        start_C /= start_C.sum()
        share_CC = rng.random((10, 10))
        share_CC /= (share_CC @ member_CS) @ member_CS.T
        arcs_CC = arcs_SS[np.ix_(original_C, original_C)] * share_CC
    before = sparse.csr_array(arcs_CC), pdf_S[original_C], start_C
    merged = merge_states(*before)
    assert len(merged[1]) == 6
    scores_TP = rng.random((5, 4))
    np.testing.assert_allclose(
        sum_of_paths(*merged, scores_TP, leaky), sum_of_paths(*before, scores_TP, leaky), rtol=1e-9
    )
    np.testing.assert_allclose(merged[0].sum(axis=1), 1, rtol=1e-9)


def test_graph_has_no_states_to_merge_and_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    merged, states = graph()
    monkeypatch.setattr("asr_am.hmm.denominator.merge_states", lambda *whole: whole)
    whole, _ = graph()
    assert len(merged.pdf_S) < len(whole.pdf_S)
    scores_TP = np.random.default_rng(0).random((20, states.num_pdfs))
    both = [sum_of_paths(each.arcs_SS, each.pdf_S, each.start_S, scores_TP, 0.1) for each in (merged, whole)]
    np.testing.assert_allclose(*both, rtol=1e-4)
    assert len(merge_states(merged.arcs_SS, merged.pdf_S, merged.start_S)[1]) == len(merged.pdf_S)


def test_files(tmp_path: Path) -> None:
    found, states = graph()
    found.save(path := tmp_path / "graph.npz")
    again = DenominatorGraph.load(path)
    assert np.array_equal(again.arcs_SS.toarray(), found.arcs_SS.toarray()) and again.num_pdfs == found.num_pdfs
    assert np.array_equal(again.start_S, found.start_S) and np.array_equal(again.pdf_S, found.pdf_S)
    DenominatorGraph(2 * found.arcs_SS, found.pdf_S, found.start_S, found.num_pdfs).save(path)
    with pytest.raises(InputError, match=r"graph.npz: holds probabilities that do not sum to 1; run stage 5"):
        DenominatorGraph.load(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"graph.npz: not readable"):
        DenominatorGraph.load(path)
    with pytest.raises(InputError, match="no utterance is aligned"):
        denominator_graph(iter([]), states)
