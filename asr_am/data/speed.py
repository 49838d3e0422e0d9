"""Speed perturbation (Ko et al., Interspeech 2015): copies of the training speech, slower and faster.

Tempo and pitch change together. Only manifests are written. lhotse resamples the audio when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asr_am.errors import InputError

if TYPE_CHECKING:
    from lhotse import SupervisionSegment

SLOWEST, FASTEST = 0.5, 2.0
PREFIX = re.compile(r"^sp\d+(\.\d+)?-")  # of the ids and speakers of copies


def check_speeds(factors: object) -> None:
    """Raises InputError unless `factors` is a list of distinct numbers in range other than 1."""
    listed = list(factors) if isinstance(factors, Sequence) and not isinstance(factors, str) else [None]
    valid = all(isinstance(f, int | float) and SLOWEST <= f <= FASTEST and f != 1 for f in listed)
    if not valid or len(set(listed)) < len(listed):
        raise InputError(
            f"speed_perturb={factors}: must be a list of different numbers from {SLOWEST} to {FASTEST} other than 1, "
            "the speeds of the copies; for instance [0.9,1.1]"
        )


def originals(names: Sequence[str]) -> list[str]:
    """Returns the utterance that each utterance of a set is a copy of, which is itself if it is no copy."""
    known = set(names)
    return [source if (source := PREFIX.sub("", name)) in known else name for name in names]


def copies_of(names: Sequence[str]) -> set[str]:
    """Returns the names of a set that are of copies."""
    return {name for name, source in zip(names, originals(names), strict=True) if name != source}


def perturb_speed(data_dir: Path, subset: str, factors: Sequence[float], *, allow_commands: bool = False) -> None:
    """Adds to a set a copy of all its utterances for each factor (1.1: faster by a tenth).

    As in Kaldi, ids and speakers of copies begin with `sp<factor>-`: another pitch counts as another speaker.
    """
    from asr_am.data.manifests import read_recordings, read_supervisions, write_set

    check_speeds(factors)
    recordings = list(read_recordings(data_dir, subset, allow_commands=allow_commands))
    segments = list(read_supervisions(data_dir, subset))
    rates = {recording.id: recording.sampling_rate for recording in recordings}
    copies = [
        replace(recording.perturb_speed(factor, affix_id=False), id=f"sp{factor}-{recording.id}")
        for factor in factors for recording in recordings
    ]  # fmt: skip
    segment_copies = [_faster_segment(segment, factor, rates) for factor in factors for segment in segments]
    write_set(data_dir, subset, recordings + copies, segments + segment_copies)


def _faster_segment(segment: SupervisionSegment, factor: float, rates: dict[str, int]) -> SupervisionSegment:
    faster = segment.perturb_speed(factor, rates[segment.recording_id], affix_id=False)
    names = {name: f"sp{factor}-{getattr(segment, name)}" for name in ("id", "recording_id", "speaker")}
    return replace(faster, **names)
