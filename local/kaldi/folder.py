"""A folder of recordings, each with its transcript beside it (a.wav and a.txt), as a Kaldi data directory.

The speaker is the name of the subfolder that a recording is in. In the folder itself it is the part of the name before
the first `-` or `_`, and the whole name where there is neither. Transcripts lose their case and punctuation, which is
counted.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from pathlib import Path

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.textfile import read_lines, write_lines
from asr_am.errors import InputError
from local.kaldi.words import clean, is_mark

AUDIO = (".wav", ".flac", ".mp3", ".ogg", ".sph")


def write_kaldi_dir(folder: Path, out: Path, issues: IssueCounter) -> Path:
    """Writes wav.scp, utt2spk, and text for all recordings with a transcript. Returns `out`.

    Raises:
        InputError: there is no recording, none has a transcript, or two have the same name.
    """
    transcripts = {path.with_suffix(""): path for path in folder.rglob("*.txt")}
    rows: dict[str, tuple[Path, str]] = {}
    spoken: dict[str, str] = {}
    for audio in _audio_files(folder):
        name = "-".join(re.sub(r"\s+", "_", part) for part in audio.relative_to(folder).with_suffix("").parts)
        speaker = name.rpartition("-")[0] if audio.parent != folder else re.split("[-_]", name)[0]
        utterance = name if name.startswith(speaker) else f"{speaker}-{name}"
        if utterance in rows:
            raise InputError(f"{audio}: has the same name as {rows[utterance][0]}; rename one of them")
        rows[utterance] = audio.absolute(), speaker
        if text := transcripts.pop(audio.with_suffix(""), None):
            spoken[utterance] = _words(text, issues)
    for path in transcripts.values():
        issues.add("text without a recording beside it: not used", str(path))
    if not rows:
        raise InputError(f"{folder}: has no recordings ({' '.join(AUDIO)}); give the folder of your recordings")
    if not spoken:
        audio = rows[min(rows)][0]
        raise InputError(f"{audio}: has no transcript; write {audio.with_suffix('.txt').name} beside it")
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "wav.scp", [f"{utterance} {audio}" for utterance, (audio, _) in sorted(rows.items())])
    write_lines(out / "utt2spk", [f"{utterance} {speaker}" for utterance, (_, speaker) in sorted(rows.items())])
    write_lines(out / "text", [f"{utterance} {words}" for utterance, words in sorted(spoken.items())])
    return out


def _words(transcript: Path, issues: IssueCounter) -> str:
    written = " ".join(read_lines(transcript, "write its words"))
    words = " ".join(plain_words(written))
    if written.lower() != written:
        issues.add("transcripts with upper case: in lower case", str(transcript))
    if words != " ".join(written.lower().split()):
        issues.add("transcripts with punctuation: without", str(transcript))
    return words


def plain_words(text: str) -> list[str]:
    """Returns the words in lower case without punctuation. Marks in brackets stay as they are."""
    words = []
    for word in clean(text).split():
        if not is_mark(word):
            letters = "".join(c if c == "'" or _is_letter(c) else " " for c in word.lower())
            words += [part for part in (part.strip("_'") for part in letters.split()) if part]
        else:
            words.append(word)
    return words


def spell(word: str) -> tuple[str, ...]:
    """Returns the letters, marks (vowel signs of Indic scripts) and digits of a word as its phones."""
    return tuple(c for c in unicodedata.normalize("NFC", word).lower() if c != "_" and _is_letter(c))


def _is_letter(character: str) -> bool:
    return character == "_" or character.isalnum() or unicodedata.category(character).startswith("M")


def folder_stamp(folder: Path) -> str:
    """Returns a digest of names, sizes and times of the recordings and transcripts."""
    digest = hashlib.sha256()
    for path in sorted([*_audio_files(folder), *folder.rglob("*.txt")]):
        found = path.stat()
        digest.update(
            f"{path.relative_to(folder)} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()[:16]


def _audio_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in AUDIO)
