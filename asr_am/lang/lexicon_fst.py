"""L: the transducer from phones to words, with optional silence before the first word and after every word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from asr_am.lang.lexicon import Pronunciation

if TYPE_CHECKING:
    import kaldifst

START, LOOP, BEFORE_SILENCE = 0, 1, 2  # a word begins and ends in LOOP; the way round BEFORE_SILENCE adds a silence


def make_lexicon_fst(
    numbered: list[tuple[Pronunciation, int]],
    phones: Mapping[str, int],
    words: Mapping[str, int],
    *,
    silence: str,
    silence_prob: float,
    silence_disambig: str | None,
) -> kaldifst.StdVectorFst:
    """The transducer of Kaldi's make_lexicon_fst.py, sorted by output label.

    numbered: pronunciations with the number of their disambiguation symbol (0: none).
    silence_prob: probability of a silence at each place where one may stand (0 <= p < 1).
    silence_disambig: the symbol after each silence, for L_disambig, which also gets the loop #0:#0 that lets the
    back-off symbol of G pass; None for L.
    """
    import kaldifst

    with_silence = silence_prob > 0
    arc_costs = [(LOOP, -math.log(1 - silence_prob))]
    lines = []
    if with_silence:
        arc_costs.append((BEFORE_SILENCE, -math.log(silence_prob)))
    lines += [f"{START} {end} 0 0 {cost}" for end, cost in arc_costs]
    free = BEFORE_SILENCE + 1
    if with_silence and silence_disambig is not None:
        lines.append(f"{BEFORE_SILENCE} {free} {phones[silence]} 0")
        lines.append(f"{free} {LOOP} {phones[silence_disambig]} 0")
        free += 1
    elif with_silence:
        lines.append(f"{BEFORE_SILENCE} {LOOP} {phones[silence]} 0")
    for entry, number in numbered:
        labels = [phones[phone] for phone in entry.phones]
        if number:
            labels.append(phones[f"#{number}"])
        state, output = LOOP, words[entry.word]
        for label in labels[:-1]:
            lines.append(f"{state} {free} {label} {output}")
            state, output, free = free, 0, free + 1
        lines += [f"{state} {end} {labels[-1]} {output} {cost}" for end, cost in arc_costs]
    if silence_disambig is not None:
        lines.append(f"{LOOP} {LOOP} {phones['#0']} {words['#0']}")
    lines.append(f"{LOOP}")
    fst = kaldifst.compile("\n".join(lines) + "\n", acceptor=False)
    kaldifst.arcsort(fst, sort_type="olabel")
    return fst
