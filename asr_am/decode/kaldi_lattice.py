"""Lattices, posteriors and graphs with Kaldi's transition-ids, for `lattice-*` and `latgen-faster-mapped`.

A transition-id says whether a frame enters an HMM state or stays in it (asr_am/hmm/kaldi_model.py), which a graph label
does not. In our graphs a state with a self-loop is entered by one label only, so a frame stays if its label is the one
that its lattice state was entered with.

Shapes: A arcs, S states, T frames.
"""

from __future__ import annotations

import struct
from collections import defaultdict

import numpy as np

from asr_am.data.kaldi_binary import KaldiWriter
from asr_am.decode.lattice import Lattice, LmScale, arc_posteriors
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.vector_fst import COUNTS, MAGIC, text_bytes

COMPACT = b"compactlattice44"
PROPERTIES = 3  # expanded, mutable
MIN_POSTERIOR = 1e-5  # smaller ones are left out of posteriors, as lattice-to-post does in effect


def graph_with_ids(graph: FstArrays) -> FstArrays:
    """Returns a decoding graph with transition-ids in place of graph labels."""
    loop_A = graph.source_A == graph.target_A
    ids_A = np.where(graph.ilabel_A > 0, 2 * graph.ilabel_A - loop_A, 0)
    return graph.relabel(ids_A)


def transition_ids(lattice: Lattice) -> np.ndarray:
    """Returns the transition-id of each arc [A], 0 for arcs without a label."""
    entered_S = np.zeros(lattice.num_states, np.int32)
    emitting_A = lattice.label_A > 0
    entered_S[lattice.target_A[emitting_A]] = lattice.label_A[emitting_A]
    stays_A = lattice.label_A == entered_S[lattice.source_A]
    return np.where(emitting_A, 2 * lattice.label_A - stays_A, 0)


CompactArc = tuple[int, int, float, float, tuple[int, ...]]  # target, word, graph and acoustic cost, transition-ids


def compact_arcs(lattice: Lattice) -> tuple[list[list[CompactArc]], int]:
    """Joins chains of arcs with at most one word, as Kaldi's CompactLattice has them.

    Returns:
        The arcs of each state, and the final state.
    """
    ids_A, word_A, target_A = (x.tolist() for x in (transition_ids(lattice), lattice.word_A, lattice.target_A))
    graph_A, acoustic_A = lattice.graph_A.tolist(), lattice.acoustic_A.tolist()
    entering_S = np.bincount(lattice.target_A, minlength=lattice.num_states).tolist()
    leaving_S: list[list[int]] = [[] for _ in range(lattice.num_states)]
    for arc, source in enumerate(lattice.source_A.tolist()):
        leaving_S[source].append(arc)

    def chain(arc: int) -> list[int]:
        """Returns the arcs from this one to the next state that others meet at or part from, or to the next word."""
        arcs, spoken = [arc], word_A[arc] > 0
        while entering_S[target_A[arc]] == 1 and len(following := leaving_S[target_A[arc]]) == 1:
            (arc,) = following
            if spoken and word_A[arc]:
                break
            spoken = spoken or word_A[arc] > 0
            arcs.append(arc)
        return arcs

    numbers = {0: 0}  # of the states that are kept
    joined: list[list[CompactArc]] = [[]]
    waiting = [0]
    while waiting:
        state = waiting.pop()
        for arcs in map(chain, leaving_S[state]):
            target = target_A[arcs[-1]]
            if target not in numbers:
                numbers[target] = len(numbers)
                joined.append([])
                waiting.append(target)
            graph, acoustic = sum(graph_A[arc] for arc in arcs), sum(acoustic_A[arc] for arc in arcs)
            ids = tuple(ids_A[arc] for arc in arcs if ids_A[arc])
            joined[numbers[state]].append((numbers[target], max(word_A[arc] for arc in arcs), graph, acoustic, ids))
    return joined, numbers[lattice.num_states - 1]


def compact_lattice_bytes(lattice: Lattice) -> bytes:
    """Returns a lattice as Kaldi's binary CompactLattice: an OpenFst vector FST with arcs of type compactlattice44."""
    states, final = compact_arcs(lattice)
    head = struct.pack("<i", MAGIC) + text_bytes(b"vector") + text_bytes(COMPACT) + struct.pack("<ii", 2, 0)
    parts = [head, COUNTS.pack(PROPERTIES, 0, len(states), sum(map(len, states)))]
    for number, arcs in enumerate(states):
        cost = 0.0 if number == final else np.inf
        parts.append(struct.pack("<ffiq", cost, cost, 0, len(arcs)))  # final weight without transition-ids
        for target, word, graph, acoustic, ids in arcs:
            parts.append(struct.pack(f"<iiffi{len(ids)}ii", word, word, graph, acoustic, len(ids), *ids, target))
    return b"".join(parts)


def frame_posteriors(lattice: Lattice, lm_weight: float) -> list[dict[int, float]]:
    """Returns the posteriors of the transition-ids of each frame."""
    posterior_A = arc_posteriors(lattice, [LmScale(lm_weight)])[:, 0]
    ids_A, frame_A = transition_ids(lattice), lattice.frame_S[lattice.source_A]
    frames: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(lattice.num_frames)]
    for arc in np.flatnonzero(ids_A).tolist():
        frames[frame_A[arc]][int(ids_A[arc])] += float(posterior_A[arc])
    return [{key: value for key, value in sorted(frame.items()) if value > MIN_POSTERIOR} for frame in frames]


def posterior_bytes(frames: list[dict[int, float]]) -> bytes:
    """Returns posteriors as Kaldi's binary Posterior, which `post-to-*` and `ivector-extract` read."""
    writer = KaldiWriter()
    writer.integer(len(frames))
    for frame in frames:
        writer.integer(len(frame))
        for key, value in frame.items():
            writer.integer(key)
            writer.number(value)
    return b"".join(writer.parts)
