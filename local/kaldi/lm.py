"""Reads the text or ARPA file of the language model, in the spelling of the lexicon, and limits its vocabulary."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.textfile import numbered_lines
from asr_am.errors import InputError
from asr_am.lang.arpa import Arpa, Ngram, read_arpa
from asr_am.lang.lexicon import UNKNOWN
from local.kaldi.lexicon import UNKNOWNS
from local.kaldi.words import Normaliser, Spelling, clean, most_frequent

MAX_UNKNOWN = 0.5  # largest share of unknown words in a text
MAX_NGRAMS = 10_000_000  # of an ARPA file, limited by memory
SMALL_LEXICON = 20_000  # words of a lexicon that is kept whole: a graph of 1.4 M arcs
SYMBOLS = ("<s>", "</s>")


def read_text(path: Path, normalise: Normaliser, issues: IssueCounter) -> list[str]:
    """Returns the sentences of a text, one per line.

    Raises:
        InputError: there is no sentence, most words are unknown, or lines begin with utterance ids.
    """
    sentences, firsts, total = [], [], 0
    for number, line in numbered_lines(path, "--text takes a text, one sentence a line"):
        words = normalise(line, f"{path}:{number}", issues)
        if words:
            sentences.append(" ".join(words))
            firsts.append(words[0])
            total += len(words)
    if not sentences:
        raise InputError(f"{path}: contains no sentence; --text takes a text, one sentence a line")
    if not normalise.has_lexicon:
        return sentences
    if len(sentences) >= 10 and all(first in normalise.unknown for first in firsts) and len(set(firsts)) == len(firsts):
        raise InputError(
            f"{path}: every line begins with another unknown word ({firsts[0]}); "
            "if these are utterance ids, remove them with cut -d' ' -f2-"
        )
    if normalise.unknown.total() > MAX_UNKNOWN * total:
        raise InputError(
            f"{path}: {normalise.unknown.total()} of {total} words are not in the lexicon, such as "
            f"{most_frequent(normalise.unknown, 5)}; check that the text is in this language"
        )
    return sentences


def read_given_arpa(path: Path, lexicon: Collection[str], spoken: Counter[str], issues: IssueCounter) -> Arpa:
    """Returns the model of an ARPA file over the words of the lexicon, in its spelling.

    Args:
        path: ARPA file.
        lexicon: words of the lexicon.
        spoken: words of the training transcripts.
        issues: counts issues.

    Raises:
        InputError: the file is malformed or too big, or it lacks the words of the transcripts.
    """
    _check_size(path)
    arpa = read_arpa(path)
    spelling = _spelling({word for (word,) in arpa.logprobs[0]}, lexicon)
    if outside := len(arpa.logprobs[0]) - len(spelling):
        issues.add("words of the LM outside the lexicon: left out", str(path), outside)
    if other := sorted(word for word, spelt in spelling.items() if word != spelt):
        issues.add("words of the LM in another spelling: as in the lexicon", f"{path}: {other[0]}", len(other))
    several = {spelt: count for spelt, count in Counter(spelling.values()).items() if count > 1}
    if several:
        first = " ".join(word for word, spelt in spelling.items() if spelt == min(several))
        what = "spellings in the LM of one word of the lexicon: their probabilities are added"
        issues.add(what, f"{path}: {first}", sum(several.values()))
    known = set(spelling.values())
    lacking = Counter({word: count for word, count in spoken.items() if word not in known})
    if lacking.total() > MAX_UNKNOWN * spoken.total():
        raise InputError(
            f"{path}: has {spoken.total() - lacking.total()} of the {spoken.total()} words of the training "
            "transcripts; check that the LM is of this language"
        )
    if unheard := Counter({word: count for word, count in lacking.items() if word in lexicon}):
        what = "words of training that the LM lacks, so they are never recognised"
        issues.add(what, f"{path}: {most_frequent(unheard, 3)}", unheard.total())
    return respelt(arpa, spelling)


def _check_size(path: Path) -> None:
    total = 0
    for _, line in numbered_lines(path):
        if match := re.fullmatch(r"\s*ngram\s+\d+\s*=\s*(\d+)\s*", line):
            total += int(match[1])
        if line.strip() == "\\1-grams:":
            break
    if total > MAX_NGRAMS:
        raise InputError(
            f"{path}: {total} n-grams are more than the {MAX_NGRAMS} that can be read here, and far more than a graph "
            "can hold; prune it first, e.g. with SRILM: ngram -lm FILE -prune 1e-7 -write-lm SMALL"
        )


def _spelling(words: set[str], lexicon: Collection[str]) -> dict[str, str]:
    """Maps words of the model to the spelling of the lexicon. Several may have the same one."""
    spelling = Spelling(lexicon)
    same = {word: word for word in words if word in lexicon or word in SYMBOLS}
    for word in sorted(words - same.keys()):
        found = UNKNOWN if word.lower() in UNKNOWNS else spelling.find(clean(word))
        if found is not None:
            same[word] = found
    return same


def respelt(arpa: Arpa, spelling: dict[str, str]) -> Arpa:
    """Returns the model over new names of words, without the words that have none.

    Words of one new name become one word. Its probability is the sum of theirs. After it, each of them counts by its
    share of the probability (exact for bigrams, and for longer n-grams where their shorter histories agree).
    """
    variants: dict[str, list[str]] = {}
    for word, spelt in spelling.items():
        variants.setdefault(spelt, []).append(word)
    merged = {spelt for spelt, words in variants.items() if len(words) > 1}
    kept = spelling.keys()
    backoffs = {
        key: weight
        for ngram, weight in arpa.backoffs.items()
        if kept >= set(ngram) and merged.isdisjoint(key := _spelt(ngram, spelling))
    }
    logprobs: list[dict[Ngram, float]] = []
    for n, level in enumerate(arpa.logprobs):
        histories = _histories(arpa, n, spelling, merged) if merged else {}
        found: dict[Ngram, float] = {}
        for ngram, logprob in level.items():
            if not kept >= set(ngram):
                continue
            key = _spelt(ngram, spelling)
            if merged.isdisjoint(key):
                found[key] = logprob
            elif key not in found:
                shares = histories.get(key[:-1], [(1.0, ngram[:-1])])
                total = sum(
                    share * 10 ** arpa.logprob(history, word) for share, history in shares for word in variants[key[-1]]
                )
                found[key] = min(math.log10(total), 0.0) if total > 0 else Arpa.ZERO
        logprobs.append(found)
        for key, shares in histories.items():
            weight = math.log10(sum(share * 10 ** arpa.backoffs.get(history, 0.0) for share, history in shares))
            if weight != 0.0:
                backoffs[key] = weight
    return Arpa(logprobs, backoffs)


def _spelt(ngram: Ngram, spelling: dict[str, str]) -> Ngram:
    return tuple(spelling[word] for word in ngram)


def _histories(
    arpa: Arpa, n: int, spelling: dict[str, str], merged: set[str]
) -> dict[Ngram, list[tuple[float, Ngram]]]:
    """Returns the histories of `n` words that contain a merged one, by their new names: (share of the probability,
    history).
    """
    groups: dict[Ngram, dict[Ngram, float]] = {}
    for history in dict.fromkeys([*(arpa.logprobs[n - 1] if n else ()), *(ngram[:-1] for ngram in arpa.logprobs[n])]):
        if spelling.keys() >= set(history) and not merged.isdisjoint(key := _spelt(history, spelling)):
            groups.setdefault(key, {})[history] = 0.0
    for group in groups.values():
        for history in group:
            logprobs = (arpa.logprob(history[:i], word) for i, word in enumerate(history) if word != "<s>")
            group[history] = 10 ** sum(logprobs)
    totals = {key: sum(group.values()) for key, group in groups.items()}
    return {
        key: [(p / totals[key] if totals[key] else 1 / len(group), history) for history, p in group.items()]
        for key, group in groups.items()
    }


def without_words(arpa: Arpa, dropped: Collection[str]) -> Arpa:
    """Returns the model without the n-grams that contain a word of `dropped`."""
    removed = set(dropped)
    return Arpa(
        [{n: p for n, p in level.items() if removed.isdisjoint(n)} for level in arpa.logprobs],
        {n: b for n, b in arpa.backoffs.items() if removed.isdisjoint(n)},
    )


def beyond(
    vocabulary: Collection[str], transcripts: Counter[str], others: Iterable[Counter[str]], limit: int
) -> set[str]:
    """Returns the words of the lexicon to leave out of the graph. Of a small lexicon these are none.

    The words of the training transcripts are kept first, then the most frequent ones of the LM, `limit` in all. Words
    that neither has are left out. The words of the test transcripts are not considered.
    """
    if len(vocabulary) <= min(limit, SMALL_LEXICON):
        return set()
    counts = sum(others, Counter())
    kept = {word for word in vocabulary if word in transcripts}
    known = (word for word in vocabulary if word not in kept and counts[word] > 0)
    ranked = sorted(known, key=lambda word: (-counts[word], word))
    return set(vocabulary) - kept - set(ranked[: max(0, limit - len(kept))])
