"""Any speech phones can be the unknown word of a decoding graph, at the price that the phone LM gives them."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import kaldifst
import numpy as np
import pytest
from lhotse import SupervisionSegment, SupervisionSet

from asr_am.decode.graph import compose_lg
from asr_am.decode.unknown_words import ORDER, add_unknown_words, has_unknown_words
from asr_am.hmm.fst_arrays import FstArrays
from asr_am.lang.arpa import read_arpa
from asr_am.lang.fst_file import read_fst
from asr_am.lang.lang_dir import Lang
from asr_am.lang.lexicon import UNKNOWN
from asr_am.lang.lexicon_probs import SENTENCE_END, SENTENCE_START
from asr_am.lang.ngram import estimate
from asr_am.lang.prepare import add_probs, prepare_lang, prepare_lm

LEXICON = {"A": ["AH"], "AB": ["AH B"], "RED": ["R EH D"], "READ": ["R EH D", "R IY D"], "DEAR": ["D IY R"]}
PROBABILITY = 0.02


class Graph:
    """L composed with a unigram LM that has the unknown word."""

    def __init__(self, folder: Path, positions: bool, silence_probs: bool) -> None:
        data, lang_dir, lm_dir = folder / "data", folder / "lang", folder / "lm"
        for path in (data / "lm", data / "dev", lang_dir, lm_dir):
            path.mkdir(parents=True)
        lines = [f"{word} {phones}\n" for word, variants in LEXICON.items() for phones in variants]
        (data / "lexicon.txt").write_text("".join(lines))
        (data / "nonspeech.txt").write_text("[COUGH] SPN\n")  # so that <unk> has a disambiguation symbol
        (data / "lm/train.txt").write_text("A RED\nAB READ DEAR A\n" * 3)
        SupervisionSet.from_segments([SupervisionSegment("s-1", "r", 0.0, 1.0, text="A RED")]).to_file(
            data / "dev/supervisions.jsonl.gz"
        )
        prepare_lang(data, lang_dir, position_dependent=positions, silence_prob=0.25)
        if silence_probs:
            (folder / "probs").mkdir()
            spoken = Lang.load(lang_dir).pronunciations
            first = ("A", tuple(Lang.load(lang_dir).phone_names[phone] for phone in spoken["A"][0]))
            counts = Counter({(SENTENCE_START, True, first): 2, (first, False, SENTENCE_END): 2})
            add_probs(data, lang_dir, counts, folder / "probs")
            lang_dir = folder / "probs"
        self.lang, self.lm_dir = Lang.load(lang_dir), lm_dir
        prepare_lm(data, lang_dir, lm_dir, name="kn1", order=1, arpa=None, text="train", unknown=PROBABILITY)
        self.lexicon, self.further = add_unknown_words(read_fst(lang_dir / "L_disambig.fst"), self.lang)
        self.grammar = read_fst(lm_dir / "G.fst")
        lg = FstArrays.from_fst(compose_lg(self.lexicon, self.grammar))
        symbols = [*self.lang.disambig, *self.further]
        self.fst = lg.relabel(np.where(np.isin(lg.ilabel_A, symbols), 0, lg.ilabel_A)).to_fst()

    def words(self, phones: str) -> dict[str, float]:
        """Returns the cost of each single word that these phones can be."""
        names = phones.split()
        if self.lang.position_dependent:
            marks = ["B", *["I"] * (len(names) - 2), "E"] if len(names) > 1 else ["S"]
            names = [f"{name}_{mark}" for name, mark in zip(names, marks, strict=True)]
        said = kaldifst.make_linear_acceptor([self.lang.phones[name] for name in names])
        found: dict[str, float] = {}
        paths = kaldifst.compose(said, self.fst)
        stack = [(paths.start, (), 0.0)] if paths.num_states else []
        while stack:
            state, words, cost = stack.pop()
            if math.isfinite(final := paths.final(state).value) and len(words) == 1:
                word = self.lang.word_names[words[0]]
                found[word] = min(found.get(word, math.inf), cost + final)
            for arc in kaldifst.ArcIterator(paths, state):
                more = (*words, arc.olabel) if arc.olabel else words
                stack.append((arc.nextstate, more, cost + arc.weight.value))
        return found


@pytest.mark.parametrize("silence_probs", [False, True], ids=["one silence_prob", "silence probabilities"])
@pytest.mark.parametrize("positions", [True, False], ids=["marked", "unmarked"])
def test_phones_of_no_word_are_the_unknown_word(tmp_path: Path, positions: bool, silence_probs: bool) -> None:
    graph = Graph(tmp_path, positions, silence_probs)
    assert has_unknown_words(graph.grammar, graph.lang)
    assert set(graph.words("R EH D")) == {"RED", "READ", UNKNOWN}
    assert set(graph.words("D EH R")) == set(graph.words("EH B IY R")) == {UNKNOWN}
    assert set(graph.words("AH")) == {"A", UNKNOWN}


def test_the_cost_is_that_of_the_phone_lm(tmp_path: Path) -> None:
    """Beside that of a word whose LM probability and silences are known."""
    graph = Graph(tmp_path, positions=True, silence_probs=False)
    variants = [phones.split() for word in LEXICON for phones in LEXICON[word]]
    phone_lm = estimate(variants, {phone for phones in variants for phone in phones}, ORDER)
    word_lm = read_arpa(graph.lm_dir / "lm.arpa")
    found = graph.words("R EH D")
    history, logprob = ["<s>"], word_lm.logprob([], UNKNOWN)
    for phone in ("R", "EH", "D", "</s>"):
        logprob += phone_lm.logprob(history, phone)
        history.append(phone)
    difference = math.log(10) * (word_lm.logprob([], "RED") - logprob)
    assert found[UNKNOWN] - found["RED"] == pytest.approx(difference, abs=0.01)
    assert word_lm.logprob([], UNKNOWN) == pytest.approx(math.log10(PROBABILITY))
