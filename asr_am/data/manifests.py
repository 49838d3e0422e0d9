"""Recordings and supervisions of a set (train, dev, test) as lhotse manifests on disk.

Audio below the data directory is listed relative to it, so that the directory can be copied or moved. Other audio is
listed by absolute path. `read_recordings` returns absolute paths in both cases.

A manifest is data: somebody else may have written it. lhotse would run a source of type `command` in a shell, download
one of type `url`, and do the same for the impulse response of a transform. So recordings are files, at other speeds or
sampling rates at most, and commands only where the user has allowed them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lhotse import Recording, RecordingSet, SupervisionSegment, SupervisionSet, validate
from lhotse.augmentation import Resample, Speed

from asr_am.data.checksums import intact
from asr_am.data.temporary import replacing
from asr_am.errors import InputError

logger = logging.getLogger(__name__)

SETS = ("train", "dev", "test")
RECORDINGS = "recordings.jsonl.gz"
SUPERVISIONS = "supervisions.jsonl.gz"

MAX_SECONDS = 1e7  # of a recording (four months)
_UNREADABLE = (AttributeError, EOFError, KeyError, OSError, RecursionError, TypeError, ValueError, zlib.error)

TRANSFORMS = (Speed, Resample)  # that a recording may have
Manifest = TypeVar("Manifest", RecordingSet, SupervisionSet)


def write_set(
    data_dir: Path, subset: str, recordings: Iterable[Recording], supervisions: Iterable[SupervisionSegment]
) -> None:
    """Writes both manifests of `subset`, sorted by id, each atomically.

    Raises:
        InputError: lhotse's own validation fails (negative durations, duplicate channels, ...).
    """
    folder = data_dir / subset
    folder.mkdir(parents=True, exist_ok=True)
    by_id = sorted(
        (_with_relative_paths(recording, data_dir) for recording in recordings), key=lambda recording: recording.id
    )
    segments = sorted(supervisions, key=lambda segment: segment.id)
    _write(RecordingSet.from_recordings(by_id), folder / RECORDINGS)
    _write(SupervisionSet.from_segments(segments), folder / SUPERVISIONS)
    hours = sum(segment.duration for segment in segments) / 3600
    speakers = len({segment.speaker for segment in segments})
    logger.info("%s: %d utterances, %d speakers, %.2f hours of speech", folder, len(segments), speakers, hours)


def read_recordings(data_dir: Path, subset: str, *, allow_commands: bool = False) -> RecordingSet:
    """Reads the recordings of `subset` with absolute audio paths.

    Sources may be commands, which run whenever the audio is read, if that is allowed.

    Raises:
        InputError: the manifest is missing or damaged, or has audio that is not a file.
    """
    path = data_dir / subset / RECORDINGS
    recordings = _read(path, RecordingSet)
    for recording in recordings:
        if problem := _forbidden(recording, ("file", "command") if allow_commands else ("file",)):
            raise InputError(f"{path}: {recording.id}: {problem}")
    return recordings.with_path_prefix(data_dir.resolve())  # an absolute path stays as it is


def read_supervisions(data_dir: Path, subset: str) -> SupervisionSet:
    """Reads the utterances of `subset` in the manifest's order. Raises InputError if missing or damaged."""
    return _read(data_dir / subset / SUPERVISIONS, SupervisionSet)


def channel_of(segment: SupervisionSegment) -> int:
    """Returns the one channel that an utterance is on. Raises InputError if it has several or none."""
    channels = [segment.channel] if isinstance(segment.channel, int) else list(segment.channel)
    if len(channels) != 1:
        raise InputError(f"utterance {segment.id}: is on channels {channels}; give it exactly one")
    return channels[0]


def check_manifest(manifest: RecordingSet | SupervisionSet, path: Path) -> None:
    """Raises InputError, with `path`, if lhotse's own validation fails."""
    try:
        validate(manifest)
    except AssertionError as error:
        raise InputError(f"{path}: {error}; correct the corpus preparation that wrote it") from error


def _with_relative_paths(recording: Recording, data_dir: Path) -> Recording:
    """Returns `recording` with paths below `data_dir` relative to it."""
    roots = data_dir.absolute(), data_dir.resolve()  # they differ if a parent folder is a link
    sources = []
    for source in recording.sources:
        if source.type != "file":
            sources.append(source)
            continue
        path = Path(source.source).absolute()
        root = next((root for root in roots if path.is_relative_to(root)), None)
        sources.append(replace(source, source=str(path.relative_to(root) if root else path)))
    return replace(recording, sources=sources)


def _write(manifest: RecordingSet | SupervisionSet, path: Path) -> None:
    check_manifest(manifest, path)
    with replacing(path) as temporary:
        manifest.to_file(temporary)


def _read(path: Path, kind: type[Manifest]) -> Manifest:
    if not path.is_file():
        raise InputError(f"{path}: no such manifest; run stage 0 (data)")
    try:
        manifest = kind.from_jsonl(intact(path))
        for item in manifest:
            if problem := _recording_problem(item) if isinstance(item, Recording) else _segment_problem(item):
                raise InputError(f"{path}: {item.id}: {problem}; run stage 0 (data) again")
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{path}: not a readable lhotse manifest ({reason}); run stage 0 (data) again") from error
    if len(manifest) == 0:
        raise InputError(f"{path}: the manifest is empty; run stage 0 (data) again")
    return manifest


def _recording_problem(recording: Recording) -> str | None:
    """Returns what has a wrong type or range in a recording, as lhotse does not check files it reads."""
    if not isinstance(recording.id, str):
        return "the id is not a string"
    if not all(isinstance(n, int) and n > 0 for n in (recording.sampling_rate, recording.num_samples)):
        return "sampling_rate and num_samples must be positive integers"
    if not _is_time(recording.duration):
        return f"duration {recording.duration} is not a time"
    if not recording.sources or not all(isinstance(source.source, str) for source in recording.sources):
        return "every source must be a path, a URL or a command"
    channels = [recording.channel_ids, *(source.channels for source in recording.sources)]
    if not all(_are_channels(numbers) for numbers in channels):
        return f"channels {channels} are not lists of integers"
    if not isinstance(recording.transforms, list | None):
        return "transforms are not a list"
    return None


def _segment_problem(segment: SupervisionSegment) -> str | None:
    """Returns what has a wrong type or range in a supervision."""
    if not isinstance(segment.id, str) or not isinstance(segment.recording_id, str):
        return "id and recording_id must be strings"
    if not _is_time(segment.start) or not _is_time(segment.duration):
        return f"start {segment.start} and duration {segment.duration} must be times"
    if not _are_channels([segment.channel] if isinstance(segment.channel, int) else segment.channel):
        return f"channel {segment.channel} is not an integer"
    if not isinstance(segment.text, str | None) or not isinstance(segment.speaker, str | None):
        return "text and speaker must be strings"
    return None


def _forbidden(recording: Recording, source_types: Sequence[str]) -> str | None:
    """Returns what lhotse would run or fetch to read a recording, apart from sources of these types."""
    for source in recording.sources:
        if source.type == "command" and source.type not in source_types:
            return f"the audio is the output of a command, `{source.source}`; look at it, then add --allow-pipes"
        if source.type not in source_types:
            return f"the audio is of type {source.type!r}, not a file; run stage 0 (data) again"
    for transform in recording.transforms or []:
        if not isinstance(transform, TRANSFORMS):
            return f"the transform {type(transform).__name__} is not known here; run stage 0 (data) again"
    return None


def _is_time(seconds: object) -> bool:
    return isinstance(seconds, int | float) and 0 <= seconds < MAX_SECONDS


def _are_channels(numbers: object) -> bool:
    return isinstance(numbers, list) and all(isinstance(number, int) for number in numbers)
