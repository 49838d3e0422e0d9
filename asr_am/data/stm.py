"""NIST references made from supervisions: the STM file and Kaldi's reco2file_and_channel.

Channel 0 is "A", channel 1 is "B"; the file name is the recording id.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from lhotse import SupervisionSegment

CHANNELS = "AB"

Label = Callable[[SupervisionSegment], str]


def channel_letter(segment: SupervisionSegment) -> str:
    """ "A" or "B" for a segment of one channel. Raises ValueError for any other channel."""
    channel = segment.channel if isinstance(segment.channel, int) else segment.channel[0]
    if not 0 <= channel < len(CHANNELS):
        raise ValueError(f"utterance {segment.id}: channel {channel} is neither 0 (A) nor 1 (B)")
    return CHANNELS[channel]


def stm_line(segment: SupervisionSegment, label: str) -> str:
    """One STM record, times to the millisecond: file, channel, speaker, begin, end, <label>, text."""
    letter = channel_letter(segment)
    return (
        f"{segment.recording_id} {letter} {segment.speaker} {segment.start:.3f} {segment.end:.3f} "
        f"<{label}> {segment.text}".rstrip()
    )


def write_stm(path: Path, supervisions: Iterable[SupervisionSegment], label: Label = lambda _: "O") -> None:
    """Write the reference of a test set, sorted as NIST's tools want it: by file, channel, begin time.

    `label` gives the comma-separated category labels of a segment, e.g. "O,en,F,en-F" in Hub5'00.
    """
    ordered = sorted(supervisions, key=lambda segment: (segment.recording_id, channel_letter(segment), segment.start))
    _write_lines(path, [stm_line(segment, label(segment)) for segment in ordered])


def write_reco2file_and_channel(path: Path, supervisions: Iterable[SupervisionSegment]) -> None:
    """Write `<recording>-<A|B> <recording> <A|B>` for every conversation side of the set."""
    sides = sorted({(segment.recording_id, channel_letter(segment)) for segment in supervisions})
    _write_lines(path, [f"{recording}-{letter} {recording} {letter}" for recording, letter in sides])


def _write_lines(path: Path, lines: list[str]) -> None:
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)
