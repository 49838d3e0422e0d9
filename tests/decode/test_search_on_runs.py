"""The search beside kaldi_decoder's on graphs and scores of recipes that were run here. Skipped where none was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import kaldi_decoder
import kaldifst
import numpy as np
import pytest

from asr_am.decode.graph import read_fst
from asr_am.decode.lattice import Lattice, LmScale, best_paths, costs
from asr_am.decode.loading import load_graph, load_states
from asr_am.decode.search import SearchOptions, search
from asr_am.decode.system import System
from asr_am.features.reader import FeatureReader
from asr_am.hmm.fst_arrays import FstArrays, fst_bytes
from asr_am.hmm.states import StateTable

EXP = Path(__file__).parents[2] / "exp"
UTTERANCES = 2
WIDE, NARROW = SearchOptions(beam=13.0, lattice_beam=6.0, max_active=0, min_active=0), 10.0
ROUNDING = 0.05  # of float32 sums of thousands in kaldi_decoder


def kaldi_lattice(fst: kaldifst.StdVectorFst, scores_TP: np.ndarray, states: StateTable, how: SearchOptions) -> Lattice:
    """Returns the raw lattice of kaldi_decoder's LatticeSimpleDecoder, with unscaled acoustic costs."""
    scores_TL = np.ascontiguousarray(scores_TP[:, states.pdf_L], np.float32) * np.float32(how.acoustic_scale)
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=how.beam, lattice_beam=how.lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(fst, config)
    decoder.decode(kaldi_decoder.DecodableCtc(scores_TL))
    found, lattice = decoder.get_raw_lattice()
    assert found
    kaldifst.scale_lattice([[1.0, 0.0], [0.0, 1.0 / how.acoustic_scale]], lattice)
    return Lattice.from_arrays(FstArrays.from_lattice(fst_bytes(lattice))[0])


def best(lattice: Lattice, scale: LmScale) -> tuple[float, list[int]]:
    """Returns the cost and the words of the best path."""
    (path,) = best_paths(lattice, [scale])
    return float(costs(lattice, [scale])[path].sum()), lattice.word_A[path][lattice.word_A[path] > 0].tolist()


@pytest.mark.parametrize("corpus", ["an4", "minicts", "libri20"])
def test_lattices_are_those_of_kaldi_decoder(corpus: str) -> None:
    runs = sorted(run for run in (EXP / corpus / "decode").glob("*") if (run / "system.json").is_file())
    runs = [run for run in runs if System.load(run).model is None]
    if not runs:
        pytest.skip(f"{EXP / corpus}: no decoding run of a GMM; run recipes/{corpus}/run.sh")
    system = System.load(runs[0])
    scorer, states, fst = system.source("dev").load(), load_states(system.states), read_fst(system.graph)
    scale = LmScale(1 / WIDE.acoustic_scale)
    names = FeatureReader(system.features_dir, "mfcc", "dev").utterances
    for utterance in names[:UTTERANCES]:
        scores_TP = scorer.log_likelihoods(utterance)
        for how in (WIDE, replace(WIDE, beam=NARROW)):
            found = search(load_graph(system.graph), scores_TP, states, how)
            assert found.arrays is not None
            mine, other = Lattice.from_arrays(found.arrays), kaldi_lattice(fst, scores_TP, states, how)
            assert best(mine, scale) == (pytest.approx(best(other, scale)[0], abs=ROUNDING), best(other, scale)[1])
            # What a lattice has near its beam depends on the order in which tokens are expanded.
            assert how is not WIDE or abs(len(mine.source_A) - len(other.source_A)) <= 0.1 * len(other.source_A)
