"""Sentences of a text, one a line, as language models are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asr_am.data.textfile import numbered_lines, split_words
from asr_am.errors import InputError


def read_sentences(path: Path, remedy: str) -> Iterator[list[str]]:
    """Yield the words of each line that has any. InputError, with `remedy`: no such file, not text, `<s>` or `</s>`."""
    for number, line in numbered_lines(path, remedy):
        sentence = split_words(line)
        if "<s>" in sentence or "</s>" in sentence:
            raise InputError(f"{path}:{number}: holds <s> or </s>, which are added here; take them out")
        if sentence:
            yield sentence
