"""The decoding graph HCLG: graph labels in, words out.

    LG    = minimize(determinize(L o G))
    CLG   = windows of phones, those that are the same HMM merged
    HCLG  = self-loops(minimize(remove disambiguation(determinize(H o CLG))))

Where the probabilities are: G carries the LM, L silence and pronunciation probabilities, the self-loops added last the
transition probabilities times `self_loop_scale`. A lattice's graph cost is the sum of them all, and the LM weight
multiplies that sum (as Kaldi's LMWT); with the scale 0.1 and an LM weight near 10 transitions count about once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path

import kaldifst

from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.states import StateTable, Tree
from asr_am.hmm.transducer import add_self_loops, h_transducer, merge_windows, remove_input_labels
from asr_am.lang.lang_dir import Lang

log = logging.getLogger(__name__)

LARGE = 20_000_000  # arcs; beyond this memory may be short
BYTES_PER_ARC = 50  # in a process that decodes; building it takes some 400


def build_hclg(
    lang_dir: Path, lm_dir: Path, states: StateTable, tree: Tree, out: Path, *, self_loop_scale: float = 0.1
) -> None:
    """Write `out`/HCLG.fst (an OpenFst vector FST, readable by Kaldi) and `out`/graph.json (sizes, seconds, checksum).

    lang_dir, lm_dir: outputs of stage lang (L_disambig.fst, phones.txt, ...; G.fst). out: an existing directory.
    InputError: an FST is missing or damaged, or lexicon and LM share no sentence.
    """
    started = time.perf_counter()
    lang = Lang.load(lang_dir)
    sizes: dict[str, dict[str, int]] = {}
    lg = compose_lg(read_fst(lang_dir / "L_disambig.fst"), read_fst(lm_dir / "G.fst"))
    if lg.num_states == 0:
        raise InputError(f"{lm_dir / 'G.fst'}: no sentence of it can be said with {lang_dir}; run stage 1 (lang) again")
    sizes["LG"] = _size(lg)
    hclg = expand(lg, lang.disambig, states, tree)
    sizes["HCLG without loops"] = _size(hclg)
    hclg = add_self_loops(hclg, states, self_loop_scale=self_loop_scale)
    sizes["HCLG"] = _size(hclg)
    write_fst(hclg, out / "HCLG.fst")
    seconds = round(time.perf_counter() - started, 2)
    description = {"sizes": sizes, "self_loop_scale": self_loop_scale, "num_pdfs": states.num_pdfs, "seconds": seconds}
    description["sha256"] = _digest(out / "HCLG.fst")
    (out / "graph.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    log.info("graph: HCLG of %(states)d states, %(arcs)d arcs", sizes["HCLG"])
    if (arcs := sizes["HCLG"]["arcs"]) > LARGE:
        gigabytes = arcs * BYTES_PER_ARC / 1e9
        advice = "corpus.lms.<name>.max_ngrams prunes its LM"
        log.warning("graph: every decoding process holds it in about %.1f GB; %s", gigabytes, advice)


def compose_lg(lexicon: kaldifst.StdVectorFst, grammar: kaldifst.StdVectorFst) -> kaldifst.StdVectorFst:
    """L_disambig composed with G, determinized in the log semiring (which keeps it stochastic) and minimized."""
    kaldifst.arcsort(lexicon, sort_type="olabel")
    lg = kaldifst.compose(lexicon, grammar)
    kaldifst.determinize_star(lg, use_log=True)
    kaldifst.minimize_encoded(lg)
    return lg


def expand(lg: kaldifst.StdVectorFst, disambig: list[int], states: StateTable, tree: Tree) -> kaldifst.StdVectorFst:
    """LG over phones and the disambiguation symbols `disambig` to the minimal graph of graph labels, without loops."""
    num_labels = len(states.labels_L3)
    clg, windows = kaldifst.compose_context(disambig, tree.width, tree.width // 2, lg)
    merged_W, sequences = merge_windows(windows, states, tree)
    arrays = FstArrays.from_fst(clg)
    clg = arrays.relabel(merged_W[arrays.ilabel_A]).to_fst()
    kaldifst.arcsort(clg, sort_type="ilabel")
    h_fst, _ = h_transducer(sequences, num_labels)
    hclg = kaldifst.compose(h_fst, clg)
    kaldifst.determinize_star(hclg, use_log=True)
    hclg = remove_input_labels(hclg, above=num_labels)
    kaldifst.minimize_encoded(hclg)
    return hclg


def read_hclg(path: Path) -> kaldifst.StdVectorFst:
    """Read a graph as `build_hclg` left it. InputError where it is missing or damaged: OpenFst takes wrong bytes for
    arcs, which the search then follows to anywhere."""
    record = path.with_name("graph.json")
    try:
        digest = json.loads(record.read_text(encoding="utf-8")).get("sha256")  # older graphs have none
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{record}: missing or damaged ({error}); run stage 7 (decode) again") from error
    if path.is_file() and digest not in (None, _digest(path)):
        raise InputError(f"{path}: damaged, its checksum is not that in graph.json; run stage 7 (decode) again")
    return read_fst(path)


def read_fst(path: Path) -> kaldifst.StdVectorFst:
    """Read an OpenFst file; InputError where it is missing or damaged."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; run the stage that makes it again")
    fst = kaldifst.StdVectorFst.read(str(path))
    if fst is None:
        raise InputError(f"{path}: not a readable FST; run the stage that made it again")
    return fst


def write_fst(fst: kaldifst.StdVectorFst, path: Path) -> None:
    """Write an OpenFst file, complete or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    if not fst.write(str(temporary)):
        raise InputError(f"{path}: cannot be written (disk full?)")
    temporary.rename(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(fst: kaldifst.StdVectorFst) -> dict[str, int]:
    arrays = FstArrays.from_fst(fst)
    return {"states": arrays.num_states, "arcs": len(arrays.source_A)}
