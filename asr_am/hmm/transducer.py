"""The H transducer, and the self-loops and transition probabilities of a finished graph.

H maps sequences of graph labels (`asr_am.hmm.states`) to sequences of context windows, with one label per HMM state and
without self-loops. As in Kaldi, graphs are determinized and minimized without self-loops, which are added last. All
topologies are left to right without skips, so Kaldi's transition-scale (which weighs alternative exits of a state) has
no effect, and self-loop-scale weighs self-loop and exit alike.

Shapes: A arcs, L graph labels, S states, W context windows and disambiguation symbols, M windows of C phones, K states
of the longest phone, Q pairs of a window and a state, U distinct triples of phone, state and pdf, H distinct HMMs, N
new labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import kaldifst
import numpy as np

from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable, Tree

# From compose_context: a window per input label. [-id] or [0] stands for a disambiguation symbol.
Windows = Sequence[Sequence[int]]


def is_disambiguation(window: Sequence[int]) -> bool:
    """Returns True for entries of compose_context that are disambiguation symbols ([0] is its own, at the start)."""
    return len(window) == 1 and window[0] <= 0


def window_labels(windows_MC: np.ndarray, states: StateTable, tree: Tree) -> np.ndarray:
    """Returns the graph labels of the HMM states of each window's centre phone, 0 beyond its last, int32 [M, K]."""
    centre_M = windows_MC[:, windows_MC.shape[1] // 2]
    phones, phone_M = np.unique(centre_M, return_inverse=True)
    count_M = np.array([states.states_P[phone] for phone in phones.tolist()], np.int32)[phone_M]
    most = max(states.states_P.values())
    row_Q, state_Q = np.nonzero(np.arange(most) < count_M[:, None])
    pdf_Q = tree.pdfs(windows_MC[row_Q], state_Q)
    triples, triple_Q = np.unique((centre_M[row_Q] * most + state_Q) << 32 | pdf_Q, return_inverse=True)
    triples_U3 = np.stack([*np.divmod(triples >> 32, most), triples & 0xFFFFFFFF], axis=1)
    labels = [states.label(phone, state, pdf) for phone, state, pdf in triples_U3.tolist()]
    labels_MK = np.zeros((len(windows_MC), most), np.int32)
    labels_MK[row_Q, state_Q] = np.array(labels, np.int32)[triple_Q]
    return labels_MK


def merge_windows(windows: Windows, states: StateTable, tree: Tree) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Merges windows with the same HMM, which makes the graph before H several times smaller.

    With unknown words there are a million windows, as any phone follows any.

    Returns:
        merged_W: the new input label of each window, in the order of their first windows.
        sequences: the graph labels of each new label. () for epsilon (label 0) and for disambiguation symbols, each of
            which keeps a label of its own.
    """
    symbol_W = np.fromiter(map(is_disambiguation, windows), bool, len(windows))
    spoken_M = np.flatnonzero(np.fromiter(map(len, windows), bool, len(windows)) & ~symbol_W)
    phones = itertools.chain.from_iterable(map(windows.__getitem__, spoken_M.tolist()))
    windows_MC = np.fromiter(phones, np.int32).reshape(-1, tree.width)
    labels_MK = window_labels(windows_MC, states, tree)

    hmm_M = np.zeros(len(spoken_M), np.int64)
    for label_M in labels_MK.T:  # unique(axis=0) takes several times as long
        hmm_M = np.unique(hmm_M * (len(states.labels_L3) + 1) + label_M, return_inverse=True)[1]
    first_H = np.unique(hmm_M, return_index=True)[1]

    first_N = np.concatenate([np.flatnonzero(symbol_W), spoken_M[first_H]])  # window of each new label but 0
    new_N = 1 + np.argsort(np.argsort(first_N))
    symbols = len(first_N) - len(first_H)
    merged_W = np.zeros(len(windows), np.int32)
    merged_W[symbol_W] = new_N[:symbols]
    merged_W[spoken_M] = new_N[symbols:][hmm_M]
    sequences: list[tuple[int, ...]] = [()] * (1 + len(first_N))
    for new, labels in zip(new_N[symbols:].tolist(), labels_MK[first_H].tolist(), strict=True):
        sequences[new] = tuple(label for label in labels if label)
    return merged_W, sequences


def expand_phones(
    phones: kaldifst.StdVectorFst, disambig: list[int], states: StateTable, tree: Tree
) -> kaldifst.StdVectorFst:
    """Expands the phones on the input side of an FST to graph labels, without self-loops.

    Input labels above the graph labels stand for the disambiguation symbols, whose phone ids are `disambig`. Without
    such, the result is ready for `add_self_loops`.
    """
    in_context, windows = kaldifst.compose_context(disambig, tree.width, tree.width // 2, phones)
    merged_W, sequences = merge_windows(windows, states, tree)
    arrays = FstArrays.from_fst(in_context)
    in_context = arrays.relabel(merged_W[arrays.ilabel_A]).to_fst()
    kaldifst.arcsort(in_context, sort_type="ilabel")
    return kaldifst.compose(h_transducer(sequences, len(states.labels_L3)), in_context)


def h_transducer(sequences: Sequence[tuple[int, ...]], num_labels: int) -> kaldifst.StdVectorFst:
    """Builds the transducer from graph labels to the windows merged by `merge_windows`, sorted by output label.

    Disambiguation symbols have the input labels from `num_labels` + 1.
    """
    rows: list[tuple[int, int, int, int]] = []  # source, target, graph label, window
    num_states, next_label = 1, num_labels + 1
    for window, labels in enumerate(sequences):
        if window == 0:
            continue
        if not labels:
            rows.append((0, 0, next_label, window))
            next_label += 1
            continue
        chain = [0, *range(num_states, num_states + len(labels) - 1), 0]
        num_states += len(labels) - 1
        outputs = (window, *[0] * (len(labels) - 1))
        rows.extend(zip(chain[:-1], chain[1:], labels, outputs, strict=True))
    final_S = np.full(num_states, np.inf, dtype=np.float32)
    final_S[0] = 0.0
    arcs_A4 = np.array(rows, dtype=np.int32).reshape(-1, 4)
    arcs_A4 = arcs_A4[np.argsort(arcs_A4[:, 3], kind="stable")]
    return FstArrays.build(0, arcs_A4, np.zeros(len(arcs_A4)), final_S).to_fst()


def remove_input_labels(fst: kaldifst.StdVectorFst, above: int) -> kaldifst.StdVectorFst:
    """Replaces input labels greater than `above` (disambiguation symbols) by epsilon."""
    arrays = FstArrays.from_fst(fst)
    return arrays.relabel(np.where(arrays.ilabel_A > above, 0, arrays.ilabel_A)).to_fst()


def add_self_loops(
    fst: kaldifst.StdVectorFst, states: StateTable, *, self_loop_scale: float = 0.1
) -> kaldifst.StdVectorFst:
    """Adds self-loops and transition probabilities to a graph over graph labels, the last step of graph construction.

    The arc that enters an HMM state carries the log probability of its exit, and the loop that of the self-loop. Both
    are multiplied by `self_loop_scale` (Kaldi's, where 0.1 goes with an acoustic scale of 0.1). A stay of n frames
    costs

        -scale (log next + (n - 1) log loop).

    States that are entered with several labels are split, with an epsilon arc back. Where the first step of a phone has
    its own pdf, both labels have the probabilities of the one that enters.
    """
    graph = FstArrays.from_fst(fst)
    if graph.num_states == 0:
        return fst
    next_cost, loop_cost = -self_loop_scale * states.next_L, -self_loop_scale * states.loop_L
    emitting_A = graph.ilabel_A > 0
    weight_A = graph.weight_A.copy()
    weight_A[emitting_A] += next_cost[graph.ilabel_A[emitting_A] - 1]

    num_labels = len(states.labels_L3)
    entry_A = graph.target_A.astype(np.int64) * (num_labels + 1) + graph.ilabel_A  # (state, label that enters it)
    entries, entry_of_A = np.unique(entry_A, return_inverse=True)
    entered, label = np.divmod(entries, num_labels + 1)
    entries_S = np.bincount(entered, minlength=graph.num_states)
    entries_S[graph.start] += 1  # the start state is also entered without a label
    mixed = (entries_S[entered] > 1) & (label > 0)

    looping = entered.copy()
    looping[mixed] = graph.num_states + np.arange(mixed.sum())
    has_loop = label > 0
    loop_label = np.concatenate([[0], states.loop_label_L])[label]
    loops = np.stack([looping, looping, loop_label, np.zeros_like(label)], axis=1)[has_loop]
    back = np.stack([looping, entered, np.zeros_like(label), np.zeros_like(label)], axis=1)[mixed]
    arcs = np.stack([graph.source_A, looping[entry_of_A], graph.ilabel_A, graph.olabel_A], axis=1)
    weights = np.concatenate([loop_cost[label[has_loop] - 1], np.zeros(len(back), np.float32), weight_A])
    final_S = np.concatenate([graph.final_S, np.full(mixed.sum(), np.inf, np.float32)])
    return FstArrays.build(graph.start, np.concatenate([loops, back, arcs]), weights, final_S).to_fst()
