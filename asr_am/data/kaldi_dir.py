"""The text files of a Kaldi data directory: wav.scp, segments, text, utt2spk, spk2gender, reco2file_and_channel.

Reading is lenient where Kaldi's own scripts sort and fix (order, blank lines, CRLF, duplicate lines) and strict where
the meaning would be ambiguous. lhotse's `load_kaldi_data_dir` reads the same files of directories that are already
clean: it raises KeyError at the first id that a file lacks, and needs every audio file to exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.stm import CHANNELS
from asr_am.data.textfile import numbered_lines
from asr_am.errors import InputError


class TableEntry(NamedTuple):
    """Text after the id of a line ("" if none), and the place of the line, `file:line`."""

    value: str
    where: str


class UtteranceSpan(NamedTuple):
    """Part of a recording that is an utterance.

    Attributes:
        end: seconds, None for the end of the recording.
        channel: fifth field of segments, None if absent.
        where: `file:line` of segments, if there is one.
    """

    recording: str
    start: float
    end: float | None
    channel: int | None
    where: str = ""


@dataclass(frozen=True)
class KaldiDir:
    """Tables of a data directory.

    Attributes:
        audio: wav.scp by recording.
        spans: segments by utterance.
        gender: F or M by speaker.
        sides: file and channel (0, 1) in NIST's files of each recording in reco2file_and_channel.
    """

    folder: Path
    audio: dict[str, TableEntry]
    spans: dict[str, UtteranceSpan]
    text: dict[str, TableEntry]
    speaker: dict[str, str]
    gender: dict[str, str]
    sides: dict[str, tuple[str, int]]


def read_kaldi_dir(folder: Path, issues: IssueCounter) -> KaldiDir:
    """Reads the directory. Duplicate lines are counted in `issues`.

    Raises:
        InputError: with file, line and remedy, for a missing, empty or non-UTF-8 file, a malformed line, or an id with
            two different values.
    """
    audio = read_table(folder / "wav.scp", issues, "every line is `recording file` or `recording command |`")
    for recording, entry in audio.items():
        if not entry.value:
            raise InputError(f"{entry.where}: no file for recording {recording}; add it or remove the line")
    untranscribed = "a trained model recognises speech without transcripts: python -m asr_am.transcribe"
    text = read_table(folder / "text", issues, f"every line is `utterance word word ...`; {untranscribed}")
    return KaldiDir(
        folder=folder,
        audio=audio,
        spans=_spans(folder, audio, issues),
        text=text,
        speaker=_speakers(folder, issues),
        gender=_genders(folder, issues),
        sides=_sides(folder, issues),
    )


def read_table(path: Path, issues: IssueCounter, form: str) -> dict[str, TableEntry]:
    """Reads the entries of a file by id. Raises InputError if missing or empty, or if an id has two values."""
    entries: dict[str, TableEntry] = {}
    for number, line in numbered_lines(path, f"a Kaldi data directory needs it: {form}"):
        fields = line.split(maxsplit=1)
        if not fields:
            continue
        entry = TableEntry(fields[1].rstrip() if len(fields) > 1 else "", f"{path}:{number}")
        known = entries.setdefault(fields[0], entry)
        if known.value.split() != entry.value.split():
            raise InputError(f"{entry.where}: {fields[0]} has another value in {known.where}; remove one of them")
        if known is not entry:
            issues.add("a line twice: once is enough", entry.where)
    if not entries:
        raise InputError(f"{path}: is empty; {form}")
    return entries


def _spans(folder: Path, audio: dict[str, TableEntry], issues: IssueCounter) -> dict[str, UtteranceSpan]:
    path = folder / "segments"
    if not path.exists():
        return {recording: UtteranceSpan(recording, 0.0, None, None) for recording in audio}
    form = "every line is `utterance recording start end`, times in seconds"
    spans = {}
    for utterance, entry in read_table(path, issues, form).items():
        fields = entry.value.split()
        try:
            recording, start, end = fields[0], float(fields[1]), float(fields[2])
            channel = int(fields[3]) if len(fields) == 4 else None
            if len(fields) > 4 or not math.isfinite(start) or not math.isfinite(end):
                raise ValueError
        except (IndexError, ValueError) as error:
            raise InputError(f"{entry.where}: {form}; correct this one") from error
        spans[utterance] = UtteranceSpan(recording, start, None if end == -1 else end, channel, entry.where)
    return spans


def _speakers(folder: Path, issues: IssueCounter) -> dict[str, str]:
    path = folder / "utt2spk"
    if not path.exists() and (folder / "spk2utt").exists():
        return _speakers_by_list(folder / "spk2utt", issues)
    unknown = f"if speakers are unknown: awk '{{print $1, $1}}' {quote(str(folder / 'text'))} > {quote(str(path))}"
    speakers = {}
    for utterance, entry in read_table(path, issues, f"every line is `utterance speaker`; {unknown}").items():
        if len(entry.value.split()) != 1:
            raise InputError(f"{entry.where}: not `utterance speaker`; {unknown}")
        speakers[utterance] = entry.value
    return speakers


def _speakers_by_list(path: Path, issues: IssueCounter) -> dict[str, str]:
    speakers: dict[str, str] = {}
    for speaker, entry in read_table(path, issues, "every line is `speaker utterance utterance ...`").items():
        for utterance in entry.value.split():
            if speakers.setdefault(utterance, speaker) != speaker:
                raise InputError(
                    f"{entry.where}: {utterance} also has speaker {speakers[utterance]}; remove one of them"
                )
    return speakers


def _genders(folder: Path, issues: IssueCounter) -> dict[str, str]:
    path = folder / "spk2gender"
    if not path.exists():
        return {}
    genders = {}
    for speaker, entry in read_table(path, issues, "every line is `speaker f` or `speaker m`; or remove it").items():
        if entry.value.lower() not in ("f", "m"):
            raise InputError(f"{entry.where}: the gender is f or m, not {entry.value!r}; or remove the file")
        genders[speaker] = entry.value.upper()
    return genders


def _sides(folder: Path, issues: IssueCounter) -> dict[str, tuple[str, int]]:
    path = folder / "reco2file_and_channel"
    if not path.exists():
        return {}
    sides = {}
    for recording, entry in read_table(path, issues, "every line is `recording file channel`; or remove it").items():
        fields = entry.value.split()
        if len(fields) != 2 or channel_number(fields[1]) is None:
            raise InputError(f"{entry.where}: not `recording file channel` with channel A, B, 1 or 2; correct it")
        sides[recording] = (fields[0], channel_number(fields[1]) or 0)
    return sides


def channel_number(name: str) -> int | None:
    """Returns 0 for A and 1, 1 for B and 2 (as NIST's files name the sides of a call), else None."""
    return {**{letter: number for number, letter in enumerate(CHANNELS)}, "1": 0, "2": 1}.get(name.upper())
