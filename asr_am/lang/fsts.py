"""L: the transducer from phones to words, with optional silence before the first word and after every word.

G: the acceptor of a back-off n-gram model over the words of the lexicon."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa, Ngram
from asr_am.lang.lang_dir import vocabulary
from asr_am.lang.lexicon import UNKNOWN, Pronunciation

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


log = logging.getLogger(__name__)


def restrict(arpa: Arpa, words: dict[str, int], source: str) -> tuple[Arpa, list[str]]:
    """The model without the n-grams that hold a word outside `words` or `<unk>`, and those words outside, sorted.

    `<unk>` goes too: a recognizer that puts it out is wrong each time. The probabilities that are left are not
    renormalized. InputError where so little is left that the model cannot belong to the lexicon.
    """
    spoken = {*vocabulary(words), "<s>", "</s>"}
    kept = {word for (word,) in arpa.logprobs[0] if word in spoken and word.lower() != UNKNOWN}
    dropped = sorted(word for (word,) in arpa.logprobs[0] if word not in kept and word.lower() != UNKNOWN)
    if len(kept) <= 2 or len(dropped) > 0.5 * len(arpa.logprobs[0]):
        raise InputError(
            f"{source}: {len(dropped)} of its {len(arpa.logprobs[0])} words are not in the lexicon, such as "
            f"{' '.join(dropped[:5])}{_case_hint(dropped, words)}; is it a model for this lexicon?"
        )
    logprobs: list[dict[Ngram, float]] = []
    orphans = 0
    for n, ngrams in enumerate(arpa.logprobs):
        left = {ngram: p for ngram, p in ngrams.items() if kept.issuperset(ngram)}
        # Without its own history a longer n-gram has no state to leave from, and no back-off weight leads to it.
        reachable = left if n == 0 else {ngram: p for ngram, p in left.items() if ngram[:-1] in logprobs[-1]}
        orphans += len(left) - len(reachable)
        logprobs.append(reachable)
    if orphans:
        log.warning("%s: dropped %d n-grams whose histories the model lacks", source, orphans)
    backoffs = {ngram: b for ngram, b in arpa.backoffs.items() if ngram in logprobs[len(ngram) - 1]}
    return Arpa(logprobs, backoffs), dropped


def _case_hint(dropped: list[str], words: Mapping[str, int]) -> str:
    other_case = [word for word in dropped if word.upper() in words or word.lower() in words]
    return f" ({len(other_case)} of them are, in the other case: convert the model)" if other_case else ""


def make_grammar(arpa_path: Path, words_path: Path, out: Path) -> None:
    """Compile a checked ARPA file to G with `#0` on its back-off arcs and no `<s>` or `</s>` (Kaldi's arpa2fst)."""
    import kaldilm

    with _silence_stderr():
        kaldilm.arpa2fst(
            input_arpa=str(arpa_path), output_fst=str(out), disambig_symbol="#0", read_symbol_table=str(words_path)
        )


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Send the C++ side's stderr to nowhere: kaldilm reports each section it reads. Its errors are exceptions."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
