"""Alignment graphs compared with an enumeration of all paths of a transcript."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_am.errors import InputError
from asr_am.hmm.states import Tree
from asr_am.hmm.training_graph import read_lexicon_fst, training_graph
from tests.support.hmm_reference import (
    LeftTree,
    MonoTree,
    RightTree,
    paths_of,
    sentences_said,
    small_lang,
    small_states,
)

FRAMES = 8


@pytest.mark.parametrize("tree", [MonoTree(), LeftTree(), RightTree()])
@pytest.mark.parametrize("text", ["A", "B A", "AB B", ""])
def test_graph_has_exactly_the_paths_of_the_transcript(tmp_path: Path, tree: Tree, text: str) -> None:
    lang = small_lang(tmp_path)
    states = small_states(lang, tree)
    words = tuple(lang.word_ids(text))
    lexicon = read_lexicon_fst(lang.directory / "L.fst")
    graph = training_graph(words, lexicon, states, tree, self_loop_scale=0.3)
    expected = sentences_said({words: 0.0}, lang, states, tree, FRAMES, scale=0.3)
    assert len(expected) >= 1
    assert paths_of(graph, FRAMES) == pytest.approx(expected, abs=1e-3)


def test_a_word_missing_from_the_lexicon_is_rejected(tmp_path: Path) -> None:
    lang = small_lang(tmp_path)
    lexicon = read_lexicon_fst(lang.directory / "L.fst")
    states = small_states(lang, MonoTree())
    with pytest.raises(InputError, match="no path"):
        training_graph([lang.words["#0"]], lexicon, states, MonoTree())


@pytest.mark.parametrize("contents", [None, b"", b"not an FST"])
def test_a_missing_or_damaged_lexicon_fst_is_named(tmp_path: Path, contents: bytes | None) -> None:
    if contents is not None:
        (tmp_path / "L.fst").write_bytes(contents)
    with pytest.raises(InputError, match=r"L\.fst: (no such file|not a readable FST); (remove it and )?run stage 1"):
        read_lexicon_fst(tmp_path / "L.fst")
