"""G: the acceptor of a back-off n-gram model over the words of the lexicon."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa, Ngram
from asr_am.lang.lang import vocabulary
from asr_am.lang.lexicon import UNKNOWN

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

    with _quiet():
        kaldilm.arpa2fst(
            input_arpa=str(arpa_path), output_fst=str(out), disambig_symbol="#0", read_symbol_table=str(words_path)
        )


@contextmanager
def _quiet() -> Iterator[None]:
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
