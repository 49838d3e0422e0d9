"""ARPA backoff n-gram models: reading with checks, writing, and perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from asr_am.data.textfile import BLANKS, numbered_lines, split_words
from asr_am.errors import InputError

Ngram = tuple[str, ...]
ROUNDING = 1e-3  # log10 probabilities up to this much above 0 are rounded 0
CHECK_COMPLETE = "check that the file is complete"


@dataclass(frozen=True)
class Arpa:
    """A backoff n-gram model in log10.

    Attributes:
        logprobs: for each order from 1, n-gram -> log probability.
        backoffs: n-gram -> backoff weight, where it is not 0.
    """

    logprobs: list[dict[Ngram, float]]
    backoffs: dict[Ngram, float]
    ZERO: ClassVar[float] = -99.0  # how ARPA files write the log of 0

    @property
    def order(self) -> int:
        return len(self.logprobs)

    def logprob(self, history: Sequence[str], word: str) -> float:
        """Returns log10 P(word | history), -inf for a word that is not a unigram of the model."""
        context = tuple(history[max(0, len(history) - self.order + 1) :])
        total = 0.0
        while True:
            found = self.logprobs[len(context)].get((*context, word))
            if found is not None:
                return total + (found if found > self.ZERO else -math.inf)
            if not context:
                return -math.inf
            total += self.backoffs.get(context, 0.0)
            context = context[1:]


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text, counted as SRILM does.

    Sentence ends are counted. Words outside the vocabulary (`oov` of `words`) are not.
    """

    perplexity: float
    sentences: int
    words: int
    oov: int


def perplexity(arpa: Arpa, sentences: Iterable[Sequence[str]]) -> Perplexity:
    """Computes the perplexity of a text, NaN for a text without sentences."""
    total, num_sentences, num_words, oov = 0.0, 0, 0, 0
    for sentence in sentences:
        history = ["<s>"]
        for word in [*sentence, "</s>"]:
            logprob = arpa.logprob(history, word) if word != "<unk>" else -math.inf
            if logprob == -math.inf:
                oov += 1
                word = "<unk>"
            else:
                total += logprob
            history = [*history[-arpa.order :], word]
        num_sentences += 1
        num_words += len(sentence)
    events = num_words + num_sentences - oov
    return Perplexity(10 ** (-total / events) if events else math.nan, num_sentences, num_words, oov)


def listed_share(arpa: Arpa, sentences: Iterable[Sequence[str]]) -> float:
    """Returns the share of a text's n-grams, of the model's order, that the model lists. N-grams with words outside the
    vocabulary do not count.

    It is near 1 for a text that the model was estimated on. 0 for a unigram model, which tells nothing, and without
    n-grams.
    """
    order, listed, total = arpa.order, 0, 0
    for sentence in sentences if order > 1 else ():
        words = ["<s>", *sentence, "</s>"]
        for begin in range(len(words) - order + 1):
            ngram = tuple(words[begin : begin + order])
            if all((word,) in arpa.logprobs[0] for word in ngram):
                total += 1
                listed += ngram in arpa.logprobs[-1]
    return listed / total if total else 0.0


def write_arpa(arpa: Arpa, path: Path) -> None:
    """Writes the model in ARPA format with 7 decimals, n-grams in the order of `arpa`."""
    with open(path, "w", encoding="utf-8") as file:
        file.write("\\data\\\n")
        file.writelines(f"ngram {n}={len(ngrams)}\n" for n, ngrams in enumerate(arpa.logprobs, start=1))
        for n, ngrams in enumerate(arpa.logprobs, start=1):
            file.write(f"\n\\{n}-grams:\n")
            for ngram, logprob in ngrams.items():
                backoff = arpa.backoffs.get(ngram)
                tail = "" if backoff is None else f"\t{backoff:.7f}"
                file.write(f"{logprob:.7f}\t{' '.join(ngram)}{tail}\n")
        file.write("\n\\end\\\n")


def read_arpa(path: Path) -> Arpa:
    """Reads and checks an ARPA file, plain or gzipped. Everything before `\\data\\` is a comment.

    Raises:
        InputError: with file and line, for a file that is not ARPA or truncated, counts that do not match, values that
            are not log probabilities, a duplicate n-gram, a word that is no unigram, no `<s>` or `</s>`.
    """
    lines = ((number, line.strip(BLANKS)) for number, line in numbered_lines(path))
    if not any(line == "\\data\\" for _, line in lines):
        raise InputError(f"{path}: has no line \\data\\; it is not an ARPA language model, give one")
    counts, (number, line) = _read_counts(path, lines)
    arpa = Arpa(logprobs=[], backoffs={})
    for n, count in enumerate(counts, start=1):
        if line != f"\\{n}-grams:":
            raise InputError(f"{path}:{number}: expected \\{n}-grams: but found {line[:60]!r}; {CHECK_COMPLETE}")
        number, line = _read_section(path, lines, arpa, n, count, last=n == len(counts))
    if line != "\\end\\":
        raise InputError(f"{path}:{number}: expected \\end\\ but found {line[:60]!r}; {CHECK_COMPLETE}")
    for symbol in ("<s>", "</s>"):
        if (symbol,) not in arpa.logprobs[0]:
            raise InputError(f"{path}: has no unigram {symbol}; make the model from sentences with <s> and </s>")
    return arpa


def _read_counts(path: Path, lines: Iterator[tuple[int, str]]) -> tuple[list[int], tuple[int, str]]:
    """Returns the counts of the `ngram N=COUNT` lines, and the first line after them."""
    counts: list[int] = []
    for number, line in lines:
        match = re.fullmatch(r"ngram\s+(\d{1,2})\s*=\s*(\d{1,12})", line)
        if line.startswith("\\") and counts:
            if counts[0] == 0:
                raise InputError(f"{path}:{number}: the model has no unigrams; give one that has")
            return counts, (number, line)
        if not line:
            continue
        if match is None or int(match[1]) != len(counts) + 1:
            raise InputError(f"{path}:{number}: expected 'ngram {len(counts) + 1}=COUNT' but found {line[:60]!r}")
        counts.append(int(match[2]))
    raise InputError(f"{path}: ends before its n-grams; {CHECK_COMPLETE}")


def _read_section(
    path: Path, lines: Iterator[tuple[int, str]], arpa: Arpa, n: int, count: int, *, last: bool
) -> tuple[int, str]:
    """Reads the n-grams of one order into `arpa`. Returns the line that ends the section."""
    ngrams: dict[Ngram, float] = {}
    arpa.logprobs.append(ngrams)
    vocabulary = {word for (word,) in arpa.logprobs[0]} if n > 1 else set()
    for number, line in lines:
        if not line:
            continue
        if line.startswith("\\"):
            if len(ngrams) != count:
                raise InputError(
                    f"{path}:{number}: {len(ngrams)} {n}-grams but the header says {count}; {CHECK_COMPLETE}"
                )
            return number, line
        fields = split_words(line)
        if len(fields) not in (n + 1, n + 2):
            raise InputError(
                f"{path}:{number}: not a probability, {n} words and maybe a backoff weight: {line[:60]!r}; correct it"
            )
        ngram = tuple(fields[1 : n + 1])
        if ngram in ngrams:
            raise InputError(f"{path}:{number}: the {n}-gram {' '.join(ngram)!r} is a duplicate; remove it")
        if n > 1 and not vocabulary.issuperset(ngram):
            unlisted = next(word for word in ngram if word not in vocabulary)
            raise InputError(f"{path}:{number}: the word {unlisted!r} is not among the 1-grams; correct it")
        ngrams[ngram] = _logprob(fields[0], path, number)
        if len(fields) == n + 2 and not last:
            backoff = _log10(fields[-1], path, number)
            if backoff != 0.0:
                arpa.backoffs[ngram] = backoff
    raise InputError(f"{path}: ends without \\end\\; {CHECK_COMPLETE}")


def _logprob(text: str, path: Path, number: int) -> float:
    value = _log10(text, path, number)
    if value > ROUNDING:
        raise InputError(f"{path}:{number}: the log probability {text} is above 0; ARPA files hold log10 probabilities")
    return min(value, 0.0)


def _log10(text: str, path: Path, number: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value == math.inf:
        raise InputError(f"{path}:{number}: {text[:40]!r} is not a log10 number")
    return max(value, Arpa.ZERO)
