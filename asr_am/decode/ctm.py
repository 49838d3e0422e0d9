"""CTM files: every word with its place in its recording, as NIST's scorer reads them.

One line a word: file, channel, begin and duration in seconds, word, confidence; sorted by file, channel and begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from lhotse import SupervisionSegment

from asr_am.data.stm import channel_letter
from asr_am.data.textfile import write_lines

FRAME_SHIFT = 0.01  # seconds


class CtmWord(NamedTuple):
    """A word of one utterance: frames from the utterance's start, confidence from 0 to 1."""

    start: int
    frames: int
    word: str
    confidence: float


class CtmLine(NamedTuple):
    """A word of one recording, in the order in which CTM files are sorted. Seconds."""

    file: str
    channel: str
    begin: float
    duration: float
    word: str
    confidence: float


def ctm_lines(segment: SupervisionSegment, words: Iterable[CtmWord]) -> list[CtmLine]:
    """The words of an utterance with the times of its recording."""
    file, channel = segment.recording_id, channel_letter(segment)
    return [
        CtmLine(
            file, channel, segment.start + word.start * FRAME_SHIFT, word.frames * FRAME_SHIFT, word.word,
            word.confidence,
        )
        for word in words
    ]  # fmt: skip


def write_ctm(path: Path, segments: Mapping[str, SupervisionSegment], words: Mapping[str, Iterable[CtmWord]]) -> None:
    """Write the words of a set, given by utterance, complete or not at all."""
    lines = sorted(line for utterance in words for line in ctm_lines(segments[utterance], words[utterance]))
    write_lines(
        path,
        (
            f"{line.file} {line.channel} {line.begin:.2f} {line.duration:.2f} {line.word} {line.confidence:.2f}"
            for line in lines
        ),
    )
