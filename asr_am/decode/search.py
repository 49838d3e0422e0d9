"""Lattice-generating search of one utterance.

kaldi_decoder's LatticeSimpleDecoder prunes by beam only. It has no limit on active tokens, so `beam` bounds time and
memory.

Shapes: L graph labels, P pdfs, T frames.
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
    """Options of the search.

    Attributes:
        beam: decoding beam, in units of graph cost.
        lattice_beam: beam of the lattice, in units of graph cost.
        acoustic_scale: 1 / LM weight during the search.
    """

    beam: float = 13.0
    lattice_beam: float = 6.0
    acoustic_scale: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"search: {name} is {value!r}; it must be a number above 0")


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        data: the lattice as `lattice4` bytes with unscaled acoustic costs, empty if no path survived.
        complete: whether a final state of the graph was reached. If not, the lattice ends in whatever states survived.
    """

    data: bytes
    complete: bool

    @property
    def arrays(self) -> FstArrays:
        return FstArrays.from_lattice(self.data)[0]


def search(
    graph: kaldifst.StdVectorFst, log_likelihoods_TP: np.ndarray, states: StateTable, options: SearchOptions
) -> SearchResult:
    """Decodes one utterance. A failed search is no error, see `SearchResult`.

    Args:
        graph: HCLG.
        log_likelihoods_TP: acoustic scores.
        states: graph labels and their pdfs.
        options: beams and acoustic scale.
    """
    if len(log_likelihoods_TP) == 0:
        return SearchResult(b"", False)
    scores_TL = np.ascontiguousarray(log_likelihoods_TP[:, states.pdf_L], dtype=np.float32)
    scores_TL *= np.float32(options.acoustic_scale)  # in place: the largest array of the search
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=options.beam, lattice_beam=options.lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph, config)
    # Its result is ignored: without a final state it is False, but there may be a lattice.
    decoder.decode(kaldi_decoder.DecodableCtc(scores_TL))
    complete = bool(np.isfinite(decoder.final_relative_cost()))
    found, lattice = decoder.get_raw_lattice()
    if not found or lattice.num_states == 0:
        return SearchResult(b"", False)
    kaldifst.scale_lattice([[1.0, 0.0], [0.0, 1.0 / options.acoustic_scale]], lattice)
    return SearchResult(fst_bytes(lattice), complete)
