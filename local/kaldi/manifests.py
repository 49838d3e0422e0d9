"""lhotse manifests as a Kaldi data directory: a CutSet's file, or a folder with recordings and supervisions."""

from __future__ import annotations

from pathlib import Path

from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet

from asr_am.data.manifests import channel_of
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz")


def manifest_files(given: Path) -> list[Path]:
    """Returns the file of cuts, or those of recordings and supervisions, [] if `given` has none."""
    if given.is_file():
        return [given]
    for names in (("cuts",), ("recordings", "supervisions")):
        for suffix in SUFFIXES:
            files = [given / f"{name}{suffix}" for name in names]
            if all(path.is_file() for path in files):
                return files
    return []


def write_from_manifests(files: list[Path], out: Path) -> Path:
    """Writes wav.scp, segments, text, utt2spk and, where genders are known, spk2gender. Returns `out`.

    Raises:
        InputError: a manifest is not readable, or has audio that is no file.
    """
    recordings, supervisions = _read(files)
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "wav.scp", [f"{recording.id} {_file(recording, files[0])}" for recording in recordings])
    with_text = [segment for segment in supervisions if segment.text]
    if not with_text:
        raise InputError(f"{files[-1]}: no supervision has a text; give transcribed speech")
    segments = [f"{s.id} {s.recording_id} {s.start} {s.end} {channel_of(s)}" for s in with_text]
    write_lines(out / "segments", segments)
    write_lines(out / "text", [f"{segment.id} {segment.text}" for segment in with_text])
    write_lines(out / "utt2spk", [f"{segment.id} {_speaker(segment)}" for segment in with_text])
    genders = {_speaker(s): s.gender[0].lower() for s in with_text if s.gender and s.gender[0].lower() in "fm"}
    if genders:
        write_lines(out / "spk2gender", [f"{speaker} {gender}" for speaker, gender in sorted(genders.items())])
    return out


def _read(files: list[Path]) -> tuple[list[Recording], list[SupervisionSegment]]:
    try:
        if len(files) == 1:
            recordings, supervisions, _ = CutSet.from_file(files[0]).decompose()
        else:
            recordings, supervisions = RecordingSet.from_file(files[0]), SupervisionSet.from_file(files[1])
        if recordings is None or supervisions is None:
            raise ValueError("no recordings or no supervisions")
        return sorted(recordings, key=lambda r: r.id), sorted(supervisions, key=lambda s: s.id)
    except Exception as error:  # lhotse, JSON and gzip raise many types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{files[0]}: not a readable lhotse manifest ({reason}); write it again") from error


def _file(recording: Recording, manifest: Path) -> Path:
    """Returns the audio file of a recording. Relative paths count from the manifest's folder, then from here."""
    if len(recording.sources) != 1 or recording.sources[0].type != "file" or recording.transforms:
        raise InputError(
            f"{manifest}: the audio of {recording.id} is not one file as it is; save the cuts' audio first "
            "(CutSet.save_audios)"
        )
    path = Path(recording.sources[0].source)
    beside = manifest.parent / path
    return (beside if beside.exists() else path).absolute()


def _speaker(segment: SupervisionSegment) -> str:
    return (segment.speaker or segment.id).replace(" ", "_")
