"""Decides which of two times in the transcripts, offset_ms or start_ms, is that of the wav files.

The documentation says that offset_ms counts from the begin of the recording and start_ms from that of the conversation.
The creators' code cuts at start_ms, ESPnet's at offset_ms. They differ by two seconds on many agents' sides, and by
offset_ms both sides of a call share a clock. Speech should be louder inside the segments of these sides than outside,
and more so at the right times.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import soundfile

from asr_am.errors import InputError
from local.hvb.calls import STARTS, Side

logger = logging.getLogger(__name__)

FRAME = 0.01  # seconds
MIN_DIFFERENCE = 200  # milliseconds, between the times of a side to be looked at
MAX_SIDES = 300
MIN_SHARE = 0.8  # of the sides that must agree


def choose_start(sides: Sequence[Side]) -> str:
    """Returns the name of the field. Without sides where the times differ it is the documented one, offset_ms.

    Raises:
        InputError: the audio supports neither.
    """
    different = [side for side in sides if _difference(side) >= MIN_DIFFERENCE][:MAX_SIDES]
    votes = Counter(_louder_inside(side) for side in different)
    if not votes:
        return STARTS[0]
    ((best, count),) = votes.most_common(1)
    logger.info("segments begin at %s: speech is louder inside on %d of %d sides", best, count, votes.total())
    if count < MIN_SHARE * votes.total():
        raise InputError(
            f"{sides[0].audio.parents[1]}: segments fit the audio neither at offset_ms nor at start_ms ({dict(votes)} "
            "sides); look at some, then add corpus.prepare.start=offset_ms or start_ms"
        )
    return best


def _difference(side: Side) -> float:
    return float(np.median([abs(s.starts["offset_ms"] - s.starts["start_ms"]) for s in side.segments]))


def _louder_inside(side: Side) -> str:
    """Returns the times at which the segments stand out more from the rest of the recording."""
    try:
        samples_N, rate = soundfile.read(side.audio, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise InputError(f"{side.audio}: cannot be read as audio ({error}); replace it") from error
    size = round(FRAME * rate)
    frames = len(samples_N) // size
    level_T = np.log(np.square(samples_N[: frames * size, 0]).reshape(frames, size).mean(axis=1) + 1e-8)
    contrast = {}
    for name in STARTS:
        inside_T = np.zeros(frames, bool)
        for segment in side.segments:
            begin = segment.starts[name] / 1000
            inside_T[round(begin / FRAME) : round((begin + segment.duration / 1000) / FRAME)] = True
        both = inside_T.any() and not inside_T.all()
        contrast[name] = level_T[inside_T].mean() - level_T[~inside_T].mean() if both else -np.inf
    return max(STARTS, key=lambda name: contrast[name])
