"""Samples of utterances, read from their recordings.

Shapes: C channels, N samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
from lhotse import Recording, SupervisionSegment
from lhotse.audio import AudioLoadingError, DurationMismatchError
from lhotse.audio.backend import audio_backend
from lhotse.augmentation import Resample

from asr_am.data.checksums import intact
from asr_am.data.manifests import channel_of
from asr_am.errors import InputError

INT16_SCALE = np.float32(32768.0)
RESAMPLING_MARGIN = 0.1  # seconds on either side of a piece, much longer than the resampling filter


def is_plain_file(recording: Recording) -> bool:
    """True for a single audio file, False for a command, several files or a transformed recording."""
    return len(recording.sources) == 1 and recording.sources[0].type == "file" and not recording.transforms


def read_utterances(
    recording: Recording, segments: Sequence[SupervisionSegment]
) -> Iterator[tuple[SupervisionSegment, np.ndarray]]:
    """Yields each utterance of `recording` with its samples: float32 [N] on the scale of 16-bit integers.

    A plain file is read utterance by utterance, even if it is resampled on the way, so that a long recording needs no
    more memory than its longest utterance. Everything else goes through lhotse.

    Raises:
        InputError: the audio is missing, cannot be decoded or is too short.
    """
    if is_plain_file(recording):
        yield from _from_file(recording, segments)
    elif (resampling := _only_resampling(recording)) is not None:
        yield from _from_file_resampled(recording, resampling, segments)
    else:
        yield from _from_lhotse(recording, segments)


def _from_file(
    recording: Recording, segments: Sequence[SupervisionSegment]
) -> Iterator[tuple[SupervisionSegment, np.ndarray]]:
    source = recording.sources[0]
    try:
        with soundfile.SoundFile(intact(Path(source.source))) as file:
            if file.samplerate != recording.sampling_rate:
                raise InputError(
                    f"{source.source}: {file.samplerate} Hz, but its manifest says {recording.sampling_rate} Hz; "
                    "run stage 0 (data) again"
                )
            for segment in segments:
                begin, end = _bounds(recording, segment)
                start = file.seek(min(begin, file.frames))
                samples_NC = file.read(end - begin, dtype="float32", always_2d=True)
                if len(samples_NC) < end - begin:
                    raise _truncated(source.source, start + len(samples_NC), recording.num_samples, segment)
                column = _column(segment, source.channels)
                if column >= file.channels:
                    raise InputError(
                        f"{source.source}: has {file.channels} channels, but its manifest has channels "
                        f"{source.channels}; run stage 0 (data) again"
                    )
                yield segment, samples_NC[:, column] * INT16_SCALE
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise _unreadable(source.source, error) from error


def _unreadable(path: str, error: Exception) -> InputError:
    return InputError(f"{path}: cannot be read as audio ({error}); replace it and run stage 0 (data) again")


def _column(segment: SupervisionSegment, channels: Sequence[int]) -> int:
    """Returns the position of the utterance's channel in `channels`."""
    channel = channel_of(segment)
    if channel not in channels:
        raise InputError(
            f"utterance {segment.id}: is on channel {channel}, but recording {segment.recording_id} has {channels}; "
            "run stage 0 (data) again"
        )
    return channels.index(channel)


def _truncated(path: str, frames: int, expected: int, segment: SupervisionSegment) -> InputError:
    return InputError(
        f"{path}: ends after {frames} of {expected} samples, inside utterance {segment.id}: the file is truncated or "
        "has changed; get a complete copy, remove the output of stage 0 (data) and run it again"
    )


def _only_resampling(recording: Recording) -> Resample | None:
    """Returns the resampling of a recording that is a plain file except for its sampling rate, else None."""
    match recording.transforms:
        case [Resample() as resampling] if is_plain_file(replace(recording, transforms=None)):
            return resampling
    return None


def _frames(path: str) -> int:
    try:
        return int(soundfile.info(path).frames)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise _unreadable(path, error) from error


def _from_file_resampled(
    recording: Recording, resample: Resample, segments: Sequence[SupervisionSegment]
) -> Iterator[tuple[SupervisionSegment, np.ndarray]]:
    """Yields each utterance, resampled with a margin so that samples equal those of resampling the whole file.

    A piece begins at a multiple of the period in which samples of both rates coincide.
    """
    rate, new_rate = resample.source_sampling_rate, resample.target_sampling_rate
    period = rate // math.gcd(rate, new_rate)
    path = recording.sources[0].source
    original = replace(recording, sampling_rate=rate, num_samples=_frames(path), transforms=[])
    for segment in segments:
        begin, end = _bounds(recording, segment)
        if original.num_samples < (end - 1) * rate // new_rate:  # resampled lengths are rounded
            raise _truncated(path, original.num_samples, recording.num_samples * rate // new_rate, segment)
        first = max(0, int((begin / new_rate - RESAMPLING_MARGIN) * rate)) // period * period
        last = min(math.ceil((end / new_rate + RESAMPLING_MARGIN) * rate), original.num_samples)
        piece = replace(segment, start=first / rate, duration=(last - first) / rate)
        ((_, samples_N),) = _from_file(original, [piece])
        skip = begin - first // period * (new_rate * period // rate)
        yield segment, resample(samples_N[None])[0, skip : skip + end - begin]


def _from_lhotse(
    recording: Recording, segments: Sequence[SupervisionSegment]
) -> Iterator[tuple[SupervisionSegment, np.ndarray]]:
    sphere = any(str(source.source).lower().endswith(".sph") for source in recording.sources)
    try:
        # For sphere files lhotse would run sph2pipe. libsndfile reads those that a manifest may have.
        with audio_backend("LibsndfileBackend") if sphere else nullcontext():
            audio_CN = recording.load_audio()
    except (AudioLoadingError, DurationMismatchError, AssertionError, OSError, RuntimeError, ValueError) as error:
        sources = ", ".join(str(source.source) for source in recording.sources)
        raise InputError(f"recording {recording.id}: {sources}: cannot be read as audio ({reason(error)})") from error
    for segment in segments:
        begin, end = _bounds(recording, segment)
        yield segment, audio_CN[_column(segment, recording.channel_ids), begin:end] * INT16_SCALE


def reason(error: Exception) -> str:
    """Returns what an error of lhotse says, in a line.

    `str` would fail for those of libsndfile: lhotse raises them again with a text where they have a code.
    """
    return (" ".join(map(str, error.args)).splitlines() or [type(error).__name__])[0]


def _bounds(recording: Recording, segment: SupervisionSegment) -> tuple[int, int]:
    """Returns the first sample and the sample after the last, limited to the recording (times are rounded)."""
    begin = round(segment.start * recording.sampling_rate)
    return begin, min(round(segment.end * recording.sampling_rate), recording.num_samples)
