"""Samples of utterances, cut from their recordings.

Shapes: N samples, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import soundfile
from lhotse import Recording, SupervisionSegment
from lhotse.audio import AudioLoadingError, DurationMismatchError

from asr_am.data.manifests import channel_of
from asr_am.errors import InputError

INT16_SCALE = np.float32(32768.0)


def is_plain_file(recording: Recording) -> bool:
    """Whether the recording is one audio file, as it is (not a command, several files or a transformed recording)."""
    return len(recording.sources) == 1 and recording.sources[0].type == "file" and not recording.transforms


def read_utterances(
    recording: Recording, segments: Sequence[SupervisionSegment]
) -> Iterator[tuple[SupervisionSegment, np.ndarray]]:
    """Yield each utterance of `recording` with its samples: float32 [N] on the scale of 16-bit integers.

    A plain file is read piece by piece, so that a long recording needs no more memory than its longest utterance;
    anything else goes through lhotse. Raises InputError for audio that is missing, undecodable or too short.
    """
    read = _from_file if is_plain_file(recording) else _from_lhotse
    yield from read(recording, segments)


def _from_file(
    recording: Recording, segments: Sequence[SupervisionSegment]
) -> Iterator[tuple[SupervisionSegment, np.ndarray]]:
    source = recording.sources[0]
    try:
        with soundfile.SoundFile(source.source) as file:
            if file.samplerate != recording.sampling_rate:
                raise InputError(
                    f"{source.source}: {file.samplerate} Hz, but its manifest says {recording.sampling_rate} Hz; "
                    "run stage 0 (data) again"
                )
            for segment in segments:
                begin, end = _bounds(recording, segment)
                file.seek(min(begin, file.frames))
                samples_NC = file.read(end - begin, dtype="float32", always_2d=True)
                if len(samples_NC) < end - begin:
                    raise InputError(
                        f"{source.source}: ends after {file.frames} of {recording.num_samples} samples, inside "
                        f"utterance {segment.id}: the file is truncated; get it anew and run stage 0 (data) again"
                    )
                yield segment, samples_NC[:, source.channels.index(channel_of(segment))] * INT16_SCALE
    except (soundfile.SoundFileError, OSError) as error:
        raise InputError(f"{source.source}: cannot be read as audio ({error}); replace it") from error


def _from_lhotse(
    recording: Recording, segments: Sequence[SupervisionSegment]
) -> Iterator[tuple[SupervisionSegment, np.ndarray]]:
    try:
        audio_CN = recording.load_audio()
    except (AudioLoadingError, DurationMismatchError, AssertionError, OSError, RuntimeError, ValueError) as error:
        sources = ", ".join(str(source.source) for source in recording.sources)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"recording {recording.id}: {sources}: cannot be read as audio ({reason})") from error
    for segment in segments:
        begin, end = _bounds(recording, segment)
        yield segment, audio_CN[recording.channel_ids.index(channel_of(segment)), begin:end] * INT16_SCALE


def _bounds(recording: Recording, segment: SupervisionSegment) -> tuple[int, int]:
    """First sample and the one after the last; an end up to a rounding beyond the recording is the recording's end."""
    begin = round(segment.start * recording.sampling_rate)
    return begin, min(round(segment.end * recording.sampling_rate), recording.num_samples)
