"""When each word of a decoded path was said, from the phones of its alignment.

Shapes: T frames.

Output labels in a minimized graph stand anywhere inside or after their word, so the words of a path are laid over its
phones with the lexicon: each word takes one of its pronunciations, with optional silence before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asr_am.hmm.runs import runs_of
from asr_am.hmm.states import StateTable
from asr_am.lang.lang import Lang

Span = tuple[int, int]  # first phone, phone after the last


@dataclass(frozen=True)
class TimedWord:
    """A word id with its first frame and number of frames."""

    word: int
    start: int
    frames: int


def time_words(words: Sequence[int], labels_T: np.ndarray, states: StateTable, lang: Lang) -> list[TimedWord]:
    """The words (ids, in order) of a path with graph labels `labels_T`.

    A path that was cut off in the middle (its utterance ended early) may have a last word with part of its phones, or
    with none (0 frames), and loses words after it. Where words and phones do not fit at all, the words share the frames
    evenly.
    """
    if len(words) == 0 or len(labels_T) == 0:
        return []
    runs = runs_of(labels_T, np.array([0, len(labels_T)]), states)
    first_R = runs.state_R == 0
    phones = runs.windows_R3[first_R, 1].tolist()
    bounds = np.append(runs.start_R[first_R], len(labels_T))
    spans = _lay(words, phones, lang)
    if spans is None:
        bounds = np.linspace(0, len(labels_T), len(words) + 1).astype(int)
        spans = [(i, i + 1) for i in range(len(words))]
    return [
        TimedWord(word, int(bounds[first]), int(bounds[last] - bounds[first]))
        for word, (first, last) in zip(words, spans, strict=False)
    ]


def _lay(words: Sequence[int], phones: list[int], lang: Lang) -> list[Span] | None:
    """The span of each word, None where they do not fit; fewer spans than words if the phones end before the words.

    Dynamic programming over words: `ends[i]` holds, for each phone where word i can end, the word's span and the end
    of the word before.
    """
    ends: list[dict[int, tuple[Span, int]]] = []
    reached: dict[int, tuple[Span, int]] = {0: ((0, 0), 0)}
    for word in words:
        following: dict[int, tuple[Span, int]] = {}
        for end in sorted(reached):
            for span in _spans(word, end, phones, lang, cut=False):
                following.setdefault(span[1], (span, end))
        if not following:
            return _cut_off(word, reached, ends, phones, lang)
        ends.append(following)
        reached = following
    complete = [end for end in reached if all(phone == lang.optional_silence for phone in phones[end:])]
    return _trace(ends, complete[0] if complete else max(reached))


def _cut_off(
    word: int, reached: dict[int, tuple[Span, int]], ends: list[dict[int, tuple[Span, int]]], phones: list[int],
    lang: Lang,
) -> list[Span] | None:  # fmt: skip
    """The spans up to `word`, which has no complete pronunciation left: it may take the first phones of one."""
    for end in sorted(reached):
        for span in _spans(word, end, phones, lang, cut=True):
            return [*_trace(ends, end), span]
    return None


def _spans(word: int, end: int, phones: list[int], lang: Lang, *, cut: bool) -> list[Span]:
    """Where `word` can stand if the word before ended at phone `end`; with `cut`, as a beginning without its end."""
    spans = []
    pronunciations = lang.pronunciations.get(lang.word_names[word], [])
    begin = end
    while True:
        for pronunciation in pronunciations:
            rest = tuple(phones[begin : begin + len(pronunciation)])
            if rest == pronunciation[: len(rest)] and (cut or len(rest) == len(pronunciation)):
                spans.append((begin, begin + len(rest)))
        if begin >= len(phones) or phones[begin] != lang.optional_silence:
            return spans
        begin += 1


def _trace(ends: list[dict[int, tuple[Span, int]]], end: int) -> list[Span]:
    spans = []
    for step in reversed(ends):
        span, end = step[end]
        spans.append(span)
    return spans[::-1]
