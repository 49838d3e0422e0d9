"""The H transducer, and the self-loops and transition probabilities of a finished graph.

Shapes: A arcs, L graph labels, S states, W context windows.

H maps sequences of graph labels (`asr_am.hmm.states`) to sequences of context windows, one label for each HMM state
and no loops yet: graphs are determinized and minimized without loops, which come last, as in Kaldi. All topologies
are left to right without skips, so Kaldi's transition-scale (which weighs the choice between ways out of a state)
has nothing to act on, and self-loop-scale weighs both staying and leaving.
"""

from __future__ import annotations

from collections.abc import Sequence

import kaldifst
import numpy as np

from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable, Tree

# What compose_context returns: a window for each input label, [-id] or [0] for a disambiguation symbol.
Windows = Sequence[Sequence[int]]


def is_disambiguation(window: Sequence[int]) -> bool:
    """True for the entries of compose_context that stand for a disambiguation symbol ([0] is its own, at the start)."""
    return len(window) == 1 and window[0] <= 0


def window_labels(window: Sequence[int], states: StateTable, tree: Tree) -> tuple[int, ...]:
    """The graph labels of the HMM states of a window's centre phone."""
    phones = tuple(window)
    centre = phones[len(phones) // 2]
    return tuple(states.label(centre, s, tree.pdf(phones, s)) for s in range(states.states_P[centre]))


def merge_windows(windows: Windows, states: StateTable, tree: Tree) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Windows that are the same HMM become one, which makes the graph before H several times smaller.

    Returns (merged_W, sequences): merged_W[i] is the new input label of window i, and sequences[j] are the graph labels
    of new label j; () for a disambiguation symbol (each keeps a label of its own) and for epsilon, j = 0.
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


def h_transducer(sequences: Sequence[tuple[int, ...]], num_labels: int) -> tuple[kaldifst.StdVectorFst, list[int]]:
    """The transducer from graph labels to the merged windows of `merge_windows`, sorted by output label.

    Returns (H, disambiguation): the input labels, above `num_labels`, that the disambiguation symbols have in H. Where
    there are none, H composed with a graph of windows is ready for `add_self_loops`.
    """
    rows: list[tuple[int, int, int, int]] = []  # source, target, graph label, window
    disambiguation: list[int] = []
    num_states = 1
    for window, labels in enumerate(sequences):
        if window == 0:
            continue
        if not labels:
            disambiguation.append(num_labels + len(disambiguation) + 1)
            rows.append((0, 0, disambiguation[-1], window))
            continue
        chain = [0, *range(num_states, num_states + len(labels) - 1), 0]
        num_states += len(labels) - 1
        outputs = (window, *[0] * (len(labels) - 1))
        rows.extend(zip(chain[:-1], chain[1:], labels, outputs, strict=True))
    final_S = np.full(num_states, np.inf, dtype=np.float32)
    final_S[0] = 0.0
    arcs_A4 = np.array(rows, dtype=np.int32).reshape(-1, 4)
    arcs_A4 = arcs_A4[np.argsort(arcs_A4[:, 3], kind="stable")]
    return FstArrays.build(0, arcs_A4, np.zeros(len(arcs_A4)), final_S).to_fst(), disambiguation


def remove_input_labels(fst: kaldifst.StdVectorFst, above: int) -> kaldifst.StdVectorFst:
    """Replace the input labels greater than `above` (disambiguation symbols) by epsilon."""
    arrays = FstArrays.from_fst(fst)
    return arrays.relabel(np.where(arrays.ilabel_A > above, 0, arrays.ilabel_A)).to_fst()


def add_self_loops(
    fst: kaldifst.StdVectorFst, states: StateTable, *, self_loop_scale: float = 0.1
) -> kaldifst.StdVectorFst:
    """A graph over graph labels with its self-loops and its transition probabilities: the last step of any graph.

    The arc that enters an HMM state carries the log probability of leaving it, its loop that of staying, both times
    `self_loop_scale` (Kaldi's; 0.1 goes with an acoustic scale of 0.1): a stay of n frames costs
    -scale (log next + (n - 1) log loop). States that several labels lead to are split, with an epsilon arc back.
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
    ways_S = np.bincount(entered, minlength=graph.num_states)
    ways_S[graph.start] += 1  # being first is a way of its own, without a label
    mixed = (ways_S[entered] > 1) & (label > 0)

    looping = entered.copy()
    looping[mixed] = graph.num_states + np.arange(mixed.sum())
    has_loop = label > 0
    loops = np.stack([looping, looping, label, np.zeros_like(label)], axis=1)[has_loop]
    back = np.stack([looping, entered, np.zeros_like(label), np.zeros_like(label)], axis=1)[mixed]
    arcs = np.stack([graph.source_A, looping[entry_of_A], graph.ilabel_A, graph.olabel_A], axis=1)
    weights = np.concatenate([loop_cost[label[has_loop] - 1], np.zeros(len(back), np.float32), weight_A])
    final_S = np.concatenate([graph.final_S, np.full(mixed.sum(), np.inf, np.float32)])
    return FstArrays.build(graph.start, np.concatenate([loops, back, arcs]), weights, final_S).to_fst()
