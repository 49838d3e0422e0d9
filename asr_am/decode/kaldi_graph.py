"""A decoding graph of Kaldi (`exp/tri4/graph`: HCLG.fst, words.txt) as one of ours."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import kaldifst
import numpy as np

from asr_am.errors import InputError
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.hmm.kaldi_model import read_model
from asr_am.lang.fst_file import read_fst, write_fst
from asr_am.lang.lang_dir import Lang, read_symbols

REMEDY = "give the directory that utils/mkgraph.sh wrote, for the final.mdl of align.dir"


def import_graph(source: Path, model: Path, lang_dir: Path, out: Path) -> None:
    """Writes HCLG.fst with graph labels for transition-ids, and graph.json.

    Lattices are not rescored, because the graph's LM is not known here.

    Args:
        model: final.mdl that the graph was made with.
        lang_dir: the lang directory that stage lang has made from Kaldi's.

    Raises:
        InputError: a file is missing or damaged, or they do not belong together.
    """
    transitions, _ = read_model(model)
    lang = Lang.load(lang_dir)
    words = read_symbols(source / "words.txt", REMEDY)
    if {number for _, number in words.items() ^ lang.words.items()} - {lang.unk}:  # whose name may differ
        raise InputError(f"{source / 'words.txt'}: other words than those of align.lang; {REMEDY}")
    graph = FstArrays.from_fst(_read(source / "HCLG.fst"))
    if graph.num_states == 0 or graph.ilabel_A.max(initial=0) > len(transitions.label_K):
        raise InputError(f"{source / 'HCLG.fst'}: empty, or with transition-ids that {model} lacks; {REMEDY}")
    labels_A = np.where(graph.ilabel_A > 0, transitions.label_K[graph.ilabel_A - 1], 0)
    write_fst(graph.relabel(labels_A).to_fst(), out / "HCLG.fst")
    sizes = {"HCLG": {"states": graph.num_states, "arcs": len(graph.source_A)}}
    digest = hashlib.sha256((out / "HCLG.fst").read_bytes()).hexdigest()
    description = {"sizes": sizes, "num_pdfs": transitions.state_table().num_pdfs, "sha256": digest}
    (out / "graph.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> kaldifst.StdVectorFst:
    """Reads a vector or const FST."""
    try:
        with path.open("rb") as file:
            is_const = b"const" in file.read(16)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from error
    if not is_const:
        return read_fst(path, REMEDY)
    if (fst := kaldifst.StdConstFst.read(str(path))) is None:
        raise InputError(f"{path}: damaged; {REMEDY}")
    return kaldifst.StdVectorFst(fst)
