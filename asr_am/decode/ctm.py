"""CTM files: every word with its time in its recording, in the format of NIST's scorer.

One line per word: file, channel, begin and duration in seconds, word, confidence. Lines are sorted by file, channel and
begin time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lhotse import SupervisionSegment

from asr_am.data.stm import channel_letter
from asr_am.data.textfile import write_lines
from asr_am.features.kinds import FRAME_SHIFT

if TYPE_CHECKING:
    from asr_am.decode.lattice import LmScale


def ctm_name(subset: str, scale: LmScale) -> str:
    """Returns the name of a CTM file, e.g. `dev_10_0.5.ctm`."""
    return f"{subset}_{scale.lm:g}_{scale.insertion:g}.ctm"


class CtmWord(NamedTuple):
    """A word of one utterance.

    Attributes:
        start: first frame, counted from the start of the utterance.
        confidence: from 0 to 1.
    """

    start: int
    frames: int
    word: str
    confidence: float


Words = dict[str, list[list[CtmWord]]]  # by utterance and LM scale


def write_words(
    out: Path, subset: str, segments: Mapping[str, SupervisionSegment], grid: Sequence[LmScale], words: Words
) -> None:
    """Writes the words of a set under each LM scale to a CTM file in `out`/ctm."""
    (out / "ctm").mkdir(parents=True, exist_ok=True)
    for k, scale in enumerate(grid):
        write_ctm(out / "ctm" / ctm_name(subset, scale), segments, {name: each[k] for name, each in words.items()})


def write_ctm(path: Path, segments: Mapping[str, SupervisionSegment], words: Mapping[str, Iterable[CtmWord]]) -> None:
    """Writes the words of a set, atomically."""
    lines = []
    for utterance, spoken in words.items():
        segment = segments[utterance]
        file, channel = segment.recording_id, channel_letter(segment)
        for word in spoken:
            begin, duration = segment.start + word.start * FRAME_SHIFT, word.frames * FRAME_SHIFT
            lines.append((file, channel, begin, duration, word.word, word.confidence))
    write_lines(
        path,
        (
            f"{file} {channel} {begin:.2f} {duration:.2f} {name} {confidence:.2f}"
            for file, channel, begin, duration, name, confidence in sorted(lines)
        ),
    )
