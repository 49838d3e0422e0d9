"""Transcripts of the prepared data and sentences of LM texts: reading, and counting words outside the lexicon."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Literal

from asr_am.data.manifests import read_supervisions
from asr_am.data.textfile import numbered_lines, split_words
from asr_am.errors import InputError
from asr_am.lang.lang_dir import Lang
from asr_am.lang.lexicon import UNKNOWN

log = logging.getLogger(__name__)
TOO_MANY = 0.2  # share of unknown words from which lexicon and transcripts are taken for a mismatch


def read_transcripts(data_dir: Path, subset: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (utterance id, words). Raises InputError for a damaged manifest, or an utterance without text."""
    for segment in read_supervisions(data_dir, subset):
        if segment.text is None:
            raise InputError(f"{data_dir / subset}: utterance {segment.id} has no transcript; run stage 0 (data) again")
        yield segment.id, split_words(segment.text)


def check_transcripts(data_dir: Path, lang: Lang, out: Path, oov: Literal["unk", "error"] = "unk") -> Counter[str]:
    """Counts the words of the train and dev transcripts outside the lexicon, and writes them to out/oov_counts.txt.

    They are trained as `<unk>`.

    Args:
        oov: "error" refuses any such word.

    Raises:
        InputError: there is such a word and `oov` is "error", or they are more than a fifth of all words.
    """
    counts: Counter[str] = Counter()
    where: dict[str, str] = {}
    total = 0
    for subset in ("train", "dev"):
        for utterance, words in read_transcripts(data_dir, subset):
            total += len(words)
            for word in words:
                if word not in lang.words:
                    counts[word] += 1
                    where.setdefault(word, utterance)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{count} {word} {where[word]}\n" for word, count in ordered]
    (out / "oov_counts.txt").write_text("".join(lines), encoding="utf-8")
    if not total:
        raise InputError(f"{data_dir}: the train and dev transcripts have no words; run stage 0 (data) again")
    if counts:
        examples = ", ".join(f"{word} ({where[word]})" for word, _ in ordered[:5])
        message = (
            f"{data_dir}: {counts.total()} of {total} words of the train and dev transcripts "
            f"({len(counts)} different ones) are not in the lexicon: {examples}"
        )
        if oov == "error" or counts.total() > TOO_MANY * total:
            raise InputError(f"{message}; add them to lexicon.txt or correct the transcripts")
        log.warning("%s; they become %s", message, lang.word_names[lang.unk])
    return counts


def unknown_share(data_dir: Path, vocabulary: Container[str]) -> float:
    """Returns the share of the words of the training transcripts that are `<unk>` or outside the vocabulary."""
    words = [word for _, words in read_transcripts(data_dir, "train") for word in words]
    return sum(word == UNKNOWN or word not in vocabulary for word in words) / max(1, len(words))


def read_sentences(path: Path, remedy: str) -> Iterator[list[str]]:
    """Yields the words of each non-empty line.

    Raises:
        InputError: with `remedy` if the file is missing or not text, and for lines with `<s>` or `</s>`.
    """
    for number, line in numbered_lines(path, remedy):
        sentence = split_words(line)
        if "<s>" in sentence or "</s>" in sentence:
            raise InputError(f"{path}:{number}: holds <s> or </s>, which are added automatically; remove them")
        if sentence:
            yield sentence
