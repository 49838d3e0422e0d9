"""The denominator of MMI training: a graph of all sentences that needs no words (Povey et al., Interspeech 2016).

A Markov chain over phones, each given the two before it, with the relative frequencies of the alignments. Each phone in
its context is a chain of HMM states, in chain models one for its first step and one for the others. Alignments of the
training set are paths of this graph. They start and end anywhere, because chunks do. States that no path tells apart
are merged, as Kaldi does by minimizing the graph and its reverse.

Shapes: S states of the graph, G groups of them, I phones of some alignments, V distinct phones in context with their
states, C distinct chains of states after the same two phones, N pairs of neighbouring phones, K states of the longest
phone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from scipy import sparse

from asr_am.data.npz import read_npz, write_npz
from asr_am.errors import InputError
from asr_am.hmm.alignments import runs_of
from asr_am.hmm.states import StateTable

UTTERANCES = 1000  # whose phones are counted at a time
STEPS = 200  # frames after which the chain forgets where it began
TOLERANCE = 1e-6  # relative difference of probabilities that are taken as equal
REMEDY = "run stage 5 (egs) again"


@dataclass(frozen=True)
class DenominatorGraph:
    """A Markov chain over HMM states. Frames are emitted by states.

    Attributes:
        arcs_SS: sparse transition probabilities, rows sum to 1.
        pdf_S: pdf of each state, int32.
        start_S: probability of each state at a frame about which nothing is known, float32.
        num_pdfs: outputs of a model for these pdfs.
    """

    arcs_SS: sparse.csr_array
    pdf_S: np.ndarray
    start_S: np.ndarray
    num_pdfs: int

    def save(self, path: Path) -> None:
        """Writes .npz (plain arrays, no pickles), atomically."""
        arcs = self.arcs_SS
        write_npz(path, {
            "first": arcs.indptr, "target": arcs.indices, "probability": arcs.data,
            "pdf": self.pdf_S, "start": self.start_S, "num_pdfs": np.int32(self.num_pdfs),
        })  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> DenominatorGraph:
        """Reads what `save` wrote. Raises InputError if the file is missing, damaged or inconsistent."""
        first, target, probability, pdf_S, start_S, num_pdfs = read_npz(
            path, "first", "target", "probability", "pdf", "start", "num_pdfs", remedy=REMEDY
        )
        try:
            arcs_SS = sparse.csr_array((probability, target, first), shape=(len(pdf_S), len(pdf_S)))
            arcs_SS.check_format()
            if len(start_S) != len(pdf_S) or not 0 <= pdf_S.min() <= pdf_S.max() < num_pdfs:
                raise ValueError("states without a pdf or a start")
            sums = [*arcs_SS.sum(axis=1), start_S.sum()]
            if min(probability.min(), start_S.min()) < 0 or not np.allclose(sums, 1, atol=1e-3):
                raise ValueError("probabilities that do not sum to 1")
            graph = cls(arcs_SS, pdf_S.astype(np.int32), start_S, int(num_pdfs))
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise InputError(f"{path}: holds {error}; {REMEDY}") from error
        return graph


def denominator_graph(alignments: Iterable[np.ndarray], states: StateTable) -> DenominatorGraph:
    """Makes the graph from the graph labels [T] of each utterance. Raises InputError if there is none."""
    rows_V, count_V = _count(_phones(alignments, states))
    if not len(rows_V):
        raise InputError("no utterance is aligned, so there is no denominator for MMI training; run stage 3 (align)")
    left_V, phone_V, right_V, labels_VK = rows_V[:, 0], rows_V[:, 1], rows_V[:, 2], rows_V[:, 3:]

    pairs = np.unique(np.concatenate([rows_V[:, :2], rows_V[right_V > 0, 1:3]]), axis=0)
    node_of = {pair: number for number, pair in enumerate(map(tuple, pairs.tolist()))}
    node_V = np.array([node_of[pair] for pair in zip(left_V.tolist(), phone_V.tolist(), strict=True)])
    next_V = np.array([node_of.get(pair, -1) for pair in zip(phone_V.tolist(), right_V.tolist(), strict=True)])

    # phones that differ only in the next phone share their states
    chains, chain_V = np.unique(np.column_stack([node_V, labels_VK]), axis=0, return_inverse=True)
    length_C = (chains[:, 1:] > 0).sum(axis=1)
    last_C = np.cumsum(length_C) - 1
    first_C = last_C - length_C + 1
    label_S = chains[:, 1:][chains[:, 1:] > 0]
    size, nodes = len(label_S), len(pairs)
    leave_S, stay_S = np.exp(states.next_L[label_S - 1]), np.exp(states.loop_L[label_S - 1])

    frequency_C = np.bincount(chain_V, count_V)
    frequency_N = np.bincount(chains[:, 0], frequency_C, nodes)
    enter = sparse.coo_array((frequency_C / frequency_N[chains[:, 0]], (chains[:, 0], first_C)), (nodes, size))
    share_V = count_V / frequency_C[chain_V] * leave_S[last_C[chain_V]]
    inside, ends = next_V >= 0, next_V < 0
    leave = sparse.coo_array((share_V[inside], (last_C[chain_V[inside]], next_V[inside])), (size, nodes))
    # another sentence begins where one ends
    first_N = np.where(pairs[:, 0] == 0, frequency_N, 0)
    end = sparse.coo_array((share_V[ends], (last_C[chain_V[ends]], np.zeros(ends.sum(), int))), (size, 1))
    begin = sparse.coo_array((first_N / first_N.sum())[None, :])
    inner_S = np.setdiff1d(np.arange(size), last_C)
    within = sparse.coo_array((leave_S[inner_S], (inner_S, inner_S + 1)), (size, size))
    stay, go_on = sparse.diags_array(stay_S), within + (leave + end @ begin) @ enter
    arcs, pdf_S = sparse.csr_array(stay + go_on), states.pdf_L[label_S - 1]
    if states.first_steps:  # a state for the first step, and one for the others
        arcs = sparse.csr_array(sparse.block_array([[go_on, stay], [go_on, stay]]))
        pdf_S = np.concatenate([pdf_S, pdf_S + states.num_pdfs // 2])
        size = 2 * size

    start_S = np.full(size, 1 / size)
    for _ in range(STEPS):
        start_S = start_S @ arcs
    arcs, pdf_S, start_S = merge_states(arcs, pdf_S, start_S / start_S.sum())
    return DenominatorGraph(arcs.astype(np.float32), pdf_S, start_S.astype(np.float32), states.num_pdfs)


def merge_states(
    arcs_SS: sparse.csr_array, pdf_S: np.ndarray, start_S: np.ndarray
) -> tuple[sparse.csr_array, np.ndarray, np.ndarray]:
    """Merges states of the same pdf that no path tells apart, until there are none. Sums over paths stay the same.

    States are merged if they enter each group of states with the same probability (ordinary lumpability), or if what
    enters them from each group is divided in the ratio of their start probabilities (exact lumpability). See Buchholz,
    "Exact and ordinary lumpability in finite Markov chains" (1994).

    Args:
        arcs_SS: transition probabilities, float64.
        pdf_S: pdf of each state.
        start_S: probability of each state at the start, above 0.
    """
    while True:
        size = len(pdf_S)
        for backward in (False, True):
            weighted_SS = sparse.diags_array(start_S) @ arcs_SS
            rows_SS = sparse.diags_array(1 / start_S) @ weighted_SS.T if backward else arcs_SS
            group_S = _groups(sparse.csr_array(rows_SS), pdf_S)
            member_GS = sparse.coo_array((np.ones(len(pdf_S)), (group_S, np.arange(len(pdf_S)))))
            _, first_G = np.unique(group_S, return_index=True)
            pdf_S, start_S = pdf_S[first_G], member_GS @ start_S
            arcs_SS = sparse.csr_array(sparse.diags_array(1 / start_S) @ (member_GS @ weighted_SS @ member_GS.T))
        if len(pdf_S) == size:
            return arcs_SS, pdf_S, start_S


def _groups(rows_SS: sparse.csr_array, pdf_S: np.ndarray) -> np.ndarray:
    """Returns each state's group: the coarsest groups of one pdf whose rows have the same sum over each group."""
    random = np.random.default_rng(0)
    _, group_S = np.unique(pdf_S, return_inverse=True)
    groups = 0
    while groups < group_S.max() + 1:
        groups = group_S.max() + 1
        # rows differ if and, but for a coincidence, only if their products with random numbers of the groups do
        product_S = rows_SS @ (1 + random.random(groups))[group_S]
        order = np.lexsort((product_S, group_S))
        product, group = product_S[order], group_S[order]
        differs = (np.diff(group) > 0) | (np.diff(product) > TOLERANCE * product[1:])
        group_S[order] = np.cumsum(np.concatenate([[0], differs]))
    return group_S


def _phones(alignments: Iterable[np.ndarray], states: StateTable) -> Iterator[np.ndarray]:
    """Yields rows of (previous, current, next phone, labels of its states, 0 if fewer than K), int32 [I, 3 + K]."""
    longest = max(states.states_P.values())
    remaining = iter(alignments)
    while utterances := list(islice(remaining, UTTERANCES)):
        offsets = np.cumsum([0, *map(len, utterances)])
        runs = runs_of(np.concatenate(utterances), offsets, states)
        first_R = runs.state_R == 0
        rows = np.zeros((first_R.sum(), 3 + longest), np.int32)
        rows[:, :3] = runs.windows_R3[first_R]
        inside = runs.state_R < longest  # the other labels are those of self-loops, see `StateTable.first_steps`
        rows[(np.cumsum(first_R) - 1)[inside], 3 + runs.state_R[inside]] = runs.label_R[inside]
        yield rows


def _count(parts: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct rows, sorted, and how often each occurs."""
    rows, counts = np.empty((0, 0), np.int32), np.empty(0, np.int64)
    for part in parts:
        both = part if not len(rows) else np.concatenate([rows, part])
        weights = np.concatenate([counts, np.ones(len(part), np.int64)])
        rows, place = np.unique(both, axis=0, return_inverse=True)
        counts = np.bincount(place, weights).astype(np.int64)
    return rows, counts
