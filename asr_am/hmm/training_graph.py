"""Alignment graphs: all pronunciations of a known transcript, as graph labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kaldifst
import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable, Tree
from asr_am.hmm.transducer import add_self_loops, expand_phones
from asr_am.lang.fst_file import read_fst


def training_graph(
    words: Sequence[int],
    lexicon: kaldifst.StdVectorFst,
    states: StateTable,
    tree: Tree,
    *,
    self_loop_scale: float = 0.1,
) -> kaldifst.StdVectorFst:
    """Builds the alignment graph of one transcript, for `kaldi_decoder.FasterDecoder`.

    Args:
        lexicon: L.fst (phones to words, optional silence, no disambiguation symbols), from `read_lexicon_fst`.

    Returns:
        A graph with graph labels as input and words as output labels, containing all pronunciations.

    Raises:
        InputError: L has no path for the words.
    """
    count = len(words)
    line = np.array([[i, i + 1, word, word] for i, word in enumerate(words)], dtype=np.int32).reshape(-1, 4)
    final_S = np.full(count + 1, np.inf, dtype=np.float32)
    final_S[count] = 0.0
    phones = kaldifst.compose(lexicon, FstArrays.build(0, line, np.zeros(count), final_S).to_fst())
    if phones.num_states == 0:
        raise InputError(f"word ids {list(words)}: the lexicon FST has no path for them; run stage 1 (lang) again")
    return add_self_loops(expand_phones(phones, [], states, tree), states, self_loop_scale=self_loop_scale)


def read_lexicon_fst(path: Path) -> kaldifst.StdVectorFst:
    """Reads L.fst, sorted by output label. Raises InputError if it is missing or damaged."""
    lexicon = read_fst(path, "run stage 1 (lang) again")
    kaldifst.arcsort(lexicon, sort_type="olabel")
    return lexicon
