"""Synthetic acoustic scores: log-likelihoods around a known alignment of known words.

Shapes: T frames, P pdfs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import kaldifst
import numpy as np

from asr_am.decode.graph import build_hclg, read_fst
from asr_am.decode.search_graph import SearchGraph
from asr_am.hmm.fst_arrays import fst_bytes
from asr_am.hmm.states import StateTable, Tree
from asr_am.lang.arpa import read_arpa
from asr_am.lang.fsts import make_grammar
from asr_am.lang.lang_dir import Lang

BIGRAM = """\\data\\
ngram 1=6
ngram 2=5

\\1-grams:
-99 <s> -0.2
-0.7 </s>
-0.6 A -0.3
-0.7 AB -0.1
-0.8 B -0.2
-0.9 B2

\\2-grams:
-0.3 <s> A
-0.4 A B
-0.5 AB A
-0.2 B </s>
-0.3 B B2

\\end\\
"""


def small_lm(lang: Lang, folder: Path) -> Path:
    """Writes an LM directory with a bigram over the words of `small_lang`."""
    folder.mkdir()
    (folder / "lm.arpa").write_text(BIGRAM)
    read_arpa(folder / "lm.arpa")
    make_grammar(folder / "lm.arpa", lang.directory / "words.txt", folder / "G.fst")
    return folder


def small_graph(lang: Lang, states: StateTable, tree: Tree, folder: Path, scale: float = 0.1) -> kaldifst.StdVectorFst:
    """Builds the HCLG of `small_lm` in `folder` and returns it."""
    (folder / "graph").mkdir()
    build_hclg(lang.directory, small_lm(lang, folder / "lm"), states, tree, folder / "graph", self_loop_scale=scale)
    return read_fst(folder / "graph" / "HCLG.fst")


def search_graph(fst: kaldifst.StdVectorFst) -> SearchGraph:
    """Converts a graph for the search."""
    return SearchGraph.from_bytes(np.frombuffer(fst_bytes(fst), np.uint8))


def alignment(
    phones: Sequence[int], states: StateTable, tree: Tree, rng: np.random.Generator, longest: int = 4
) -> list[tuple[int, int]]:
    """Returns (graph label, index of its phone) of every frame. Each state lasts 1 to `longest` frames."""
    padded = (0, *phones, 0)
    frames = []
    for i, phone in enumerate(phones):
        window = (phone,) if tree.width == 1 else padded[i : i + 3]
        for s in range(states.states_P[phone]):
            label = states.label(phone, s, tree.pdf(tuple(window), s))
            frames += [(label, i)] * int(rng.integers(1, longest + 1))
    return frames


def log_likelihoods(
    labels: Sequence[int], states: StateTable, rng: np.random.Generator, clarity: float, noise: float = 1.0
) -> np.ndarray:
    """Returns float32 [T, P]: noise, with the alignment's pdf better by `clarity` in every frame."""
    scores_TP = rng.normal(0.0, noise, (len(labels), states.num_pdfs))
    scores_TP[np.arange(len(labels)), states.pdf_L[np.array(labels) - 1]] += clarity
    return scores_TP.astype(np.float32)


def first_pronunciations(words: Sequence[int], lang: Lang) -> list[int]:
    """Returns the phones of words, each by its first pronunciation, without silence."""
    return list(itertools.chain(*(lang.pronunciations[lang.word_names[word]][0] for word in words)))
