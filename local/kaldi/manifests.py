"""lhotse manifests as a Kaldi data directory: a file of cuts, or one of recordings and one of supervisions.

Every cut is used as lhotse would play it. A cut of an audio file as it is stays in place. The audio of any other
(mixed or padded cuts, other speeds, tempos and volumes, several files) is written to wav files. All else is refused or
counted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import soundfile
from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet
from lhotse.audio.backend import audio_backend
from lhotse.augmentation import Resample, Speed, Tempo, Volume
from lhotse.cut import Cut, MixedCut, PaddingCut
from lhotse.cut.data import DataCut
from lhotse.utils import fastcopy

from asr_am.data.audio import reason
from asr_am.data.issue_counter import IssueCounter
from asr_am.data.kaldi_audio import STARTED_IN
from asr_am.data.manifests import channel_of
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".yaml", ".yaml.gz")
CUTS, RECORDINGS, SUPERVISIONS = "cuts", "recordings", "supervisions"
KIND = re.compile(rf"(?<![A-Za-z])({CUTS}|{RECORDINGS}|{SUPERVISIONS})(?![A-Za-z])")
PLAYED = (Speed, Resample, Tempo, Volume)  # transforms that read nothing but the recording
TOLERANCE = 0.01  # seconds that a supervision may exceed its cut by (times are rounded)
SAVE = "save the cuts' audio first (CutSet.save_audios)"


class Utterance(NamedTuple):
    """A supervision with times in its recording. Identical ones, in cuts that overlap, are one."""

    id: str
    recording: str
    start: float
    end: float
    channel: int
    text: str
    speaker: str
    gender: str


@dataclass
class _Writer:
    """Collects what the directory will hold.

    Attributes:
        out: the directory.
        manifest: the user's file, for messages.
        root: folder that relative paths begin at, None: the nearest one at or above the manifest, then the user's.
        issues: counts issues.
    """

    out: Path
    manifest: Path
    root: Path | None
    issues: IssueCounter

    def __post_init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.utterances: list[Utterance] = []
        self._recordings, self._speakers = _Names(), _Names()

    def add(self, cut: Cut) -> None:
        if isinstance(cut, DataCut) and not cut.has_recording:
            self.issues.add("cut without a recording: left out", cut.id, max(len(cut.supervisions), 1))
        elif isinstance(cut, DataCut) and _is_plain(cut.recording):
            self._add_plain(cut)
        elif not isinstance(cut, PaddingCut) and any(_words(segment) for segment in cut.supervisions):
            self._add_played(cut)

    def _add_plain(self, cut: DataCut) -> None:
        path = self._find(cut.recording.sources[0].source)
        name = self._recordings((cut.recording_id, path), cut.recording_id)
        self.files[name] = path
        for segment in cut.supervisions:
            if segment.start < -TOLERANCE or segment.end > cut.duration + TOLERANCE:
                self.issues.add("supervision that reaches beyond its cut: used whole, from its recording", segment.id)
            self._add_utterance(segment.with_offset(cut.start), name, channel_of(segment))

    def _add_played(self, cut: Cut) -> None:
        played = self._with_files(cut)
        name = self._recordings(len(self.files), cut.id)
        path = self.files[name] = self.out / "played" / f"{len(self.files)}.wav"
        self.issues.add("cut that is not one file as it is: played by lhotse into a wav file", cut.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with audio_backend("LibsndfileBackend"):
                samples_CN = played.load_audio()
            if len(samples_CN) > 1:
                raise InputError(f"{self.manifest}: cut {cut.id}: has {len(samples_CN)} channels after mixing; {SAVE}")
            soundfile.write(path, samples_CN.T, cut.sampling_rate, subtype="FLOAT")
        except InputError:
            raise
        except Exception as error:  # lhotse and its backends raise many types. The audio then counts as missing
            self.issues.add("cut that lhotse cannot play: without audio", f"{cut.id}: {reason(error)}")
        for segment in cut.supervisions:
            if segment.start < -TOLERANCE or segment.end > cut.duration + TOLERANCE:
                self.issues.add("supervision that reaches beyond its cut, which is played: left out", segment.id)
            else:
                self._add_utterance(segment, name, 0)

    def _add_utterance(self, segment: SupervisionSegment, recording: str, channel: int) -> None:
        if not (text := _words(segment)):
            self.issues.add("supervision without a text: left out", segment.id)
            return
        gender = (segment.gender or "")[:1].lower()
        speaker = self._speakers(segment.speaker, segment.speaker) if segment.speaker else ""
        name = re.sub(r"\s+", "_", segment.id)
        self.utterances.append(Utterance(name, recording, segment.start, segment.end, channel, text, speaker, gender))

    def _with_files(self, cut: Cut) -> Cut:
        """Returns the cut with absolute paths. Raises InputError for audio that lhotse would run, fetch or make up."""
        if isinstance(cut, MixedCut):
            self._check_transforms(cut.id, cut.transforms)
            tracks = [fastcopy(track, cut=self._with_files(track.cut)) for track in cut.tracks]
            return fastcopy(cut, tracks=tracks)
        if isinstance(cut, PaddingCut):
            return cut
        if not cut.has_recording:
            raise InputError(f"{self.manifest}: cut {cut.id}: has features but no recording; {SAVE}")
        self._check_transforms(cut.id, cut.recording.transforms)
        sources = []
        for source in cut.recording.sources:
            if source.type != "file":
                raise InputError(f"{self.manifest}: cut {cut.id}: its audio is of type {source.type!r}; {SAVE}")
            sources.append(fastcopy(source, source=str(self._find(source.source))))
        return fastcopy(cut, recording=fastcopy(cut.recording, sources=sources))

    def _check_transforms(self, name: str, transforms: object) -> None:
        for transform in transforms or ():  # type: ignore[attr-defined]
            if not isinstance(transform, PLAYED):
                kind = transform.get("name") if isinstance(transform, dict) else type(transform).__name__
                raise InputError(f"{self.manifest}: cut {name}: the transform {kind} is not played here; {SAVE}")

    def _find(self, source: str) -> Path:
        """Returns the file of a source, or where it should be."""
        if "\n" in source or source.endswith("|"):
            raise InputError(f"{self.manifest}: {source}: not a name of an audio file here; rename it")
        path = Path(source)
        folder = self.manifest.absolute().parent
        folders = [self.root] if self.root else [folder, *folder.parents, *STARTED_IN]
        return next((found for above in folders if (found := above / path).is_file()), folders[0] / path).absolute()

    def write(self) -> None:
        """Writes the directory. Raises InputError if nothing is transcribed."""
        if not self.utterances:
            raise InputError(f"{self.manifest}: no supervision has a text; give transcribed speech")
        utterances = sorted(self._distinct())
        write_lines(self.out / "wav.scp", [f"{name} {self.files[name]}" for name in sorted(self.files)])
        write_lines(self.out / "segments", [f"{u.id} {u.recording} {u.start} {u.end} {u.channel}" for u in utterances])
        write_lines(self.out / "text", [f"{u.id} {u.text}" for u in utterances])
        write_lines(self.out / "utt2spk", [f"{u.id} {u.speaker or u.id}" for u in utterances])
        genders = {u.speaker or u.id: u.gender for u in utterances if u.gender and u.gender in "fm"}
        if genders:
            write_lines(self.out / "spk2gender", [f"{name} {gender}" for name, gender in sorted(genders.items())])

    def _distinct(self) -> Iterator[Utterance]:
        """Yields each utterance once, with an id of its own."""
        once = list(dict.fromkeys(self.utterances))
        if len(once) < len(self.utterances):
            self.issues.add("supervision in several cuts: once is enough", "", len(self.utterances) - len(once))
        repeated = {name for name, count in Counter(utterance.id for utterance in once).items() if count > 1}
        names = _Names(utterance.id for utterance in once if utterance.id not in repeated)
        for number, utterance in enumerate(once):
            if utterance.id in repeated:
                self.issues.add("supervision ids that are not unique: after the name of the recording", utterance.id)
                utterance = utterance._replace(id=names(number, f"{utterance.recording}-{utterance.id}"))
            yield utterance


class _Names:
    """Gives every key a name of its own without blanks."""

    def __init__(self, taken: Iterator[str] | tuple[()] = ()) -> None:
        self._names: dict[Hashable, str] = {}
        self._taken = set(taken)

    def __call__(self, key: Hashable, wanted: str) -> str:
        if key not in self._names:
            name = base = re.sub(r"\s+", "_", wanted)
            number = 2
            while name in self._taken:
                name, number = f"{base}-{number}", number + 1
            self._names[key] = name
            self._taken.add(name)
        return self._names[key]


def manifest_files(given: Path) -> list[Path]:
    """Returns the file of cuts, or those of recordings and supervisions, [] for a folder that has none.

    lhotse's own names are known: PREFIX_recordings_PART.jsonl.gz, PREFIX_cuts_PART.jsonl.gz.

    Raises:
        InputError: a folder has several, or a file of recordings or supervisions is alone.
    """
    if given.is_file():
        return _with_partner(given)
    for names in ((CUTS,), (RECORDINGS, SUPERVISIONS)):
        for suffix in SUFFIXES:
            files = [given / f"{name}{suffix}" for name in names]
            if all(path.is_file() for path in files):
                return files
    if (given / "wav.scp").exists() or not given.is_dir():
        return []
    return _found(given)


def _found(folder: Path) -> list[Path]:
    kinds: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        if path.name.endswith(SUFFIXES) and path.is_file() and (kind := KIND.search(path.name)):
            kinds[kind[1]].append(path)
    pairs = [path for path in kinds[RECORDINGS] if _partner(path, RECORDINGS, SUPERVISIONS) in kinds[SUPERVISIONS]]
    found = kinds[CUTS] or pairs
    if len(found) > 1:
        raise InputError(
            f"{folder}: has {len(found)} manifests ({' '.join(path.name for path in found[:5])}"
            f"{', ...' if len(found) > 5 else ''}); give one of these files instead of the folder"
        )
    return _with_partner(found[0]) if found else []


def _with_partner(file: Path) -> list[Path]:
    kind = KIND.search(file.name)
    if kind is None or kind[1] == CUTS:
        return [file]
    files = [_partner(file, kind[1], other) for other in (RECORDINGS, SUPERVISIONS)]
    for path in files:
        if not path.is_file():
            raise InputError(f"{file}: {path.name} is not beside it; recordings and supervisions belong together")
    return files


def _partner(path: Path, kind: str, other: str) -> Path:
    return path.with_name(KIND.sub(lambda found: other if found[0] == kind else found[0], path.name))


def write_from_manifests(files: list[Path], out: Path, issues: IssueCounter, root: Path | None = None) -> Path:
    """Writes wav.scp, segments, text, utt2spk and, where genders are known, spk2gender. Returns `out`.

    Args:
        files: as from `manifest_files`.
        out: the Kaldi data directory.
        issues: counts issues.
        root: folder that relative paths begin at.

    Raises:
        InputError: a manifest is not readable, or has audio that lhotse would run, fetch or make up.
    """
    out.mkdir(parents=True, exist_ok=True)
    writer = _Writer(out, files[0], root, issues)
    for cut in _cuts(files, issues):
        writer.add(cut)
    writer.write()
    return out


def _cuts(files: list[Path], issues: IssueCounter) -> Iterator[Cut]:
    """Yields the cuts. Recordings with their supervisions are cuts, too."""
    try:
        if len(files) == 1:
            cuts = CutSet.from_file(files[0])
            if not isinstance(cuts, CutSet):
                raise ValueError(f"it holds a {type(cuts).__name__} instead of cuts")
            read = list(cuts)
        else:
            read = list(_joined(files, issues))
    except InputError:
        raise
    except Exception as error:  # lhotse, JSON and gzip raise many types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{files[0]}: not a readable lhotse manifest ({reason}); write it again") from error
    yield from read


def _joined(files: list[Path], issues: IssueCounter) -> Iterator[Cut]:
    segments: dict[str, list[SupervisionSegment]] = defaultdict(list)
    for segment in SupervisionSet.from_file(files[1]):
        segments[segment.recording_id].append(segment)
    known: set[str] = set()
    for recording in RecordingSet.from_file(files[0]):
        if recording.id in known:
            raise InputError(f"{files[0]}: recording {recording.id} is listed twice; remove or rename one")
        known.add(recording.id)
        yield fastcopy(recording.to_cut(), supervisions=segments.get(recording.id, []))
    for name in sorted(segments.keys() - known):
        issues.add("supervision without its recording: left out", segments[name][0].id, len(segments[name]))


def _is_plain(recording: Recording) -> bool:
    return len(recording.sources) == 1 and recording.sources[0].type == "file" and not recording.transforms


def _words(segment: SupervisionSegment) -> str:
    """Returns the text with blanks instead of line ends, tabs and the like."""
    return " ".join((segment.text or "").split())
