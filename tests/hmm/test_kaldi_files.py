"""Kaldi's trees and GMM systems: fixtures written byte by byte, likelihoods, and what is damaged."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.errors import InputError
from asr_am.hmm.gmm import DiagGmms
from asr_am.hmm.hmm_topology import state_table
from asr_am.hmm.kaldi_model import read_model, transition_ids, write_model
from asr_am.hmm.kaldi_tree import read_tree, write_tree
from asr_am.hmm.tree import DecisionTree, Root, Split
from tests.support.kaldi_bytes import integer, integers, matrix, number, token, unsigned, vector

# Two phones of three states, and a silence of Kaldi's five states with skips. Bytes as in hmm-topology.cc,
# transition-model.cc, am-diag-gmm.cc and event-map.cc of Kaldi.
SIL, A, B = 1, 2, 3


SPEECH = [{0: 0.75, 1: 0.25}, {1: 0.75, 2: 0.25}, {2: 0.75, 3: 0.25}]
SILENCE = [
    {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}, {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}, {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25},
    {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}, {4: 0.75, 5: 0.25},
]  # fmt: skip
TRIPLES = [
    *((SIL, state, state) for state in range(5)),
    (A, 0, 5), (A, 0, 8), (A, 1, 6), (A, 2, 7), (B, 0, 9), (B, 1, 6), (B, 2, 7),
]  # fmt: skip
NUM_PDFS = 10


def topology() -> bytes:
    entries = b""
    for states in (SPEECH, SILENCE):
        entries += integer(len(states) + 1)
        for state, targets in enumerate(states):
            entries += integer(state, len(targets))
            entries += b"".join(integer(target) + number(prob) for target, prob in targets.items())
        entries += integer(-1, 0)
    return token("<Topology>") + integers(1, 2, 3) + integers(-1, 1, 0, 0) + integer(2) + entries + token("</Topology>")


def transition_model() -> bytes:
    transitions = [(SILENCE if phone == SIL else SPEECH)[state] for phone, state, _ in TRIPLES]
    log_probs = [0.0, *(math.log(prob) for targets in transitions for prob in targets.values())]
    rows = b"".join(integer(*triple) for triple in TRIPLES)
    return (
        token("<TransitionModel>") + topology() + token("<Triples>") + integer(len(TRIPLES)) + rows
        + token("</Triples>", "<LogProbs>") + vector(*log_probs) + token("</LogProbs>", "</TransitionModel>")
    )  # fmt: skip


def mixtures() -> tuple[bytes, list[tuple[list[float], np.ndarray, np.ndarray]]]:
    """Returns the bytes, and (weights, means, variances) of each pdf."""
    rng, parts, expected = np.random.default_rng(0), b"", []
    for pdf in range(NUM_PDFS):
        weights = [1.0] if pdf % 2 else [0.3, 0.7]
        mean_GD, var_GD = rng.normal(0, 2, (len(weights), 4)), rng.uniform(0.5, 3, (len(weights), 4))
        parts += token("<DiagGMM>", "<GCONSTS>") + vector(*[0.0] * len(weights)) + token("<WEIGHTS>") + vector(*weights)
        parts += token("<MEANS_INVVARS>") + matrix((mean_GD / var_GD).tolist())
        parts += token("<INV_VARS>") + matrix((1 / var_GD).tolist()) + token("</DiagGMM>")
        expected.append((weights, mean_GD, var_GD))
    return token("<DIMENSION>") + integer(4) + token("<NUMPDFS>") + integer(NUM_PDFS) + parts, expected


def constant(pdf: int) -> bytes:
    return token("CE") + integer(pdf)


def table(key: int, *children: bytes) -> bytes:
    return token("TE") + integer(key) + unsigned(len(children)) + token("(") + b"".join(children) + token(")")


def split(key: int, values: tuple[int, ...], yes: bytes, no: bytes) -> bytes:
    return token("SE") + integer(key) + integers(*values) + token("{") + yes + no + token("}")


def tree_file() -> bytes:
    """A and B share a root: their first states differ by phone, A's by its left neighbour."""
    first = split(1, (A,), split(0, (0, SIL), constant(5), constant(8)), constant(9))
    shared = table(-1, first, constant(6), constant(7))
    silence = table(-1, *(constant(pdf) for pdf in range(5)))
    event = table(1, token("NULL"), silence, shared, shared)
    return b"\0B" + token("ContextDependency") + integer(3, 1) + token("ToPdf") + event + token("EndContextDependency")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "tree").write_bytes(tree_file())
    (tmp_path / "final.mdl").write_bytes(b"\0B" + transition_model() + mixtures()[0])
    return tmp_path


def test_a_tree_is_read(files: Path) -> None:
    tree = read_tree(files / "tree", {SIL: 5, A: 3, B: 3})
    assert tree.width == 3 and tree.num_pdfs == NUM_PDFS
    expected = {(0, A, B): 5, (SIL, A, B): 5, (B, A, 0): 8, (A, A, A): 8, (0, B, 0): 9}
    assert {window: tree.pdf(window, 0) for window in expected} == expected
    assert tree.pdf((A, A, B), 1) == tree.pdf((0, B, A), 1) == 6 and tree.pdf((0, SIL, A), 4) == 4
    table_of_neighbours = table(1, token("NULL"), table(0, constant(0), constant(1), constant(0)))
    head, tail = token("ContextDependency") + integer(3, 1) + token("ToPdf"), token("EndContextDependency")
    (files / "tree").write_bytes(b"\0B" + head + table_of_neighbours + tail)
    by_table = read_tree(files / "tree", {1: 1})
    assert [by_table.pdf((left, 1, 0), 0) for left in (0, 1, 2)] == [0, 1, 0]


def test_a_gmm_system_is_read(files: Path) -> None:
    transitions, gmms = read_model(files / "final.mdl")
    assert transitions.triples_L3.tolist() == [list(triple) for triple in TRIPLES]
    assert transitions.states_P == {SIL: 5, A: 3, B: 3}
    # Silence has 4 + 4 + 4 + 4 + 2 transitions, every other state two: the first is the loop.
    assert transitions.labels(np.array([1, 4, 5, 18, 19, 20, 21, 32])).tolist() == [1, 1, 2, 5, 6, 6, 7, 12]
    assert transitions.loop_K.nonzero()[0].tolist() == [0, 4, 9, 14, 16, *range(18, 32, 2)]
    states = transitions.state_table()
    assert np.exp(states.loop_L).tolist() == pytest.approx([0.25] * 4 + [0.75] * 8)
    x_TD = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    found = gmms.log_likelihoods(torch.from_numpy(x_TD)).numpy()
    for pdf, (weights, mean_GD, var_GD) in enumerate(mixtures()[1]):
        deviation = -0.5 * (np.log(2 * np.pi * var_GD) + (x_TD[:, None] - mean_GD) ** 2 / var_GD).sum(axis=2)
        expected = np.log((np.array(weights) * np.exp(deviation)).sum(axis=1))
        np.testing.assert_allclose(found[:, pdf], expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"outside 1\.\.32"):
        transitions.labels(np.array([33]))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    question = Split(2, frozenset([0, 3]), 3, Split(0, frozenset([2]), 4, 5))
    tree = DecisionTree(3, (Root((1,), (0, 1, 2)), Root((2, 3), (question, 6, 7))))
    states = state_table(tree, {1: 3, 2: 3, 3: 3}, loop=0.6)
    rng = np.random.default_rng(0)
    gmms = DiagGmms(
        np.array([1.0, 0.4, 0.6] + [1.0] * 6, np.float32), rng.normal(size=(9, 5)).astype(np.float32),
        rng.uniform(0.5, 2, (9, 5)).astype(np.float32), np.array([0, 1, 3, 4, 5, 6, 7, 8, 9]),
    )  # fmt: skip
    write_tree(tmp_path / "tree", tree)
    write_model(tmp_path / "final.mdl", states, gmms)
    again = read_tree(tmp_path / "tree", states.states_P)
    for left in range(4):
        for right in range(4):
            for phone in (1, 2, 3):
                for state in range(3):
                    assert again.pdf((left, phone, right), state) == tree.pdf((left, phone, right), state)
    transitions, mixtures_again = read_model(tmp_path / "final.mdl")
    found = transitions.state_table()
    assert np.array_equal(found.labels_L3, states.labels_L3) and found.states_P == states.states_P
    np.testing.assert_allclose(found.loop_L, states.loop_L, atol=1e-6)
    x_TD = torch.from_numpy(rng.normal(size=(7, 5)).astype(np.float32))
    np.testing.assert_allclose(mixtures_again.log_likelihoods(x_TD), gmms.log_likelihoods(x_TD), atol=1e-4)
    labels_T = np.array([1, 1, 1, 2, 3, 3, 5], np.int32)
    ids_T = transition_ids(labels_T)
    assert ids_T.tolist() == [2, 1, 1, 4, 6, 5, 10]  # the exit, then the loops
    assert transitions.labels(ids_T).tolist() == labels_T.tolist()


def test_damage_is_one_line(files: Path) -> None:
    model, tree = (files / "final.mdl").read_bytes(), (files / "tree").read_bytes()

    def refused(name: str, content: bytes, message: str) -> None:
        path = files / name
        path.write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            read_model(path) if name == "final.mdl" else read_tree(path, {SIL: 5, A: 3, B: 3})
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    refused("final.mdl", model[: len(model) // 2], "ends too early|no ")
    refused("final.mdl", b"<TransitionModel>", "not in Kaldi's binary format; convert it .gmm-copy")
    refused("final.mdl", b"\0B<Nnet3> ", "no <TransitionModel> at byte 2")
    refused(
        "final.mdl", model.replace(integers(-1, 1, 0, 0) + integer(2), integers(-1, 1, 0, 0) + integer(-1)), "chain"
    )
    refused("final.mdl", model.replace(b"<NUMPDFS> " + integer(10), b"<NUMPDFS> " + integer(9)), "9 mixtures for 10")
    refused("tree", tree[:-30], "ends too early|no ")
    refused("tree", tree.replace(integer(3, 1), integer(5, 2), 1), "window of 5 phones")
    refused("tree", tree.replace(token("NULL"), constant(0)).replace(constant(9), constant(12)), "not numbered")
