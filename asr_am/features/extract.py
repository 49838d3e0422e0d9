"""Stage `features`: static features of every utterance in Kaldi archives, and CMVN statistics of every speaker.

Written for each set, and independent of the number of jobs:

    <set>.<n>.ark, <set>.scp      features
    <set>_cmvn.ark, .scp          CMVN statistics by speaker
    <set>_utt2spk                 speaker of each utterance
    <set>_features.jsonl.gz       the features as a lhotse manifest, with paths relative to the folder:
                                  `lhotse.load_manifest(file).with_path_prefix(folder)`
    <set>_dropped.txt             utterances that are too short, with their number of frames

and options.json for all sets.

Shapes: N samples, T frames, D features.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from lhotse import Features, FeatureSet, Recording, SupervisionSegment

from asr_am import disk
from asr_am.data.audio import read_utterances
from asr_am.data.kaldi_archive import Entry, save_entry, write_archive, write_index
from asr_am.data.manifests import SETS, read_recordings, read_supervisions
from asr_am.data.temporary import replacing
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.extensions import class_path
from asr_am.features.cmvn_deltas import accumulate
from asr_am.features.kinds import FRAME_SHIFT, FeatureKind
from asr_am.features.spectral import SpectralOptions
from asr_am.parallel import parallel_map

logger = logging.getLogger(__name__)

MIN_FRAMES = 9  # three phones of three states
CLIPPED_LEVEL = 32112.0  # the largest value of mu-law is 32124
CLIPPED_FRACTION = 0.01  # share of clipped samples from which an utterance is reported
ARCHIVE_SECONDS = 300.0  # of speech per archive
MAX_ARCHIVES = 200


@dataclass(frozen=True)
class ExtractTask:
    """One archive to write.

    Attributes:
        items: recordings, each with its utterances.
    """

    archive: Path
    items: list[tuple[Recording, list[SupervisionSegment]]]


@dataclass
class ArchiveResult:
    """The contents of one archive, and utterances to report.

    Attributes:
        utterances: (utterance, place, frames) of everything written.
        stats: CMVN statistics by speaker.
        dropped: (utterance id, frames) of utterances that are too short.
        clipped: (utterance id, share of clipped samples) of clipped utterances.
    """

    archive: Path
    utterances: list[tuple[SupervisionSegment, Entry, int]] = field(default_factory=list)
    stats: dict[str, np.ndarray] = field(default_factory=dict)
    dropped: list[tuple[str, int]] = field(default_factory=list)
    clipped: list[tuple[str, float]] = field(default_factory=list)


def extract_features(
    data_dir: Path,
    out: Path,
    kind: str,
    options: FeatureKind,
    *,
    sets: Sequence[str] = SETS,
    jobs: int = 1,
    allow_commands: bool = False,
) -> None:
    """Writes the features of `sets`. Utterances of fewer than nine frames are dropped with a warning.

    Args:
        allow_commands: as for `read_recordings`.

    Raises:
        InputError: options are inconsistent, or audio is missing, truncated, all zero, not finite or of another rate.
            Names the utterance.
    """
    finished = out / "finished"  # what a killed run has written
    finished.mkdir(parents=True, exist_ok=True)
    for subset in sets:
        tasks = make_tasks(data_dir, subset, out, options.sampling_rate, options.resample, allow_commands)
        extract = partial(extract_once, options=options, finished=finished)
        results = parallel_map(extract, tasks, jobs, f"{kind} {subset}")
        write_lists(out, subset, results, kind, options)
    disk.remove(finished)
    saved = {"kind": kind, "_target_": class_path(options), **asdict(options)}
    (out / "options.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")


def make_tasks(
    data_dir: Path, subset: str, out: Path, sampling_rate: int, resample: bool, allow_commands: bool = False
) -> list[ExtractTask]:
    """Divides the recordings of a set, in their order, into archives of about equal amounts of speech."""
    segments = defaultdict(list)
    for segment in read_supervisions(data_dir, subset):
        segments[segment.recording_id].append(segment)
    in_set = read_recordings(data_dir, subset, allow_commands=allow_commands)
    recordings = {recording.id: recording for recording in in_set}
    total = sum(segment.duration for members in segments.values() for segment in members)
    num_archives = min(math.ceil(total / ARCHIVE_SECONDS), MAX_ARCHIVES)
    tasks = [ExtractTask(out / f"{subset}.{number}.ark", []) for number in range(1, num_archives + 1)]
    done = 0.0
    for recording_id, members in sorted(segments.items()):
        if recording_id not in recordings:
            raise InputError(
                f"{data_dir / subset}: utterance {members[0].id} has no recording; run stage 0 (data) again"
            )
        recording = _at_rate(recordings[recording_id], sampling_rate, resample)
        tasks[min(int(done / total * num_archives), num_archives - 1)].items.append((recording, members))
        done += sum(segment.duration for segment in members)
    return [task for task in tasks if task.items]


def _at_rate(recording: Recording, sampling_rate: int, resample: bool) -> Recording:
    if recording.sampling_rate == sampling_rate:
        return recording
    if not resample:
        raise InputError(
            f"recording {recording.id}: sampled at {recording.sampling_rate} Hz, but features are for {sampling_rate} "
            "Hz; set the sampling rate of the corpus, or features.resample=true"
        )
    return recording.resample(sampling_rate)


def extract_once(task: ExtractTask, options: FeatureKind, finished: Path) -> ArchiveResult:
    """Extracts an archive, unless a killed run with the same options has done so and has left a file in `finished`."""
    path = finished / f"{task.archive.name}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):  # after a power cut anything may be wrong with it
        return _read_result(path, task)
    result = extract_archive(task, options)
    values = {
        "utterances": [(segment.id, asdict(entry), frames) for segment, entry, frames in result.utterances],
        "stats": {speaker: stats.tolist() for speaker, stats in result.stats.items()},
        "dropped": result.dropped, "clipped": result.clipped,
    }  # fmt: skip
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values), encoding="utf-8")
    return result


def _read_result(path: Path, task: ExtractTask) -> ArchiveResult:
    values = json.loads(path.read_text(encoding="utf-8"))
    segments = {segment.id: segment for _, members in task.items for segment in members}
    return ArchiveResult(
        task.archive,
        [(segments[name], Entry(**entry), frames) for name, entry, frames in values["utterances"]],
        {speaker: np.array(stats) for speaker, stats in values["stats"].items()},
        [(name, frames) for name, frames in values["dropped"]],
        [(name, share) for name, share in values["clipped"]],
    )


def extract_archive(task: ExtractTask, options: FeatureKind) -> ArchiveResult:
    """Computes and writes the features of one archive."""
    result, extractor = ArchiveResult(task.archive), options.extractor()
    with replacing(task.archive) as temporary, temporary.open("wb") as file:
        for recording, segments in task.items:
            for segment, samples_N in read_utterances(recording, segments):
                features_TD = _checked_features(recording, segment, samples_N, extractor)
                if len(features_TD) < MIN_FRAMES:
                    result.dropped.append((segment.id, len(features_TD)))
                    continue
                clipped = np.count_nonzero(np.abs(samples_N) >= CLIPPED_LEVEL) / len(samples_N)
                if clipped > CLIPPED_FRACTION:
                    result.clipped.append((segment.id, clipped))
                entry = replace(save_entry(file, segment.id, features_TD), path=task.archive.name)
                result.utterances.append((segment, entry, len(features_TD)))
                stats = accumulate(features_TD)
                result.stats[segment.speaker] = result.stats.get(segment.speaker, 0.0) + stats
    return result


def _checked_features(
    recording: Recording,
    segment: SupervisionSegment,
    samples_N: np.ndarray,
    extractor: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    where = f"{recording.sources[0].source}: utterance {segment.id}"
    if len(samples_N) and samples_N.min() == samples_N.max():
        raise InputError(f"{where}: every sample is {samples_N[0]:g}; replace the audio or remove the utterance")
    features_TD = extractor(samples_N)
    if not np.isfinite(features_TD).all():
        raise InputError(f"{where}: some samples are not finite; replace the audio or remove the utterance")
    return features_TD


def write_lists(out: Path, subset: str, results: Sequence[ArchiveResult], kind: str, options: FeatureKind) -> None:
    """Writes the files that cover all archives of a set: .scp, utt2spk, CMVN, manifest, dropped utterances."""
    rows = sorted((row for result in results for row in result.utterances), key=lambda row: row[0].id)
    _report(out, subset, results, len(rows))
    write_index(out, subset, [(segment.id, entry) for segment, entry, _ in rows])
    write_lines(out / f"{subset}_utt2spk", [f"{segment.id} {segment.speaker}" for segment, _, _ in rows])
    write_cmvn(out, subset, results)
    manifest = [_manifest_item(segment, frames, str(entry), kind, options) for segment, entry, frames in rows]
    FeatureSet.from_features(manifest).to_file(out / f"{subset}_features.jsonl.gz")
    seconds = sum(frames for _, _, frames in rows) * FRAME_SHIFT
    logger.info(
        "%s: %d utterances, %.2f hours, %d %s features", out / subset, len(rows), seconds / 3600, options.dim, kind
    )


def write_cmvn(out: Path, subset: str, results: Sequence[ArchiveResult]) -> None:
    """Sums the CMVN statistics of every speaker over the archives, and writes them as double matrices."""
    total: dict[str, np.ndarray] = {}
    for result in results:
        for speaker, stats in result.stats.items():
            total[speaker] = total.get(speaker, 0.0) + stats
    write_archive(out, f"{subset}_cmvn", sorted(total.items()))


def _manifest_item(
    segment: SupervisionSegment, frames: int, location: str, kind: str, options: FeatureKind
) -> Features:
    return Features(
        type=_lhotse_type(kind, options),
        num_frames=frames,
        num_features=options.dim,
        frame_shift=FRAME_SHIFT,
        sampling_rate=options.sampling_rate,
        start=segment.start,
        duration=round(frames * FRAME_SHIFT, 6),  # lhotse requires exactly num_frames * frame_shift
        storage_type="kaldiio",
        storage_path=location,
        storage_key=segment.id,
        recording_id=segment.recording_id,
        channels=segment.channel,
    )


def _lhotse_type(kind: str, options: FeatureKind) -> str:
    if not isinstance(options, SpectralOptions):
        return kind
    return "fbank" if options.num_ceps is None else "mfcc"


def _report(out: Path, subset: str, results: Sequence[ArchiveResult], kept: int) -> None:
    """Logs and lists dropped and clipped utterances. Raises InputError if no utterance is left."""
    dropped = sorted(item for result in results for item in result.dropped)
    clipped = [item for result in results for item in result.clipped]
    listed = out / f"{subset}_dropped.txt"
    write_lines(listed, [f"{utterance} {frames}" for utterance, frames in dropped])
    if not kept:
        raise InputError(f"{subset}: every utterance is under {MIN_FRAMES} frames; check the times of the segments")
    if dropped:
        first, _ = dropped[0]
        logger.warning("%s: %d utterances under %d frames dropped, first %s", listed, len(dropped), MIN_FRAMES, first)
    if clipped:
        worst, fraction = max(clipped, key=lambda item: item[1])
        summary = f"{subset}: {len(clipped)} utterances are clipped, worst {worst} ({fraction:.1%} of its samples)"
        logger.warning(summary)
