"""Lattice-generating search of one utterance, as Kaldi's LatticeFasterDecoder does it.

Shapes: A lattice arcs, L graph labels, P pdfs, S lattice states, T frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asr_am.decode.lattice import sort_states
from asr_am.decode.search_graph import LABEL, WEIGHT, WORD, SearchGraph
from asr_am.decode.token_passing import ARC, EMITTING, END, SOURCE, Arcs, Beams, TokenLattice, search_tokens
from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable
from asr_am.signals import signals_later


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search, with Kaldi's names and meanings.

    Attributes:
        beam: decoding beam, in units of graph cost.
        lattice_beam: beam of the lattice, in units of graph cost.
        acoustic_scale: 1 / LM weight during the search.
        max_active: most tokens that are expanded in a frame, 0 for no limit.
        min_active: the beam is widened until this many tokens are expanded.
        beam_delta: added to the beam of the next frame where `max_active` or `min_active` sets it.
    """

    beam: float = 13.0
    lattice_beam: float = 6.0
    acoustic_scale: float = 0.1
    max_active: int = 7000
    min_active: int = 200
    beam_delta: float = 0.5

    def __post_init__(self) -> None:
        for name in ("beam", "lattice_beam", "acoustic_scale", "beam_delta"):
            if not getattr(self, name) > 0:
                raise InputError(f"search: {name} is {getattr(self, name)!r}; it must be a number above 0")
        if self.max_active < 0 or self.min_active < 0:
            raise InputError("search: max_active and min_active must be at least 0")
        if 0 < self.max_active <= self.min_active:
            raise InputError(
                f"search: max_active is {self.max_active}; it must be above min_active ({self.min_active}), "
                "or 0 for no limit"
            )


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        arrays: the lattice, None if no path survived. Input labels are graph labels. Weights are pairs of graph cost
            and unscaled acoustic cost. States are in topological order.
        complete: whether a final state of the graph was reached. If not, the lattice ends in whatever states survived.
        active: mean number of tokens expanded in a frame.
    """

    arrays: FstArrays | None
    complete: bool
    active: float

    @property
    def data(self) -> bytes:
        """The lattice as `lattice4` bytes, empty if no path survived."""
        return b"" if self.arrays is None else self.arrays.to_lattice_bytes()


def search(
    graph: SearchGraph, log_likelihoods_TP: np.ndarray, states: StateTable, options: SearchOptions
) -> SearchResult:
    """Decodes one utterance. A failed search is no error, see `SearchResult`.

    Raises:
        InputError: the graph has labels that `states` has not, or scores lack pdfs.
    """
    score_TP = np.ascontiguousarray(log_likelihoods_TP, dtype=np.float32)
    if len(score_TP) == 0:
        return SearchResult(None, False, 0.0)
    if graph.num_labels > len(states.labels_L3) or score_TP.shape[1] < states.num_pdfs:
        raise InputError("the graph, its states and the scores do not match; run stage 7 (decode) again")
    arcs = Arcs(
        graph.start, graph.first_S2, graph.arc_A4, graph.arc_A4.view(np.float32), graph.final_S,
        np.ascontiguousarray(states.pdf_L), score_TP, np.float32(options.acoustic_scale),
    )  # fmt: skip
    beams = Beams(
        np.float32(options.beam), np.float32(options.lattice_beam), options.max_active or graph.num_states,
        options.min_active, np.float32(options.beam_delta),
    )  # fmt: skip
    with signals_later():  # numba crashes if Ctrl-C is raised while it makes its result by Python code
        found = search_tokens(arcs, beams)
    arrays = _lattice(graph, found, score_TP, states) if found.num_tokens else None
    return SearchResult(arrays, bool(found.complete), float(found.active))


def _lattice(graph: SearchGraph, found: TokenLattice, score_TP: np.ndarray, states: StateTable) -> FstArrays:
    """Converts tokens to states and links to arcs."""
    link_N4, bounds_F4 = found.link_N4, found.bounds_F4
    arc_A4 = graph.arc_A4[link_N4[:, ARC]]
    label_A = arc_A4[:, LABEL]
    weight_A2 = np.zeros((len(arc_A4), 2), np.float32)
    weight_A2[:, 0] = arc_A4.view(np.float32)[:, WEIGHT]
    frame_A = np.repeat(np.arange(len(bounds_F4)), bounds_F4[:, EMITTING + 1] - bounds_F4[:, 0])
    emitting = np.flatnonzero(label_A)
    weight_A2[emitting, 1] = -score_TP[frame_A[emitting], states.pdf_L[label_A[emitting] - 1]]
    final_S2 = np.full((found.num_tokens, 2), np.inf, np.float32)
    last = np.stack([found.final, np.where(found.final < np.inf, np.float32(0), np.inf)], axis=1)
    final_S2[found.num_tokens - len(last) :] = last
    columns = link_N4[:, SOURCE], link_N4[:, END], label_A, arc_A4[:, WORD]
    return sort_states(FstArrays(0, *columns, weight_A2, final_S2))
