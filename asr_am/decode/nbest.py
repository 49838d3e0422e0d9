"""N-best lists of a lattice: the n best distinct word sequences with their costs.

Paths of a raw lattice differ mostly in their alignment. Its words are therefore first determinized as an acceptor,
whose shortest paths are distinct sentences. The lattice then gives each sentence its best alignment and its two costs.

Shapes: A arcs.
"""

from __future__ import annotations

from dataclasses import dataclass

import kaldifst
import numpy as np

from asr_am.decode.lattice import Lattice, LmScale, beam_excess, costs
from asr_am.hmm.fst_arrays import FstArrays

MAX_STATES = 50_000  # of the determinized acceptor (a lattice that needs more is pruned harder and tried again)
COST_SLACK = 0.1  # rounding of costs summed in float32


@dataclass(frozen=True)
class Sentence:
    """A word sequence with its best path through the lattice.

    Attributes:
        words: word ids.
        graph: graph cost of the path.
        acoustic: unscaled acoustic cost of the path.
        arcs: lattice arcs of the path.
    """

    words: tuple[int, ...]
    graph: float
    acoustic: float
    arcs: np.ndarray


def nbest(lattice: Lattice, scale: LmScale, n: int) -> list[Sentence]:
    """Returns up to `n` distinct word sequences, best first under `scale`."""
    excess_A = beam_excess(lattice, scale)
    cost_A = costs(lattice, [scale])[:, 0]
    acceptor = word_acceptor(lattice, cost_A, excess_A)
    lines = [_linear_path(piece) for piece in kaldifst.convert_nbest_to_vector(kaldifst.shortest_path(acceptor, n=n))]
    # An arc of a sentence's best path exceeds the best cost by no more than the worst sentence: few arcs remain.
    max_cost = max(cost for _, cost in lines) - min(cost for _, cost in lines)
    kept = np.flatnonzero(excess_A <= max_cost + COST_SLACK)
    arc_fst = _fst(lattice, kept, cost_A, kept + 1)
    kaldifst.arcsort(arc_fst, sort_type="olabel")
    sentences = [_with_costs(lattice, arc_fst, words) for words, _ in lines]
    return sorted(sentences, key=lambda s: float(cost_A[s.arcs].sum()))


def word_acceptor(
    lattice: Lattice, cost_A: np.ndarray, excess_A: np.ndarray, beam: float = np.inf
) -> kaldifst.StdVectorFst:
    """Returns the minimal deterministic acceptor of the lattice's word sequences, with the cost of each.

    Args:
        excess_A: `beam_excess` at these costs.
        beam: paths that cost this much more than the best path are left out. It is narrower for a very dense lattice.
    """
    while True:
        kept = np.flatnonzero(excess_A <= beam)
        acceptor = _fst(lattice, kept, cost_A, lattice.word_A[kept])
        try:
            kaldifst.determinize_star(acceptor, max_states=MAX_STATES)
            break
        except RuntimeError:  # more than MAX_STATES
            beam = float(min(beam, excess_A[np.isfinite(excess_A)].max())) / 2
    kaldifst.minimize(acceptor)
    return acceptor


def _fst(lattice: Lattice, kept: np.ndarray, cost_A: np.ndarray, inputs: np.ndarray) -> kaldifst.StdVectorFst:
    """Returns the arcs `kept` of the lattice as an FST from `inputs` to words."""
    words = lattice.word_A[kept]
    arcs = np.stack([lattice.source_A[kept], lattice.target_A[kept], inputs, words], axis=1)
    final_S = np.full(lattice.num_states, np.inf)
    final_S[-1] = 0.0
    # Path costs are in the thousands: float32 sums lose some 1e-3. The float64 sums of `Sentence` do not.
    return FstArrays.build(0, arcs, cost_A[kept], final_S).to_fst()


def _linear_path(fst: kaldifst.StdVectorFst) -> tuple[np.ndarray, float]:
    """Returns the input labels along an FST with a single path, and its cost."""
    arrays = FstArrays.from_fst(fst)
    position_S = np.full(arrays.num_states, -1)
    position_S[arrays.source_A] = np.arange(len(arrays.source_A))
    labels, state = [], arrays.start
    while (arc := position_S[state]) >= 0:
        labels.append(arrays.ilabel_A[arc])
        state = arrays.target_A[arc]
    cost = float(arrays.weight_A.sum() + arrays.final_S[state])
    return np.array([label for label in labels if label], dtype=np.int64), cost


def _with_costs(lattice: Lattice, arc_fst: kaldifst.StdVectorFst, words: np.ndarray) -> Sentence:
    """Returns a word sequence with its best path through the lattice."""
    count = len(words)
    rows = np.stack([np.arange(count), np.arange(1, count + 1), words, words], axis=1)
    final_S = np.r_[np.full(count, np.inf), 0.0]
    sentence = FstArrays.build(0, rows, np.zeros(count), final_S).to_fst()
    arcs = _linear_path(kaldifst.shortest_path(kaldifst.compose(arc_fst, sentence)))[0] - 1
    return Sentence(
        tuple(words.tolist()), float(lattice.graph_A[arcs].sum()), float(lattice.acoustic_A[arcs].sum()), arcs
    )
