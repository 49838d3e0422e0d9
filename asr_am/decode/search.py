"""Search: one utterance's log-likelihoods through a decoding graph into a raw lattice.

Shapes: L graph labels, P pdfs, T frames.

kaldi_decoder's LatticeSimpleDecoder prunes by beam alone: it has no limit on active tokens, so `beam` is what bounds
time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import kaldi_decoder
import kaldifst
import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays, fst_bytes
from asr_am.hmm.states import StateTable


@dataclass(frozen=True)
class SearchOptions:
    """beam, lattice_beam: in units of graph cost. acoustic_scale: 1 / LM weight at search time."""

    beam: float = 13.0
    lattice_beam: float = 6.0
    acoustic_scale: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"search: {name} is {value!r}; it must be a number above 0")


@dataclass(frozen=True)
class SearchResult:
    """data: the lattice as `lattice4` bytes with unscaled acoustic costs, empty if nothing survived.

    complete: a final state of the graph was reached; otherwise the lattice ends wherever the beam was.
    """

    data: bytes
    complete: bool

    @property
    def arrays(self) -> FstArrays:
        return FstArrays.from_lattice(self.data)[0]


def search(
    graph: kaldifst.StdVectorFst, log_likelihoods_TP: np.ndarray, states: StateTable, options: SearchOptions
) -> SearchResult:
    """Decode one utterance. Never raises for want of a path: see `SearchResult.complete` and `.data`."""
    if len(log_likelihoods_TP) == 0:
        return SearchResult(b"", False)
    scores_TL = np.ascontiguousarray(log_likelihoods_TP[:, states.pdf_L], dtype=np.float32)
    scores_TL *= np.float32(options.acoustic_scale)  # in place: the largest array of the search
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=options.beam, lattice_beam=options.lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph, config)
    decoder.decode(kaldi_decoder.DecodableCtc(scores_TL))  # False without a final state, though there is a lattice
    complete = bool(np.isfinite(decoder.final_relative_cost()))
    found, lattice = decoder.get_raw_lattice()
    if not found or lattice.num_states == 0:
        return SearchResult(b"", False)
    kaldifst.scale_lattice([[1.0, 0.0], [0.0, 1.0 / options.acoustic_scale]], lattice)
    return SearchResult(fst_bytes(lattice), complete)
