"""Checks of a data directory before any work: manifests, audio headers, references.

Only audio headers are read here. Samples are checked when features are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import soundfile
from lhotse import Recording, RecordingSet, SupervisionSegment, SupervisionSet

from asr_am.data.audio import is_plain_file
from asr_am.data.manifests import (
    RECORDINGS,
    SETS,
    SUPERVISIONS,
    channel_of,
    check_manifest,
    read_recordings,
    read_supervisions,
)
from asr_am.data.stm import check_stm
from asr_am.data.textfile import read_lines
from asr_am.errors import InputError
from asr_am.parallel import parallel_map

logger = logging.getLogger(__name__)

REMEDY = "correct the corpus preparation and run stage 0 (data) again"
TIME_TOLERANCE = 1e-3  # seconds that a segment may exceed its recording by (times are rounded)
HEADERS_PER_TASK = 64


def validate_data_dir(
    data_dir: Path, sets: Sequence[str] = SETS, jobs: int = 1, *, allow_commands: bool = False
) -> None:
    """Checks a data directory.

    Every set: manifests are complete and sorted, utterances lie inside their recordings with one channel, speaker and
    text, audio has the rate, channels and length of its manifest. Dev and test: the reference matches the utterances,
    and no speaker is in train. Lexicon and LM texts: present and UTF-8 (stage lang parses them).

    Raises:
        InputError: with file, utterance and remedy, for the first problem.
    """
    supervisions: dict[str, SupervisionSet] = {}
    for subset in sets:
        recordings = read_recordings(data_dir, subset, allow_commands=allow_commands)
        supervisions[subset] = read_supervisions(data_dir, subset)
        manifest = data_dir / subset / SUPERVISIONS
        check_utterances(manifest, list(supervisions[subset]))
        check_segments(manifest, recordings, supervisions[subset])
        check_manifest(recordings, manifest.with_name(RECORDINGS))
        check_manifest(supervisions[subset], manifest)
        parallel_map(check_header, list(recordings), jobs, f"check {subset} audio", chunk=HEADERS_PER_TASK)
        if subset != "train":
            check_stm(data_dir / subset / "ref.stm", supervisions[subset])
    check_disjoint(supervisions)
    check_texts(data_dir)


def check_utterances(manifest: Path, segments: Sequence[SupervisionSegment]) -> None:
    """Checks that ids are unique and sorted, and that each utterance has a speaker and text."""
    for before, after in pairwise(segment.id for segment in segments):
        if before == after:
            raise InputError(f"{manifest}: utterance {after} is listed twice; {REMEDY}")
        if before > after:
            raise InputError(f"{manifest}: not sorted: utterance {after} comes after {before}; {REMEDY}")
    for segment in segments:
        if not segment.speaker or segment.speaker.split() != [segment.speaker]:
            raise InputError(f"{manifest}: utterance {segment.id} has no speaker (or one with blanks); {REMEDY}")
        words = (segment.text or "").split()
        if not words:
            raise InputError(f"{manifest}: utterance {segment.id} has no text; transcribe it or leave it out")
        if segment.text != " ".join(words):
            raise InputError(f"{manifest}: utterance {segment.id}: words must be separated by single blanks; {REMEDY}")
        if segment.id.split() != [segment.id]:
            raise InputError(f"{manifest}: utterance id '{segment.id}' holds a blank; {REMEDY}")


def check_segments(manifest: Path, recordings: RecordingSet, segments: SupervisionSet) -> None:
    """Checks that every utterance lies inside a recording, on one of its channels."""
    by_id: dict[str, Recording] = {}
    for recording in recordings:
        if recording.id in by_id:
            raise InputError(f"{manifest.parent}: recording {recording.id} is listed twice; {REMEDY}")
        by_id[recording.id] = recording
    for segment in segments:
        found = by_id.get(segment.recording_id)
        if found is None:
            raise InputError(f"{manifest}: utterance {segment.id}: no recording {segment.recording_id}; {REMEDY}")
        if segment.start < 0 or segment.end > found.duration + TIME_TOLERANCE:
            raise InputError(
                f"{manifest}: utterance {segment.id} ({segment.start:.3f} to {segment.end:.3f} s) is outside its "
                f"recording {found.id} (0 to {found.duration:.3f} s); {REMEDY}"
            )
        if channel_of(segment) not in found.channel_ids:
            raise InputError(
                f"{manifest}: utterance {segment.id} is on channel {channel_of(segment)}, but recording {found.id} has "
                f"{found.channel_ids}; {REMEDY}"
            )


def check_header(recording: Recording) -> None:
    """Checks that a plain audio file has the rate, length and channels of its manifest."""
    paths = [source.source for source in recording.sources if source.type == "file"]
    for path in paths:
        if not Path(path).is_file():
            raise InputError(f"{path}: no such audio file (recording {recording.id}); {REMEDY}")
    if not is_plain_file(recording):
        return
    try:
        header = soundfile.info(paths[0])
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise InputError(f"{paths[0]}: empty or not audio ({error}); replace it") from error
    if header.samplerate != recording.sampling_rate:
        raise InputError(
            f"{paths[0]}: sampled at {header.samplerate} Hz, but its manifest says {recording.sampling_rate}; {REMEDY}"
        )
    if header.frames == 0 or header.frames < recording.num_samples:
        raise InputError(
            f"{paths[0]}: holds {header.frames} of {recording.num_samples} samples: empty or truncated; replace it"
        )
    if header.channels < len(recording.channel_ids):
        raise InputError(f"{paths[0]}: has {header.channels} of {len(recording.channel_ids)} channels; {REMEDY}")


def check_disjoint(supervisions: dict[str, SupervisionSet]) -> None:
    """Checks that utterance ids are unique over all sets, and that no speaker of train is in dev or test."""
    owner: dict[str, str] = {}
    for subset, segments in supervisions.items():
        for segment in segments:
            if segment.id in owner:
                raise InputError(f"utterance {segment.id} is in both {owner[segment.id]} and {subset}; {REMEDY}")
            owner[segment.id] = subset
    training = {segment.speaker for segment in supervisions.get("train", ())}
    for subset in supervisions.keys() - {"train"}:
        shared = sorted(training & {segment.speaker for segment in supervisions[subset]})
        if shared:
            raise InputError(f"speaker {shared[0]} is in both train and {subset} ({len(shared)} in all); {REMEDY}")


def check_texts(data_dir: Path) -> None:
    """Checks that lexicon and LM texts exist, are not empty and are UTF-8."""
    lm_files = sorted([*data_dir.glob("lm/*.txt"), *data_dir.glob("lm/*.arpa")])
    if not lm_files:
        raise InputError(f"{data_dir / 'lm'}: holds neither LM text (*.txt) nor an LM (*.arpa); {REMEDY}")
    optional = [path for path in (data_dir / "nonspeech.txt", data_dir / "en.glm") if path.exists()]
    for path in [data_dir / "lexicon.txt", *lm_files, *optional]:
        if not any(line.strip() for line in read_lines(path, REMEDY)) and path not in optional:
            raise InputError(f"{path}: empty; {REMEDY}")
