"""Transducers: L from phones to words, and G, the acceptor of a backoff n-gram model over the words of the lexicon.

L has optional silence before the first word and after every word.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa, Ngram
from asr_am.lang.fst_file import silence_stderr
from asr_am.lang.lang_dir import vocabulary
from asr_am.lang.lexicon import UNKNOWN, Pronunciation
from asr_am.lang.lexicon_probs import LexiconProbs

if TYPE_CHECKING:
    import kaldifst

log = logging.getLogger(__name__)

START, LOOP, BEFORE_SILENCE = 0, 1, 2  # words begin and end in LOOP, a silence is a detour over BEFORE_SILENCE
JOINED, AFTER_SILENCE = 1, 2  # with probabilities of silence: where words begin


def make_lexicon_fst(
    numbered: list[tuple[Pronunciation, int]],
    phones: Mapping[str, int],
    words: Mapping[str, int],
    *,
    silence: str,
    silence_prob: float,
    silence_disambig: str | None,
) -> kaldifst.StdVectorFst:
    """Builds L as Kaldi's make_lexicon_fst.py does, sorted by output label.

    Args:
        numbered: pronunciations with their probabilities, each with the number of its disambiguation symbol (0: none).
        silence_prob: probability of each optional silence, 0 <= p < 1.
        silence_disambig: symbol after each silence in L_disambig, which also gets a self-loop #0:#0 that passes G's
            backoff symbol. None for L.
    """
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
        state, output, own = LOOP, words[entry.word], 0.0 - math.log(entry.probability)
        for label in labels[:-1]:
            lines.append(f"{state} {free} {label} {output} {own}")
            state, output, own, free = free, 0, 0.0, free + 1
        lines += [f"{state} {end} {labels[-1]} {output} {cost + own}" for end, cost in arc_costs]
    if silence_disambig is not None:
        lines.append(f"{LOOP} {LOOP} {phones['#0']} {words['#0']}")
    lines.append(f"{LOOP}")
    return _compile(lines)


def make_silence_lexicon_fst(
    probs: LexiconProbs,
    numbers: Sequence[int],
    phones: Mapping[str, int],
    words: Mapping[str, int],
    *,
    silence: str,
    silence_disambig: str | None,
) -> kaldifst.StdVectorFst:
    """Builds L with a probability of silence after each pronunciation, as Kaldi's make_lexicon_fst_silprob.py does.

    Words begin in one of two states, after silence and without it. In L_disambig the symbol of silence marks places
    *without* it, so that the graph is determinized without a copy of the LM's state for every probability.

    Args:
        numbers: number of the disambiguation symbol of each pronunciation (0: none).
        silence_disambig: symbol for places without silence in L_disambig, which also gets self-loops #0:#0. None for L.
    """
    no_silence = 0 if silence_disambig is None else phones[silence_disambig]
    free = AFTER_SILENCE + 1
    lines = _leave(START, probs.start, no_silence, phones[silence])
    for entry, near, number in zip(probs.entries, probs.silence, numbers, strict=True):
        labels = [phones[phone] for phone in entry.phones]
        if number:
            labels.append(phones[f"#{number}"])
        for start, factor in ((JOINED, near.joined), (AFTER_SILENCE, near.before)):
            cost = 0.0 - math.log(entry.probability) - math.log(factor)
            lines.append(f"{start} {free} {labels[0]} {words[entry.word]} {cost}")
        for label in labels[1:]:
            lines.append(f"{free} {free + 1} {label} 0")
            free += 1
        lines += _leave(free, near.after, no_silence, phones[silence])
        free += 1
    for state, factor in ((JOINED, probs.end.joined), (AFTER_SILENCE, probs.end.before)):
        if silence_disambig is not None:
            lines.append(f"{state} {state} {phones['#0']} {words['#0']}")
        lines.append(f"{state} {0.0 - math.log(factor)}")
    return _compile(lines)


def _leave(state: int, probability: float, no_silence: int, silence: int) -> list[str]:
    """Returns the arcs from the end of a word to both states in which words begin."""
    costs = -math.log(1 - probability), -math.log(probability)
    return [f"{state} {JOINED} {no_silence} 0 {costs[0]}", f"{state} {AFTER_SILENCE} {silence} 0 {costs[1]}"]


def _compile(lines: Sequence[str]) -> kaldifst.StdVectorFst:
    """Compiles a transducer in OpenFst's text format. Sorts it by output label."""
    import kaldifst

    fst = kaldifst.compile("\n".join(lines) + "\n", acceptor=False)
    kaldifst.arcsort(fst, sort_type="olabel")
    return fst


def restrict(arpa: Arpa, words: dict[str, int], source: str) -> tuple[Arpa, list[str]]:
    """Removes n-grams with `<unk>` or with a word outside `words`, without renormalizing.

    `<unk>` is removed because it stands for the words that another lexicon lacks. `with_unknown` adds it for this one.

    Args:
        source: name of the model for messages.

    Returns:
        The restricted model, and the sorted words outside the lexicon.

    Raises:
        InputError: so little is left that the model cannot be for this lexicon.
    """
    spoken = {*vocabulary(words), "<s>", "</s>"}
    kept = {word for (word,) in arpa.logprobs[0] if word in spoken and word.lower() != UNKNOWN}
    dropped = sorted(word for (word,) in arpa.logprobs[0] if word not in kept and word.lower() != UNKNOWN)
    if len(kept) <= 2 or len(dropped) > 0.5 * len(arpa.logprobs[0]):
        raise InputError(
            f"{source}: {len(dropped)} of its {len(arpa.logprobs[0])} words are not in the lexicon, such as "
            f"{' '.join(dropped[:5])}{_case_hint(dropped, words)}; give a model for this lexicon"
        )
    logprobs: list[dict[Ngram, float]] = []
    orphans = 0
    for n, ngrams in enumerate(arpa.logprobs):
        left = {ngram: p for ngram, p in ngrams.items() if kept.issuperset(ngram)}
        # An n-gram whose history is not in the model has no state to start from, and no backoff weight leads to it.
        reachable = left if n == 0 else {ngram: p for ngram, p in left.items() if ngram[:-1] in logprobs[-1]}
        orphans += len(left) - len(reachable)
        logprobs.append(reachable)
    if orphans:
        log.warning("%s: dropped %d n-grams whose histories the model lacks", source, orphans)
    backoffs = {ngram: b for ngram, b in arpa.backoffs.items() if ngram in logprobs[len(ngram) - 1]}
    return Arpa(logprobs, backoffs), dropped


def with_unknown(arpa: Arpa, probability: float) -> Arpa:
    """Returns the model with `<unk>` as a unigram, without renormalizing. Itself if its probability is 0."""
    if probability == 0:
        return arpa
    unigrams = arpa.logprobs[0] | {(UNKNOWN,): math.log10(probability)}
    return Arpa([unigrams, *arpa.logprobs[1:]], arpa.backoffs)


def _case_hint(dropped: list[str], words: Mapping[str, int]) -> str:
    other_case = [word for word in dropped if word.upper() in words or word.lower() in words]
    return f" ({len(other_case)} of them are, in the other case: convert the model)" if other_case else ""


def make_grammar(arpa_path: Path, words_path: Path, out: Path) -> None:
    """Compiles a checked ARPA file to G, with `#0` on backoff arcs and without `<s>` and `</s>` (Kaldi's arpa2fst)."""
    import kaldilm

    with silence_stderr():
        kaldilm.arpa2fst(
            input_arpa=str(arpa_path), output_fst=str(out), disambig_symbol="#0", read_symbol_table=str(words_path)
        )
