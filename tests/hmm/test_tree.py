"""Decision trees on contexts with a known best tree: splitting, merging, questions, and files."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_am.errors import InputError
from asr_am.hmm.tree import DecisionTree, Root, Split, monophone_tree
from asr_am.hmm.tree_build import TreeOptions, TreeStats, build_tree, log_likelihood, phone_questions

SIL, VOWELS, STOPS = 1, (2, 3), (4, 5)
PHONES = (SIL, *VOWELS, *STOPS)
ROOTS = [[SIL], [2], [3], [4, 5]]  # 4 and 5: two position variants of one phone
STATES = dict.fromkeys(PHONES, 3)
FRAMES = 40  # per context


def stats_of(mean) -> TreeStats:  # type: ignore[no-untyped-def]
    """Returns statistics of FRAMES frames of unit variance per (window, state), with means `mean(window, state)`."""
    windows = list(itertools.product((0, *PHONES), PHONES, (0, *PHONES)))
    keys = [(window, state) for window in windows for state in range(3)]
    mean_MD = np.array([mean(window, state) for window, state in keys], dtype=float)
    sums_MF = np.concatenate([np.ones((len(keys), 1)), mean_MD, mean_MD**2 + 1.0], axis=1) * FRAMES
    return TreeStats(np.array([window for window, _ in keys]), np.array([state for _, state in keys]), sums_MF)


def vowel_on_the_left(window: tuple[int, ...], state: int) -> list[float]:
    """First states of phone 2 depend on whether a vowel precedes, last states of 4 and 5 on which of the two it is."""
    own = 10.0 * window[1] + state
    left = 5.0 * (window[0] in VOWELS) if (window[1], state) == (2, 0) else 0.0
    variant = 3.0 * (window[1] == 5) if state == 2 else 0.0
    return [own if window[1] < 4 else 40.0 + state, left + variant]


QUESTIONS = [frozenset(VOWELS), frozenset(STOPS), frozenset({5}), frozenset({SIL, 0}), frozenset({2})]


def test_tree_asks_the_informative_questions_only() -> None:
    stats = stats_of(vowel_on_the_left)
    tree = build_tree(stats, ROOTS, STATES, [SIL], QUESTIONS, TreeOptions(14, 30.0, merge=False))
    assert tree.num_pdfs == 14, "twelve (root, state), two of them split"
    for root in tree.roots:
        for state, node in enumerate(root.states):
            if (root.phones, state) == ((2,), 0):
                assert isinstance(node, Split) and (node.position, node.phones) == (0, frozenset(VOWELS))
            elif (root.phones, state) == ((4, 5), 2):
                assert isinstance(node, Split) and (node.position, node.phones) == (1, frozenset({5}))
            else:
                assert not isinstance(node, Split)
    assert tree.pdf((3, 2, 4), 0) == tree.pdf((2, 2, 1), 0) != tree.pdf((4, 2, 3), 0)
    assert tree.pdf((1, 4, 1), 2) != tree.pdf((1, 5, 1), 2) and tree.pdf((1, 4, 1), 1) == tree.pdf((1, 5, 1), 1)
    assert tree.leaves(4, 2) == [tree.pdf((1, 4, 1), 2)] and len(tree.leaves(2, 0)) == 2


def test_large_phone_sets_get_more_leaves() -> None:
    """Contexts are split even if there are more states than leaves. Roots without frames do not matter."""
    stats = stats_of(vowel_on_the_left)
    pdfs = []
    for roots, per_state in ((ROOTS, 1.0), (ROOTS, 2.0), ([*ROOTS, [6]], 2.0)):
        states = {**STATES, 6: 3}
        tree = build_tree(stats, roots, states, [SIL], QUESTIONS, TreeOptions(5, 30.0, False, per_state))
        pdfs.append(tree.num_pdfs)
    assert pdfs[0] == 12 < pdfs[1] <= 24 and pdfs[2] == pdfs[1] + 3


def test_silence_is_never_split() -> None:
    stats = stats_of(lambda window, state: [7.0 * window[0], 3.0 * window[2]])
    tree = build_tree(stats, ROOTS, STATES, [SIL], QUESTIONS, TreeOptions(100, 30.0, merge=False))
    assert all(len(tree.leaves(SIL, state)) == 1 for state in range(3)) and tree.num_pdfs > 20


def test_leaves_have_the_minimum_occupancy() -> None:
    stats = stats_of(lambda window, state: np.random.default_rng([*window, state]).normal(0, 3, 2).tolist())
    for minimum in (100.0, 500.0):
        tree = build_tree(stats, ROOTS, STATES, [SIL], QUESTIONS, TreeOptions(1000, minimum, merge=False))
        frames = np.zeros(tree.num_pdfs)
        for window, state, sums in zip(stats.windows_M3, stats.state_M, stats.sums_MF, strict=True):
            frames[tree.pdf(tuple(window.tolist()), int(state))] += sums[0]
        assert frames.min() >= minimum and frames.sum() == stats.sums_MF[:, 0].sum()


def test_equal_leaves_are_merged() -> None:
    """A vowel on either side has the same effect, so after splits on both sides three of four leaves are equal."""

    def mean(window: tuple[int, ...], state: int) -> list[float]:
        return [10.0 * window[1], 5.0 * (window[0] in VOWELS or window[2] in VOWELS) if window[1] == 2 else 0.0]

    options = [TreeOptions(18, 30.0, merge=merge) for merge in (False, True)]
    apart, merged = (build_tree(stats_of(mean), ROOTS, STATES, [SIL], QUESTIONS[:1], option) for option in options)
    assert (apart.num_pdfs, merged.num_pdfs) == (18, 15)
    assert merged.pdf((2, 2, 4), 0) == merged.pdf((4, 2, 2), 0) == merged.pdf((3, 2, 3), 0) != merged.pdf((4, 2, 4), 0)


def test_merging_loses_less_than_any_split_gains() -> None:
    """Splits of phone 2 gain least at first, and most after the other side was split."""

    def mean(window: tuple[int, ...], state: int) -> list[float]:
        left, right = window[0] in VOWELS, window[2] in VOWELS
        return [20.0 * window[1] + (5.0 * (left != right) if window[1] == 2 else 1.2 * left * (window[1] == 3)), state]

    tree = build_tree(stats_of(mean), ROOTS, STATES, [SIL], QUESTIONS[:1], TreeOptions(24, 30.0))
    assert tree.pdf((2, 3, 4), 0) != tree.pdf((4, 3, 4), 0)


@pytest.mark.parametrize("states", [1, 3])
def test_clustering_finds_the_phone_classes(states: int) -> None:
    stats = stats_of(lambda window, state: [{1: 0.0, 2: 50.0, 3: 20.0}.get(window[1], 21.0), 0.0])
    there = (stats.state_M < states) | (stats.windows_M3[:, 1] == SIL)
    stats = TreeStats(stats.windows_M3[there], stats.state_M[there], stats.sums_MF[there])
    questions = phone_questions(stats, ROOTS, [SIL], [{5}])
    assert frozenset({3, 4, 5}) in questions and frozenset({2, 3}) not in questions
    assert frozenset({SIL}) in questions and frozenset({SIL, 0}) in questions and frozenset({5}) in questions
    assert len(set(questions)) == len(questions)


def test_log_likelihood_is_of_the_maximum_likelihood_gaussian() -> None:
    x_ND = np.random.default_rng(0).normal(1, 2, (50, 3))
    sums = np.concatenate([[50.0], x_ND.sum(axis=0), (x_ND**2).sum(axis=0)])
    mean, var = x_ND.mean(axis=0), x_ND.var(axis=0)
    expected = -0.5 * (np.log(2 * np.pi * var) + (x_ND - mean) ** 2 / var).sum()
    assert log_likelihood(sums[None])[0] == pytest.approx(expected)


def some_tree() -> DecisionTree:
    return build_tree(stats_of(vowel_on_the_left), ROOTS, STATES, [SIL], QUESTIONS, TreeOptions(30, 30.0))


@settings(max_examples=50)
@given(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5)), st.integers(0, 2))
def test_every_context_has_a_leaf_of_its_phone(window: tuple[int, int, int], state: int) -> None:
    tree = some_tree()
    assert tree.pdf(window, state) in tree.leaves(window[1], state)


def test_many_windows_have_the_pdfs_of_each() -> None:
    rng = np.random.default_rng(0)
    windows_M3 = np.stack([rng.integers(0, 6, 500), rng.integers(1, 6, 500), rng.integers(0, 6, 500)], axis=1)
    state_M = rng.integers(0, 3, 500)
    for tree, windows_MC in ((some_tree(), windows_M3), (monophone_tree(ROOTS, STATES), windows_M3[:, 1:2])):
        expected = [tree.pdf(tuple(window), state) for window, state in zip(windows_MC.tolist(), state_M, strict=True)]
        assert tree.pdfs(windows_MC, state_M).tolist() == expected and len(set(expected)) > 1
        assert tree.pdfs(windows_MC[:0], state_M[:0]).shape == (0,)
        for unknown in (0, 6):
            with pytest.raises(KeyError):
                tree.pdfs(np.full((1, tree.width), unknown), state_M[:1])


def test_saving_and_loading(tmp_path: Path) -> None:
    for tree in (some_tree(), monophone_tree(ROOTS, STATES)):
        tree.save(tmp_path / "tree.json")
        loaded = DecisionTree.load(tmp_path / "tree.json")
        assert loaded == tree and loaded.num_pdfs == tree.num_pdfs


def test_damaged_files_are_input_errors(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    some_tree().save(path)
    content_bytes = path.read_bytes()
    cuts = random.Random(0).sample(range(len(content_bytes) - 1), 50)
    content = json.loads(content_bytes)
    beyond = {"position": 3, "phones": [1], "yes": 0, "no": 1}
    wrong = [
        b"", b"[]", b"null", b"\xff", b'{"width": 3}', b'{"width": 2, "roots": []}',
        json.dumps(content | {"roots": content["roots"] * 2}).encode(),
        json.dumps(content | {"roots": content["roots"][1:]}).encode(),
        json.dumps(content | {"roots": [{"phones": [1], "states": [True]}]}).encode(),
        json.dumps({"width": 3, "roots": [{"phones": [1], "states": [beyond]}]}).encode(),
        b'{"width": 3, "roots": [{"phones": [1], "states": [' + b'{"position":0,"phones":[],"no":0,"yes":' * 5000,
    ]  # fmt: skip
    for damaged in [*(content_bytes[:cut] for cut in cuts), *wrong]:
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"tree\.json"):
            DecisionTree.load(path)


def test_a_phone_has_one_root() -> None:
    with pytest.raises(ValueError, match="two roots"):
        DecisionTree(1, (Root((1,), (0,)), Root((1,), (1,))))
