"""Recordings of wav.scp: opens each as a lhotse recording and checks the samples of its utterances.

file                any format of libsndfile: wav, flac, mp3, ogg, sphere, at any rate. Copied to a wav file if its
                    header does not say how long it is (asr_am/data/length.py), or if it is compressed by shorten
                    (asr_am/data/shorten.py)
file.ark:1234       a Kaldi wav archive: copied to a wav file, since only Kaldi reads inside archives
command |           run whenever the audio is read, if the user allows it. `flac -cd F |`, `sph2pipe ... F |` and
                    `cat F |` are read as the files that they are, and nothing is run
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import soundfile
from lhotse import AudioSource, Recording, SupervisionSegment

from asr_am import disk
from asr_am.data.audio import is_plain_file, read_utterances
from asr_am.data.kaldi_archive import Entry, read_entry
from asr_am.data.kaldi_dir import TableEntry, UtteranceSpan
from asr_am.data.length import decode_blocks, has_length, hides_samples, is_endless, is_truncated, stream_hides_samples
from asr_am.data.manifests import channel_of
from asr_am.data.shorten import is_shortened, read_shortened, sphere_header
from asr_am.errors import InputError

ARCHIVE = re.compile(r"(?P<path>.+):(?P<offset>\d{1,18})")
OVERSHOOT = 0.5  # seconds that a segment may exceed its recording by, as in Kaldi's extract-segments
# Exit status of `sox F -t wav - | head -c N`, alone and in a shell.
STOPPED_READING = (-signal.SIGPIPE, 128 + signal.SIGPIPE)
MIN_DURATION = 0.001  # of an utterance, in seconds
# Folders that relative paths may begin at after the data directory and those above it: where the user, and we, stand.
STARTED_IN = (Path(os.environ.get("ASR_AM_STARTED_IN", "")), Path())
SILENCE = "digital silence: left out"
MISSING = "missing audio: left out"
UNREADABLE = "audio that cannot be read: left out"
SIXTEEN_BITS = ("PCM_S8", "PCM_16", "MPEG_LAYER_III")  # (almost) lossless as 16-bit integers


class AudioProblem(Exception):
    """A recording or utterance cannot be used. The message is the kind that is counted, `where` an example."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.where = where


@dataclass(frozen=True)
class AudioOptions:
    """Options of finding and reading audio.

    Attributes:
        root: folder that relative paths begin at. None: the data directory, the nearest folder above it that has the
            file, or the folder where the user stands.
        copies: folder for audio that cannot be read in place (made if needed).
    """

    root: Path | None
    allow_pipes: bool
    copies: Path


@dataclass(frozen=True)
class ScpRecording:
    """A line of wav.scp, the channel of the call that it is, if known, and ids and times of its utterances."""

    name: str
    entry: TableEntry
    channel: int | None
    spans: tuple[tuple[str, UtteranceSpan], ...]


@dataclass
class CheckedRecording:
    """Result of opening a recording and reading its utterances.

    Attributes:
        recording: None if it cannot be used.
        utterances: id -> (start, duration, channel), in seconds.
        problems: (what, where) of each utterance that is left out.
        notes: (what, where) of each issue that was repaired.
    """

    recording: Recording | None = None
    utterances: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def check_pipes(table: dict[str, TableEntry], options: AudioOptions) -> None:
    """Raises InputError for the first command in wav.scp that would have to be run without permission."""
    for entry in table.values():
        if entry.value.endswith("|") and not options.allow_pipes and _plain_command(entry.value) is None:
            raise InputError(
                f"{entry.where}: `{entry.value}` is a command that would be run with your rights; look at the file, "
                "then add --allow-pipes, or name the audio files themselves"
            )


def check_recording(source: ScpRecording, options: AudioOptions) -> CheckedRecording:
    """Opens a recording and reads each of its utterances once."""
    checked = CheckedRecording()
    try:
        recording, channel = open_recording(source.name, source.entry, options)
    except AudioProblem as problem:
        checked.problems = [(str(problem), problem.where)] * len(source.spans)
        return checked
    if recording.num_channels > 1:
        channel = channel if channel is not None else source.channel
        if channel is None and any(span.channel is None for _, span in source.spans):
            checked.notes.append(
                ("recording of several channels: the first is used, as Kaldi does", source.entry.where)
            )
    checked.recording = recording
    if (file := audio_file(source.entry, options)) is not None and hides_samples(file):
        checked.notes.append(("file that goes on after the samples that its header gives: all are used", str(file)))
    truncated = is_plain_file(recording) and is_truncated(Path(recording.sources[0].source))
    if truncated:
        checked.notes.append(
            ("file that ends before its header says: only segments before its end", source.entry.where)
        )
    for utterance, span in source.spans:
        try:
            if truncated and span.end is None:
                raise AudioProblem("utterance without its end, as its file is cut: left out", source.entry.where)
            checked.utterances[utterance] = _locate(recording, utterance, span, channel, checked)
        except AudioProblem as problem:
            checked.problems.append((str(problem), problem.where))
    _check_samples(recording, source.entry.where, checked)
    return checked


def _locate(
    recording: Recording, utterance: str, span: UtteranceSpan, channel: int | None, checked: CheckedRecording
) -> tuple[float, float, int]:
    """Returns start, duration and channel of an utterance. Raises AudioProblem if it is outside its recording."""
    end = recording.duration if span.end is None else span.end
    where = f"{utterance} ({span.start:g} to {end:g} s of {recording.duration:g} s of {recording.id})"
    if end > recording.duration + OVERSHOOT or span.start < 0 or span.start >= recording.duration:
        raise AudioProblem("segment outside its recording: left out", where)
    if end - span.start < MIN_DURATION:
        raise AudioProblem("segment ends before it begins: left out", where)
    if end > recording.duration:
        checked.notes.append((f"segment ends up to {OVERSHOOT:g} s after its recording: cut there", where))
        end = recording.duration
    number = next((number for number in (span.channel, channel, 0) if number is not None), 0)
    number = number if recording.num_channels > 1 else 0
    if number not in recording.channel_ids:
        raise AudioProblem(f"no channel {number} in the recording: left out", where)
    return span.start, end - span.start, number


def _check_samples(recording: Recording, line: str, checked: CheckedRecording) -> None:
    """Reads all utterances and moves those that cannot be used to the problems. `line` is that of wav.scp."""
    segments = [
        SupervisionSegment(utterance, recording.id, start, duration, channel)
        for utterance, (start, duration, channel) in checked.utterances.items()
    ]
    # One by one, so that a file with a damaged end loses only utterances there. A command is run once for all.
    for batch in [[segment] for segment in segments] if is_plain_file(recording) else [segments]:
        unread = {segment.id: (UNREADABLE, segment.id) for segment in batch}
        try:
            for segment, samples_N in read_utterances(recording, batch):
                del unread[segment.id]
                if problem := _samples_problem(samples_N):
                    unread[segment.id] = _speaking(recording, segment) or (problem, segment.id)
        except InputError as error:
            unread = {name: (what, f"{line}: {error}") for name, (what, _) in unread.items()}
        for name, problem_and_example in unread.items():
            del checked.utterances[name]
            checked.problems.append(problem_and_example)


def _samples_problem(samples_N: np.ndarray) -> str | None:
    if not np.isfinite(samples_N).all():
        return "samples that are not numbers: left out"
    if len(samples_N) == 0 or samples_N.min() == samples_N.max():
        return SILENCE
    return None


def _speaking(recording: Recording, segment: SupervisionSegment) -> tuple[str, str] | None:
    """Returns a problem that names a channel that is not silent beside the silent one of the utterance, else None."""
    if recording.num_channels == 1:
        return None
    number = channel_of(segment)
    every = [replace(segment, id=str(channel), channel=channel) for channel in recording.channel_ids]
    problems = {int(found.id): _samples_problem(samples_N) for found, samples_N in read_utterances(recording, every)}
    others = [channel for channel, problem in problems.items() if problem is None]
    if problems[number] != SILENCE or not others:
        return None
    silent = "the first channel" if number == 0 else f"channel {number + 1}"
    where = f"{segment.id}: channel {others[0] + 1} of {recording.sources[0].source} is not silent; to use it write"
    remedy = (
        f"`{recording.id} FILE {others[0] + 1}` into reco2file_and_channel, or {others[0]} as fifth field of segments"
    )
    return f"{silent} is silent and another is not: left out", f"{where} {remedy}"


def open_recording(name: str, entry: TableEntry, options: AudioOptions) -> tuple[Recording, int | None]:
    """Opens the recording of a line of wav.scp. Raises AudioProblem if it cannot be used.

    Returns it, and the channel that its command selects, if any.
    """
    if not entry.value.endswith("|"):
        return _open_named(name, entry, entry.value, options), None
    plain = _plain_command(entry.value)
    if plain is None:
        return _from_command(name, entry, options), None
    try:
        return _open_named(name, entry, plain[0], options), plain[1]
    except AudioProblem:
        if not options.allow_pipes:
            raise
        return _from_command(name, entry, options), None  # e.g. a compressed sphere file


def audio_file(entry: TableEntry, options: AudioOptions) -> Path | None:
    """Returns the file that a line of wav.scp reads its audio from. None if missing, or if a command reads it."""
    value = entry.value
    if value.endswith("|"):
        plain = _plain_command(value)
        if plain is None:
            return None
        value = plain[0]
    archive = ARCHIVE.fullmatch(value)
    return _find(value, entry, options) or (_find(archive["path"], entry, options) if archive else None)


def _open_named(name: str, entry: TableEntry, value: str, options: AudioOptions) -> Recording:
    """Opens the recording in a file or in an entry of an archive."""
    file = _find(value, entry, options)
    if file is not None:
        return _from_file(name, entry, file, options)
    if archive := ARCHIVE.fullmatch(value):
        path = _find(archive["path"], entry, options)
        if path is not None:
            return _from_archive(name, entry, path, int(archive["offset"]), options)
    raise AudioProblem(MISSING, f"{entry.where}: {value}")


def _plain_command(value: str) -> tuple[str, int | None] | None:
    """Returns file and channel of a command that only decodes a file to a wav file, None for any other."""
    try:
        words = shlex.split(value.removesuffix("|"))
    except ValueError:
        return None
    if len(words) < 2 or any(character in value[:-1] for character in "|;&<>$`*?"):
        return None
    program, options, last = Path(words[0]).name, words[1:-1], words[-1]
    if last.startswith("-"):
        return None
    if program == "cat" and not options:
        return last, None
    if program == "flac" and {"c", "d"} <= set("".join(options).replace("-", "")) <= {"c", "d", "s"}:
        return last, None
    if program == "sph2pipe":
        return _sph2pipe(options, last)
    return None


def _sph2pipe(options: Sequence[str], path: str) -> tuple[str, int | None] | None:
    channel, rest = None, list(options)
    while rest:
        option = rest.pop(0)
        if option == "-f" and rest and rest.pop(0) in ("wav", "rif"):
            continue
        if option == "-c" and rest and rest[0] in ("1", "2"):
            channel = int(rest.pop(0)) - 1
        elif option != "-p":
            return None
    return path, channel


def _find(value: str, entry: TableEntry, options: AudioOptions) -> Path | None:
    """Returns the file that `value` names, None if there is none, see `AudioOptions.root`."""
    try:
        path = Path(value).expanduser()
        if path.is_absolute() or options.root is not None:
            candidates = [path if path.is_absolute() else (options.root or Path()) / path]
        else:
            scp = Path(entry.where.rsplit(":", 1)[0])
            folders = dict.fromkeys((scp.absolute().parent, scp.resolve().parent))  # wav.scp may be a link
            candidates = [above / path for folder in folders for above in (folder, *folder.parents)]
            candidates += [folder / path for folder in STARTED_IN]
        return next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
    except (OSError, RuntimeError):  # an impossible file name, or the home of an unknown user
        return None


def _from_file(name: str, entry: TableEntry, path: Path, options: AudioOptions) -> Recording:
    try:
        if is_shortened(path):
            path = _decompress(path, entry, options)
        elif not has_length(path) or hides_samples(path):  # copied, as the manifest is checked against the header again
            path = _decode(path, entry, options)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        reason = "damaged, empty, without a header or of an unknown format"
        if _is_mpeg4(path):
            reason = "AAC or other MPEG-4 audio, which is not read; convert it with ffmpeg to flac or wav"
        raise AudioProblem(UNREADABLE, f"{entry.where}: {path}: {reason}") from error
    header = soundfile.info(path)
    source = AudioSource("file", list(range(header.channels)), str(path))
    return _recording(name, entry, source, header.frames, header.samplerate)


def _is_mpeg4(path: Path) -> bool:
    """True for the container of m4a, mp4 and mov files, which libsndfile does not read."""
    try:
        with path.open("rb") as file:
            return file.read(8)[4:] == b"ftyp"
    except OSError:
        return False


def _decompress(path: Path, entry: TableEntry, options: AudioOptions) -> Path:
    """Copies a sphere file that is compressed by shorten to a wav file of the same samples."""
    try:
        samples_NC, rate = read_shortened(path)
    except InputError as error:
        raise AudioProblem(UNREADABLE, f"{entry.where}: {error}") from error
    mu_law = sphere_header(path)[0]["sample_coding"].startswith("ulaw")
    return _write_copy(entry, options, rate, samples_NC.shape[1], "ULAW" if mu_law else "PCM_16", [samples_NC])


def _decode(path: Path, entry: TableEntry, options: AudioOptions) -> Path:
    """Copies a whole file to a wav file, block by block."""
    header = soundfile.info(path)
    subtype = "PCM_16" if header.subtype in SIXTEEN_BITS else "FLOAT"

    def blocks() -> Iterator[np.ndarray]:
        try:
            yield from decode_blocks(path)
        except InputError as error:
            raise AudioProblem(UNREADABLE, f"{entry.where}: {error}") from error

    return _write_copy(entry, options, header.samplerate, header.channels, subtype, blocks())


def _write_copy(
    entry: TableEntry, options: AudioOptions, rate: int, channels: int, subtype: str, blocks: Iterable[np.ndarray]
) -> Path:
    """Writes the audio of a line of wav.scp to a wav file named by the line's number. Raises InputError on failure."""
    options.copies.mkdir(parents=True, exist_ok=True)
    copy = options.copies / f"{entry.where.rsplit(':', 1)[1]}.wav"
    try:
        with soundfile.SoundFile(copy, "w", rate, channels, subtype) as file:
            for block in blocks:
                file.write(block)
    except AudioProblem:
        disk.remove(copy)
        raise
    except (soundfile.SoundFileError, OSError) as error:
        raise InputError(f"{copy}: cannot be written ({error}); make room and run stage 0 (data) again") from error
    return copy


def _from_command(name: str, entry: TableEntry, options: AudioOptions) -> Recording:
    command = entry.value.removesuffix("|").strip()
    if options.root is not None:
        command = f"cd {shlex.quote(str(options.root))} && {command}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True)
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [""]
    if lines[0].startswith("bash: ") and ("syntax error" in lines[0] or "unexpected EOF" in lines[0]):
        remedy = "put file names with blanks, parentheses or quotes into quotes"
        raise AudioProblem("syntax error in a command: left out", f"{entry.where}: {lines[0][:100]}; {remedy}")
    said = lines[-1][:100]
    try:
        with soundfile.SoundFile(io.BytesIO(done.stdout)) as file:
            if is_endless(file):
                remedy = "a FLAC stream does not say how long it is; let the command write a wav file"
                raise AudioProblem("command that gives no audio: left out", f"{entry.where}: {remedy}")
            if stream_hides_samples(io.BytesIO(done.stdout)):
                what = "command whose audio goes on after the samples that its header gives: left out"
                raise AudioProblem(what, f"{entry.where}: let it write a complete header")
            frames = len(file.read(dtype="int16", always_2d=True))  # headers of streams may be wrong
            rate, channels = file.samplerate, list(range(file.channels))
    except (soundfile.SoundFileError, RuntimeError) as error:
        reason = said or "no audio came out"
        raise AudioProblem("command that gives no audio: left out", f"{entry.where}: {reason}") from error
    if done.returncode not in (0, *STOPPED_READING):
        reason = f"exit status {done.returncode}{': ' + said if said else ''}"
        raise AudioProblem("command that fails: left out", f"{entry.where}: {reason}")
    return _recording(name, entry, AudioSource("command", channels, command), frames, rate)


def _from_archive(name: str, entry: TableEntry, path: Path, offset: int, options: AudioOptions) -> Recording:
    """Copies the entry at byte `offset` of a wav archive to a wav file."""
    try:
        content = read_entry(Entry(str(path), offset))
        if not isinstance(content, tuple):
            raise ValueError("a matrix, not audio")
        if content[1].dtype not in (np.int16, np.float32, np.float64):  # of mu-law, kaldiio returns the codes
            raise ValueError("samples of another width")
    except Exception as error:  # kaldiio and its wav readers raise anything
        raise AudioProblem(UNREADABLE, f"{entry.where}: {path}:{offset}") from error
    rate, samples = content
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    subtype = "PCM_16" if samples.dtype == np.int16 else "FLOAT"
    copy = _write_copy(entry, options, rate, channels, subtype, [samples])
    return _from_file(name, entry, copy, options)


def _recording(name: str, entry: TableEntry, source: AudioSource, frames: int, rate: int) -> Recording:
    if frames == 0:
        raise AudioProblem("audio without samples: left out", f"{entry.where}: {source.source}")
    return Recording(name, [source], rate, frames, frames / rate, channel_ids=source.channels)
