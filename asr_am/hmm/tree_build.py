"""Building the decision tree: accumulation of statistics, automatic questions, splitting and merging of leaves.

Statistics are sums over the frames of every (window, state) that occurs. The log-likelihood of frames under their own
maximum-likelihood Gaussian depends only on their count and first and second order sums, so merging and splitting sets
of contexts is adding and subtracting rows.

Questions are sets of acoustically similar phones, found by clustering. The tree splits where a question gains most
likelihood, then merges leaves that differ little (Young, Odell & Woodland 1994, in the order of Kaldi's build-tree).
Every root has one tree per state. Roots of silence phones are never split.

Shapes: R runs, D feature dimension, N frames, M distinct (window, state), F columns of the tree statistics, Q
questions, U phones that occur at a position.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asr_am.hmm.alignments import runs_of
from asr_am.hmm.frames import FrameStore
from asr_am.hmm.states import StateTable
from asr_am.hmm.tree import DecisionTree, Node, Root, Split
from asr_am.parallel import threaded_map

BLOCK = 8000  # runs summed at a time, to bound memory
VARIANCE_FLOOR = 0.01
CENTRAL_STATE = 1  # of three, the one least affected by coarticulation


@dataclass(frozen=True)
class TreeStats:
    """Statistics of every (window, state) that occurs.

    Attributes:
        windows_M3: previous, current and next phone.
        state_M: HMM state, from 0.
        sums_MF: float64 [M, 1 + 2D], columns count, sum of x, sum of x*x.
    """

    windows_M3: np.ndarray
    state_M: np.ndarray
    sums_MF: np.ndarray

    @property
    def dim(self) -> int:
        return (self.sums_MF.shape[1] - 1) // 2


def accumulate_tree_stats(frames: FrameStore, labels_N: np.ndarray, table: StateTable, jobs: int) -> TreeStats:
    """Accumulates the aligned frames by (window, state)."""
    work = functools.partial(_range_stats, frames, labels_N, table)
    return functools.reduce(_merged, threaded_map(work, frames.ranges(), jobs, "tree statistics"))


def _range_stats(frames: FrameStore, labels_N: np.ndarray, table: StateTable, utterances: tuple[int, int]) -> TreeStats:
    first, end = utterances
    rows = frames.rows(first, end)
    runs = runs_of(labels_N[rows], frames.offsets_U1[first : end + 1] - rows.start, table)
    keys_M4, key_R = runs.contexts()
    sums_MF = np.zeros((len(keys_M4), 1 + 2 * frames.dim))
    sums_MF[:, 0] = np.bincount(key_R, runs.length_R, minlength=len(keys_M4))
    for begin in range(0, len(key_R), BLOCK):
        block = slice(begin, begin + BLOCK)
        order = np.argsort(key_R[block], kind="stable")
        keys, starts = np.unique(key_R[block][order], return_index=True)
        sums_RF = _run_sums(frames, rows.start + runs.start_R[block], runs.length_R[block])
        sums_MF[keys, 1:] += np.add.reduceat(sums_RF[order], starts, axis=0)
    return TreeStats(keys_M4[:, :3], keys_M4[:, 3], sums_MF)


def _merged(one: TreeStats, other: TreeStats) -> TreeStats:
    """Adds up the statistics of two ranges."""
    keys_M4, row_M = np.unique(
        np.concatenate([np.column_stack([part.windows_M3, part.state_M]) for part in (one, other)]),
        axis=0, return_inverse=True,
    )  # fmt: skip
    sums_MF = np.zeros((len(keys_M4), one.sums_MF.shape[1]))
    sums_MF[row_M[: len(one.state_M)]] = one.sums_MF
    sums_MF[row_M[len(one.state_M) :]] += other.sums_MF
    return TreeStats(keys_M4[:, :3], keys_M4[:, 3], sums_MF)


def _run_sums(frames: FrameStore, start_R: np.ndarray, length_R: np.ndarray) -> np.ndarray:
    """Returns the sums of x and of x*x over each run, float64 [R, 2D]. Runs are in the order of the frames."""
    first = int(start_R[0])
    x_ND = frames.read(slice(first, int(start_R[-1] + length_R[-1]))).astype(np.float64)
    bounds = np.stack([start_R, start_R + length_R], axis=1).ravel() - first
    # Every second segment lies between two runs. The last run ends where the frames end.
    return np.add.reduceat(np.concatenate([x_ND, x_ND * x_ND], axis=1), bounds[:-1], axis=0)[::2]


def log_likelihood(sums_XF: np.ndarray) -> np.ndarray:
    """Returns the log-likelihood [X] of the frames of each row under that row's Gaussian, 0 for rows without frames."""
    dim = (sums_XF.shape[1] - 1) // 2
    count_X1 = np.maximum(sums_XF[:, :1], 1e-10)
    mean_XD = sums_XF[:, 1 : 1 + dim] / count_X1
    var_XD = np.maximum(sums_XF[:, 1 + dim :] / count_X1 - mean_XD**2, VARIANCE_FLOOR)
    return -0.5 * sums_XF[:, 0] * (dim * (1 + math.log(2 * math.pi)) + np.log(var_XD).sum(axis=1))


def phone_questions(
    stats: TreeStats, roots: Sequence[Sequence[int]], silence: Collection[int], extra: Iterable[Collection[int]] = ()
) -> list[frozenset[int]]:
    """Generates questions by clustering phones, as Kaldi's cluster-phones does.

    Nonsilence roots are clustered bottom-up by the least loss in likelihood of their central states. Questions are
    distinct, none is empty, and their order does not depend on hashing.

    Returns:
        Single roots, every cluster, silence with and without the utterance's edge (0), and `extra`.
    """
    units = [frozenset(root) for root in roots if not set(root) <= set(silence)]
    phone_M = stats.windows_M3[:, 1]
    spoken_M = ~np.isin(phone_M, sorted(silence))
    central = min(CENTRAL_STATE, int(stats.state_M[spoken_M].max(initial=0)))  # phones may have only one state
    central_MF = stats.sums_MF * (stats.state_M == central)[:, None]
    sums = [central_MF[np.isin(phone_M, sorted(unit))].sum(axis=0) for unit in units]
    silences = [frozenset(silence), frozenset(silence) | {0}, *(frozenset({phone}) for phone in silence)]
    found = [*_clusters(units, sums), *silences, *(frozenset(phones) for phones in extra)]
    return [phones for phones in dict.fromkeys(found) if phones]


def _clusters(units: list[frozenset[int]], sums: list[np.ndarray]) -> list[frozenset[int]]:
    """Returns all sets formed while repeatedly merging the two clusters with the least loss until one is left."""
    found = list(units)
    clusters, sums = list(units), list(sums)
    while len(clusters) > 1:
        sums_XF = np.array(sums)
        single_X = log_likelihood(sums_XF)
        pairs = np.triu_indices(len(clusters), k=1)
        loss = single_X[pairs[0]] + single_X[pairs[1]] - log_likelihood(sums_XF[pairs[0]] + sums_XF[pairs[1]])
        best = int(np.argmin(loss))
        first, second = int(pairs[0][best]), int(pairs[1][best])
        clusters.append(clusters[first] | clusters[second])
        sums.append(sums[first] + sums[second])
        found.append(clusters[-1])
        for index in (second, first):
            del clusters[index], sums[index]
    return found


@dataclass(frozen=True)
class TreeOptions:
    """Options of tree building.

    Attributes:
        leaves: maximum number of leaves before merging.
        min_occupancy: frames that a leaf needs.
        merge: merge similar leaves after splitting.
        per_state: leaves allowed per state of a root that occurs, on average, even if that exceeds `leaves`.
    """

    leaves: int = 300
    min_occupancy: float = 30.0
    merge: bool = True
    per_state: float = 1.0


@dataclass(eq=False)
class _TreeNode:
    """A node while the tree is built.

    Attributes:
        rows: its rows of the statistics.
        root: index of its (root, state).
        position: position that its question is about, once it is split.
        question: phones of its question.
        yes: child for phones in the question.
        no: child for other phones.
        pdf: pdf of a leaf.
    """

    rows: np.ndarray
    root: int
    position: int = -1
    question: frozenset[int] = frozenset()
    yes: _TreeNode | None = None
    no: _TreeNode | None = None
    pdf: int = -1


def build_tree(
    stats: TreeStats, roots: Sequence[Sequence[int]], states_P: Mapping[int, int], silence: Collection[int],
    questions: Sequence[frozenset[int]], options: TreeOptions,
) -> DecisionTree:  # fmt: skip
    """Builds a triphone tree.

    Args:
        states_P: number of HMM states of each phone, equal within a root.
        silence: silence phones, whose roots are not split.
    """
    keys = [(index, state) for index, phones in enumerate(roots) for state in range(states_P[phones[0]])]
    tops = [_TreeNode(_rows_of(stats, roots[index], state), number) for number, (index, state) in enumerate(keys)]
    open_nodes = [top for top, (index, _) in zip(tops, keys, strict=True) if not set(roots[index]) <= set(silence)]
    leaves, smallest_gain = _grow(stats, tops, open_nodes, questions, options)
    _number_leaves(stats, leaves, smallest_gain if options.merge else 0.0)
    nodes = dict(zip(keys, map(_freeze, tops), strict=True))
    return DecisionTree(
        3,
        tuple(
            Root(tuple(phones), tuple(nodes[index, state] for state in range(states_P[phones[0]])))
            for index, phones in enumerate(roots)
        ),
    )


def _rows_of(stats: TreeStats, phones: Sequence[int], state: int) -> np.ndarray:
    return np.flatnonzero(np.isin(stats.windows_M3[:, 1], list(phones)) & (stats.state_M == state))


def _grow(
    stats: TreeStats, tops: Sequence[_TreeNode], open_nodes: Sequence[_TreeNode], questions: Sequence[frozenset[int]],
    options: TreeOptions,
) -> tuple[list[_TreeNode], float]:  # fmt: skip
    """Splits the best node until no split gains or the limit is reached. Returns the leaves, and the smallest gain."""
    question_QP = _question_matrix(questions, int(stats.windows_M3.max(initial=0)))
    order = itertools.count()  # ties are broken in the order of insertion
    queue: list[tuple[float, int, _TreeNode, int, int]] = []

    def consider(node: _TreeNode) -> None:
        gain, position, question = _best_split(stats, node.rows, question_QP, options.min_occupancy)
        if gain > 0:
            heapq.heappush(queue, (-gain, next(order), node, position, question))

    for node in open_nodes:
        consider(node)
    gains: list[float] = []
    num_seen = sum(len(top.rows) > 0 for top in tops)
    limit = max(options.leaves, len(tops) - num_seen + round(options.per_state * num_seen))
    while queue and len(tops) + len(gains) < limit:
        negative_gain, _, node, position, question = heapq.heappop(queue)
        answer = question_QP[question, stats.windows_M3[node.rows, position]]
        node.position, node.question = position, questions[question]
        node.yes, node.no = _TreeNode(node.rows[answer], node.root), _TreeNode(node.rows[~answer], node.root)
        consider(node.yes)
        consider(node.no)
        gains.append(-negative_gain)
    return [leaf for top in tops for leaf in _leaves(top)], min(gains, default=0.0)


def _question_matrix(questions: Sequence[frozenset[int]], highest: int) -> np.ndarray:
    """Returns bool [Q, phone id]: whether a question contains a phone."""
    question_QP = np.zeros((len(questions), highest + 1), dtype=bool)
    for index, phones in enumerate(questions):
        question_QP[index, [phone for phone in phones if phone <= highest]] = True
    return question_QP


def _best_split(
    stats: TreeStats, rows: np.ndarray, question_QP: np.ndarray, min_occupancy: float
) -> tuple[float, int, int]:
    """Finds the best split of `rows`.

    Returns:
        (gain, position, question). The gain is 0 if no split leaves `min_occupancy` frames on both sides.
    """
    best = (0.0, -1, -1)
    if len(rows) < 2:
        return best
    sums_MF = stats.sums_MF[rows]
    total_F = sums_MF.sum(axis=0)
    if total_F[0] < 2 * min_occupancy:
        return best
    unsplit = float(log_likelihood(total_F[None])[0])
    for position in range(3):
        phone_M = stats.windows_M3[rows, position]
        order = np.argsort(phone_M, kind="stable")
        phones_U, starts = np.unique(phone_M[order], return_index=True)
        yes_QF = question_QP[:, phones_U].astype(np.float64) @ np.add.reduceat(sums_MF[order], starts, axis=0)
        no_QF = total_F - yes_QF
        possible = np.flatnonzero(np.minimum(yes_QF[:, 0], no_QF[:, 0]) >= min_occupancy)
        if len(possible) == 0:
            continue
        gains = log_likelihood(yes_QF[possible]) + log_likelihood(no_QF[possible]) - unsplit
        top = int(np.argmax(gains))
        if gains[top] > best[0]:
            best = (float(gains[top]), position, int(possible[top]))
    return best


def _leaves(node: _TreeNode) -> list[_TreeNode]:
    return [node] if node.yes is None or node.no is None else _leaves(node.yes) + _leaves(node.no)


def _number_leaves(stats: TreeStats, leaves: list[_TreeNode], threshold: float) -> None:
    """Assigns pdfs. Leaves of one root and state share a pdf where merging them loses less than `threshold`."""
    pdf = 0
    for _, group in itertools.groupby(leaves, key=lambda leaf: leaf.root):
        for cluster in _merge(stats, list(group), threshold):
            for leaf in cluster:
                leaf.pdf = pdf
            pdf += 1


def _merge(stats: TreeStats, leaves: list[_TreeNode], threshold: float) -> list[list[_TreeNode]]:
    """Clusters leaves: merges the two clusters with the least loss while that loss is below `threshold`."""
    clusters = [[leaf] for leaf in leaves]
    sums_XF = np.array([stats.sums_MF[leaf.rows].sum(axis=0) for leaf in leaves])
    while len(clusters) > 1:
        single_X = log_likelihood(sums_XF)
        first, second = np.triu_indices(len(clusters), k=1)
        loss = single_X[first] + single_X[second] - log_likelihood(sums_XF[first] + sums_XF[second])
        best = int(np.argmin(loss))
        if loss[best] >= threshold:
            break
        kept, removed = int(first[best]), int(second[best])
        clusters[kept] += clusters.pop(removed)
        sums_XF[kept] += sums_XF[removed]
        sums_XF = np.delete(sums_XF, removed, axis=0)
    return clusters


def _freeze(node: _TreeNode) -> Node:
    if node.yes is None or node.no is None:
        return node.pdf
    return Split(node.position, node.question, _freeze(node.yes), _freeze(node.no))
