"""The decoding graph has exactly the sentences of the LM with all their pronunciations and durations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asr_am.decode.graph import build_hclg, read_fst, read_hclg
from asr_am.errors import InputError
from asr_am.hmm.states import Tree
from tests.support.hmm_reference import (
    LeftTree,
    MonoTree,
    RightTree,
    add,
    paths_of,
    sentences_said,
    small_lang,
    small_states,
)
from tests.support.synthetic_lattices import small_graph, small_lm

FRAMES = 5  # at most two words of two states
TOLERANCE = 0.02  # minimization rounds each arc to 1/1024


@pytest.mark.parametrize("tree", [MonoTree(), LeftTree(), RightTree()])
def test_every_path_and_its_score(tmp_path: Path, tree: Tree) -> None:
    lang = small_lang(tmp_path)
    states = small_states(lang, tree)
    graph = small_graph(lang, states, tree, tmp_path, scale=0.3)
    backoff = lang.words["#0"]
    sentences: dict = {}
    for (words, _), cost in paths_of(read_fst(tmp_path / "lm" / "G.fst", "make it"), 6).items():
        spoken = tuple(word for word in words if word != backoff)
        add(sentences, (spoken, ()), cost)
    said = {spoken: cost for (spoken, _), cost in sentences.items() if len(spoken) <= 2}
    expected = sentences_said(said, lang, states, tree, FRAMES, scale=0.3)
    assert len(expected) > 100
    assert paths_of(graph, FRAMES) == pytest.approx(expected, abs=TOLERANCE)


def test_sizes_are_recorded(tmp_path: Path) -> None:
    lang = small_lang(tmp_path)
    graph = small_graph(lang, small_states(lang, MonoTree()), MonoTree(), tmp_path)
    sizes = json.loads((tmp_path / "graph" / "graph.json").read_text())["sizes"]
    assert sizes["HCLG"]["states"] == graph.num_states
    assert sizes["HCLG"]["arcs"] > sizes["HCLG without loops"]["arcs"] > 0


def test_one_wrong_bit_in_a_graph_is_seen(tmp_path: Path) -> None:
    """The damaged arc leads to a state that does not exist."""
    lang = small_lang(tmp_path)
    small_graph(lang, small_states(lang, MonoTree()), MonoTree(), tmp_path)
    path = tmp_path / "graph" / "HCLG.fst"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"HCLG\.fst: damaged, its checksum .*run stage 7"):
        read_hclg(path)
    path.unlink()
    with pytest.raises(InputError, match=r"HCLG\.fst: no such file"):
        read_hclg(path)


def test_damaged_or_missing_fsts_are_named(tmp_path: Path) -> None:
    lang = small_lang(tmp_path)
    lm = small_lm(lang, tmp_path / "lm")
    states = small_states(lang, MonoTree())
    (lm / "G.fst").write_bytes((lm / "G.fst").read_bytes()[:100])
    with pytest.raises(InputError, match=r"G\.fst"):
        build_hclg(lang.directory, lm, states, MonoTree(), tmp_path)
    (lm / "G.fst").unlink()
    with pytest.raises(InputError, match=r"G\.fst: no such file"):
        build_hclg(lang.directory, lm, states, MonoTree(), tmp_path)
