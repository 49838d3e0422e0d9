"""NIST references: the STM file and Kaldi's reco2file_and_channel, written from supervisions and checked against them.

Channel 0 is "A", channel 1 is "B". The file name is the recording id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from intervaltree import IntervalTree
from lhotse import SupervisionSegment

from asr_am.data.manifests import channel_of
from asr_am.data.textfile import read_lines, write_lines
from asr_am.errors import InputError

CHANNELS = "AB"
COMMENTS = (";;", "**")  # begin a line, after any blanks
REMEDY = "run stage 0 (data) again"

Label = Callable[[SupervisionSegment], str]


@dataclass(frozen=True)
class StmSegment:
    """A record of an STM file, times in seconds."""

    line: int
    recording: str
    channel: str
    begin: float
    end: float


def channel_letter(segment: SupervisionSegment) -> str:
    """Returns A or B for the segment's channel. Raises InputError for any other channel."""
    channel = channel_of(segment)
    if not 0 <= channel < len(CHANNELS):
        raise InputError(f"utterance {segment.id}: channel {channel} is neither 0 (A) nor 1 (B)")
    return CHANNELS[channel]


def stm_line(segment: SupervisionSegment, label: str) -> str:
    """Returns an STM record, times to the millisecond: file, channel, speaker, begin, end, <label>, text."""
    prefix = f"{segment.recording_id} {channel_letter(segment)} {segment.speaker}"
    return f"{prefix} {segment.start:.3f} {segment.end:.3f} <{label}> {segment.text}".rstrip()


def write_stm(path: Path, supervisions: Iterable[SupervisionSegment], label: Label = lambda _: "O") -> None:
    """Writes the reference of a test set, sorted as NIST's tools need it: by file, channel, begin time.

    `label` returns the comma-separated category labels of a segment, e.g. "O,en,F,en-F" in Hub5'00.
    """
    ordered = sorted(supervisions, key=lambda segment: (segment.recording_id, channel_letter(segment), segment.start))
    write_lines(path, [stm_line(segment, label(segment)) for segment in ordered])


def write_reco2file_and_channel(path: Path, supervisions: Iterable[SupervisionSegment]) -> None:
    """Writes `<recording>-<A|B> <recording> <A|B>` for every conversation side of the set."""
    sides = sorted({(segment.recording_id, channel_letter(segment)) for segment in supervisions})
    write_lines(path, [f"{recording}-{letter} {recording} {letter}" for recording, letter in sides])


def is_comment(line: str) -> bool:
    """Says whether a line of an STM file is a comment or empty."""
    return not line.strip() or line.lstrip().startswith(COMMENTS)


def read_stm_segments(path: Path) -> list[StmSegment]:
    """Reads the segments of an STM file without their texts. Raises InputError for a malformed line."""
    segments = []
    for number, line in enumerate(read_lines(path, REMEDY), start=1):
        if is_comment(line):
            continue
        try:
            recording, channel, _, begin, end = line.split()[:5]
            segment = StmSegment(number, recording, channel, float(begin), float(end))
        except ValueError as error:
            raise InputError(
                f"{path}:{number}: not `file channel speaker begin end <labels> words`; correct it"
            ) from error
        if segment.begin == segment.end:
            raise InputError(f"{path}:{number}: the segment from {begin} to {end} has no length; correct it")
        if not 0 <= segment.begin < segment.end:
            raise InputError(f"{path}:{number}: the segment ends at {end}, before it begins at {begin}; correct it")
        segments.append(segment)
    return segments


def check_stm(path: Path, supervisions: Iterable[SupervisionSegment]) -> None:
    """Checks that utterances and reference segments overlap one another, in time order.

    Texts may differ: a reference may have alternatives where the utterance has a plain transcript.

    Raises:
        InputError: an utterance has no reference, a reference no utterance, or the file is not sorted.
    """
    references: dict[tuple[str, str], list[StmSegment]] = {}
    for reference in read_stm_segments(path):
        side = references.setdefault((reference.recording, reference.channel), [])
        if side and side[-1].begin > reference.begin:
            raise InputError(f"{path}:{reference.line}: not sorted by begin time; sort it: `sort +0 -1 +1 -2 +3nb -4`")
        side.append(reference)
    times = {
        side: IntervalTree.from_tuples((segment.begin, segment.end, segment.line) for segment in segments)
        for side, segments in references.items()
    }
    covered: set[int] = set()
    for utterance in supervisions:
        key = utterance.recording_id, channel_letter(utterance)
        found = times[key].overlap(utterance.start, utterance.end) if key in times else set()
        if not found:
            raise InputError(f"{path}: no reference for utterance {utterance.id}; {REMEDY}")
        covered.update(reference.data for reference in found)
    for side in references.values():
        for segment in side:
            if segment.line not in covered:
                where = f"{path}:{segment.line}"
                raise InputError(
                    f"{where}: no utterance at this time of {segment.recording} {segment.channel}; {REMEDY}"
                )
