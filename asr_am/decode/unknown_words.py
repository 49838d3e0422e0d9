"""A pronunciation model of the words that the lexicon lacks, for decoding graphs.

Without one, a word outside the lexicon is recognised as two or three others. Here `<unk>` is any sequence of phones,
with the probabilities of a phone n-gram LM that is estimated on the lexicon. Kaldi's make_unk_lm.sh does the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import kaldifst
import numpy as np

from asr_am.hmm.fst_arrays import FstArrays
from asr_am.lang.arpa import write_arpa
from asr_am.lang.fst_file import read_fst
from asr_am.lang.fsts import make_grammar, restrict
from asr_am.lang.lang_dir import Lang, write_symbols
from asr_am.lang.lexicon import BEGIN, END, INTERNAL, SINGLETON, UNKNOWN, strip_position
from asr_am.lang.ngram import estimate
from asr_am.lang.prune import prune

ORDER, NGRAMS = 3, 2000  # of the phone LM


def has_unknown_words(grammar: kaldifst.StdVectorFst, lang: Lang) -> bool:
    """Returns True if G has the unknown word."""
    return bool((FstArrays.from_fst(grammar).olabel_A == lang.unk).any())


def add_unknown_words(lexicon: kaldifst.StdVectorFst, lang: Lang) -> tuple[kaldifst.StdVectorFst, list[int]]:
    """Returns L_disambig with the phone LM in place of the pronunciation of `<unk>`, and new disambiguation symbols.

    The new symbols are phone ids that phones.txt lacks. One begins the unknown word, so that it shares no path with
    other words when the graph is determinized, one ends it, and one is on the backoff arcs of the phone LM.
    """
    begin, end, backoff = (max(lang.phones.values()) + number for number in (1, 2, 3))
    arrays, phones = FstArrays.from_fst(lexicon), _phone_lm(lang, backoff)
    first = arrays.num_states  # of the states of the phone LM
    is_unk_A = arrays.olabel_A == lang.unk
    kept_A4 = np.stack([arrays.source_A, arrays.target_A, arrays.ilabel_A, arrays.olabel_A], axis=1)[~is_unk_A]
    inner_A4 = np.stack([phones.source_A, phones.target_A, phones.ilabel_A, np.zeros_like(phones.ilabel_A)], axis=1)
    inner_A4[:, :2] += first
    # Each arc of <unk> becomes one into the phone LM and one out of it, whose weights add up to the arc's.
    arcs_A = (arrays.source_A[is_unk_A], arrays.target_A[is_unk_A], arrays.weight_A[is_unk_A])
    weight = {(source, target): cost for source, target, cost in zip(*(a.tolist() for a in arcs_A), strict=True)}
    (source, target), finals = next(iter(weight)), np.flatnonzero(np.isfinite(phones.final_S))
    ways = [((s, first + phones.start, begin, lang.unk), weight[s, target]) for s in sorted({s for s, _ in weight})]
    ways += [
        ((first + final, t, end, 0), phones.final_S[final] + weight[source, t] - weight[source, target])
        for t in sorted({t for _, t in weight})
        for final in finals.tolist()
    ]
    rows_A4 = np.concatenate([kept_A4, inner_A4, np.array([row for row, _ in ways])])
    weight_A = np.concatenate([arrays.weight_A[~is_unk_A], phones.weight_A, [cost for _, cost in ways]])
    final_S = np.concatenate([arrays.final_S, np.full(phones.num_states, np.inf)])
    return FstArrays.build(arrays.start, rows_A4, weight_A, final_S).to_fst(), [begin, end, backoff]


def _phone_lm(lang: Lang, backoff: int) -> FstArrays:
    """Returns the phone LM over phone ids, with at least one phone. `backoff` is the label of backoff arcs."""
    silence, marked = set(lang.silence_phones), lang.position_dependent
    spoken = [
        [strip_position(name) if marked else name for name in map(lang.phone_names.__getitem__, pronunciation)]
        for word, pronunciations in lang.pronunciations.items()
        for pronunciation in pronunciations
        if word != UNKNOWN and silence.isdisjoint(pronunciation)
    ]
    names = sorted({name for pronunciation in spoken for name in pronunciation})
    symbols = {name: number for number, name in enumerate(["<eps>", *names, "#0", "<s>", "</s>"])}
    model, _ = restrict(prune(estimate(spoken, names, ORDER), NGRAMS), symbols, "the phone LM")  # without <unk>
    with tempfile.TemporaryDirectory() as folder:
        arpa, table, grammar = (Path(folder) / name for name in ("lm.arpa", "phones.txt", "G.fst"))
        write_arpa(model, arpa)
        write_symbols(table, symbols)
        make_grammar(arpa, table, grammar)
        lm = read_fst(grammar)
    first, inner, last = (BEGIN, INTERNAL, END) if marked else ("", "", "")
    marks = [(0, 1, first), (1, 1, inner), (1, 2, last), (0, 2, SINGLETON if marked else "")]
    rows = [
        (source, target, lang.phones[name + mark], symbols[name])
        for name in names
        for source, target, mark in marks
        if name + mark in lang.phones  # Kaldi's phones.txt may lack some
    ]
    rows += [(state, state, backoff, symbols["#0"]) for state in range(3)]
    positions = FstArrays.build(0, np.array(rows), np.zeros(len(rows)), np.array([np.inf, np.inf, 0.0])).to_fst()
    kaldifst.arcsort(positions, sort_type="olabel")
    kaldifst.arcsort(lm, sort_type="ilabel")
    return FstArrays.from_fst(kaldifst.compose(positions, lm))
