"""The H transducer, and the self-loops and transition probabilities of a finished graph.

H maps sequences of graph labels (`asr_am.hmm.states`) to sequences of context windows, with one label per HMM state and
without self-loops. As in Kaldi, graphs are determinized and minimized without self-loops, which are added last. All
topologies are left to right without skips, so Kaldi's transition-scale (which weighs alternative exits of a state) has
no effect, and self-loop-scale weighs self-loop and exit alike.

Shapes: A arcs, L graph labels, S states, W context windows.
"""

from __future__ import annotations

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


def window_labels(window: Sequence[int], states: StateTable, tree: Tree) -> tuple[int, ...]:
    """Returns the graph labels of the HMM states of a window's centre phone."""
    phones = tuple(window)
    centre = phones[len(phones) // 2]
    return tuple(states.label(centre, s, tree.pdf(phones, s)) for s in range(states.states_P[centre]))


def merge_windows(windows: Windows, states: StateTable, tree: Tree) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Merges windows with the same HMM, which makes the graph before H several times smaller.

    Returns:
        merged_W: the new input label of each window.
        sequences: the graph labels of each new label. () for epsilon (label 0) and for disambiguation symbols, each of
            which keeps a label of its own.
    """
    merged_W = np.zeros(len(windows), dtype=np.int32)
    sequences: list[tuple[int, ...]] = [()]
    known: dict[tuple[int, ...], int] = {}
    for index, window in enumerate(windows):
        if len(window) == 0:
            continue
        labels = () if is_disambiguation(window) else window_labels(window, states, tree)
        new = known.get(labels) if labels else None
        if new is None:
            new = len(sequences)
            sequences.append(labels)
            known[labels] = new
        merged_W[index] = new
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
