"""The decoding graph HCLG: graph labels in, words out.

    LG    = minimize(determinize(L o G))
    CLG   = LG over windows of phones, windows with the same HMM merged
    HCLG  = self-loops(minimize(remove disambiguation(determinize(H o CLG))))

G has the LM probabilities, L those of silence and pronunciations. The self-loops, added last, have the transition
probabilities times `self_loop_scale`. The graph cost of a lattice arc is the sum of all three. The LM weight multiplies
that sum, as Kaldi's LMWT does: with self_loop_scale 0.1 and an LM weight near 10, transitions count about once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path

import kaldifst
import numpy as np

from asr_am.decode.search_graph import SearchGraph
from asr_am.decode.unknown_words import add_unknown_words, has_unknown_words
from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable, Tree
from asr_am.hmm.transducer import add_self_loops, expand_phones, remove_input_labels
from asr_am.lang.fst_file import read_fst, write_fst
from asr_am.lang.lang_dir import Lang

log = logging.getLogger(__name__)

REMEDY = "run stage 7 (decode) again"
REMEDY_LANG = "run stage 1 (lang) again"
LARGE = 20_000_000  # arcs from which a warning about memory is logged
BYTES_PER_ARC = 22  # in decoding, for all processes together (building the graph takes some 600)


def build_hclg(
    lang_dir: Path, lm_dir: Path, states: StateTable, tree: Tree, out: Path, *, self_loop_scale: float = 0.1
) -> None:
    """Writes HCLG.fst (an OpenFst vector FST that Kaldi reads) and graph.json (sizes, seconds, checksum, folder of G).

    Args:
        lang_dir: folder of stage lang with L_disambig.fst, phones.txt, words.txt.
        lm_dir: folder of stage lang with G.fst.
        out: an existing folder.

    Raises:
        InputError: an FST is missing or damaged, or no sentence of the LM has words of the lexicon only.
    """
    started = time.perf_counter()
    lang = Lang.load(lang_dir)
    sizes: dict[str, dict[str, int]] = {}
    lexicon = read_fst(lang_dir / "L_disambig.fst", REMEDY_LANG)
    grammar, disambig = read_fst(lm_dir / "G.fst", REMEDY_LANG), lang.disambig
    if has_unknown_words(grammar, lang):
        lexicon, further = add_unknown_words(lexicon, lang)
        disambig = [*disambig, *further]
    lg = compose_lg(lexicon, grammar)
    if lg.num_states == 0:
        raise InputError(f"{lm_dir / 'G.fst'}: has no sentence of words in {lang_dir}; {REMEDY_LANG}")
    sizes["LG"] = _size(lg)
    hclg = expand(lg, disambig, states, tree)
    sizes["HCLG without loops"] = _size(hclg)
    hclg = add_self_loops(hclg, states, self_loop_scale=self_loop_scale)
    sizes["HCLG"] = _size(hclg)
    write_fst(hclg, out / "HCLG.fst")
    seconds = round(time.perf_counter() - started, 2)
    description: dict[str, object] = {
        "sizes": sizes,
        "self_loop_scale": self_loop_scale,
        "num_pdfs": states.num_pdfs,
        "seconds": seconds,
    }
    description |= {"sha256": _digest(out / "HCLG.fst"), "lm": os.path.relpath(lm_dir, out)}
    (out / "graph.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    log.info("graph: HCLG of %(states)d states, %(arcs)d arcs", sizes["HCLG"])
    if (arcs := sizes["HCLG"]["arcs"]) > LARGE:
        gigabytes = arcs * BYTES_PER_ARC / 1e9
        advice = "corpus.lms.<name>.max_ngrams prunes its LM"
        log.warning("graph: decoding holds it in about %.1f GB; %s", gigabytes, advice)


def compose_lg(lexicon: kaldifst.StdVectorFst, grammar: kaldifst.StdVectorFst) -> kaldifst.StdVectorFst:
    """Composes L_disambig with G. Determinizes in the log semiring, which keeps it stochastic, and minimizes."""
    kaldifst.arcsort(lexicon, sort_type="olabel")
    lg = kaldifst.compose(lexicon, grammar)
    kaldifst.determinize_star(lg, use_log=True)
    kaldifst.minimize_encoded(lg)
    return lg


def expand(lg: kaldifst.StdVectorFst, disambig: list[int], states: StateTable, tree: Tree) -> kaldifst.StdVectorFst:
    """Expands LG to the minimal graph of graph labels, without self-loops.

    Args:
        lg: transducer from phones and disambiguation symbols to words.
        disambig: phone ids of the disambiguation symbols.
    """
    hclg = expand_phones(lg, disambig, states, tree)
    kaldifst.determinize_star(hclg, use_log=True)
    hclg = remove_input_labels(hclg, above=len(states.labels_L3))
    kaldifst.minimize_encoded(hclg)
    return hclg


def read_hclg(path: Path) -> SearchGraph:
    """Reads a graph that `build_hclg` wrote. Raises InputError if it is missing, or its checksum is wrong."""
    digest = _description(path).get("sha256")
    if not path.is_file():
        raise InputError(f"{path}: no such file; run the stage that makes it again")
    if digest != _digest(path):
        raise InputError(f"{path}: damaged, its checksum is not that in graph.json; remove it and {REMEDY}")
    try:
        return SearchGraph.from_bytes(np.asarray(np.memmap(path, np.uint8, "r")))
    except ValueError as error:
        raise InputError(f"{path}: not a readable graph ({error}); {REMEDY}") from error


def lm_of(path: Path) -> Path | None:
    """Returns the folder of the LM that the graph `path` was made from, None for a graph of Kaldi."""
    lm = _description(path).get("lm")
    return None if lm is None else Path(os.path.normpath(path.parent / str(lm)))


def _description(path: Path) -> dict[str, object]:
    record = path.with_name("graph.json")
    try:
        return dict(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{record}: missing or damaged ({error}); {REMEDY}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(fst: kaldifst.StdVectorFst) -> dict[str, int]:
    arrays = FstArrays.from_fst(fst)
    return {"states": arrays.num_states, "arcs": len(arrays.source_A)}
