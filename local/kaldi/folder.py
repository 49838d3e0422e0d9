"""A folder of recordings, each with its transcript beside it (a.wav and a.txt), as a Kaldi data directory.

The speaker is the name of the subfolder that a recording is in. In the folder itself it is the part of the name before
the first `-` or `_`, and the whole name where there is neither. Transcripts lose their case and punctuation, which is
counted.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from pathlib import Path

from asr_am.data.issue_counter import IssueCounter
from asr_am.data.textfile import SIDECAR, read_lines, write_lines
from asr_am.errors import InputError
from local.kaldi.words import clean, is_mark

AUDIO = (".wav", ".flac", ".mp3", ".ogg", ".sph")
TRANSCRIPT = ".txt"
OTHER_AUDIO = (".aac", ".aif", ".aiff", ".amr", ".m4a", ".mp4", ".opus", ".webm", ".wma")


def write_kaldi_dir(folder: Path, out: Path, issues: IssueCounter) -> Path:
    """Writes wav.scp, utt2spk, and text for all recordings with a transcript. Returns `out`.

    Raises:
        InputError: there is no recording, none has a transcript, or two have the same name.
    """
    found = _files(folder)
    transcripts = {_stem(path): path for path in found if path.suffix.lower() == TRANSCRIPT}
    rows: dict[str, tuple[Path, str]] = {}
    spoken: dict[str, str] = {}
    for audio in (path for path in found if path.suffix.lower() in AUDIO):
        parts = [re.sub(r"\s+", "_", part) for part in audio.relative_to(folder).with_suffix("").parts]
        name = "-".join(parts)
        speaker = "-".join(parts[:-1]) or re.split("[-_]", name)[0] or name
        utterance = name if name.startswith(speaker) else f"{speaker}-{name}"
        if utterance in rows:
            raise InputError(f"{audio}: has the same name as {rows[utterance][0]}; rename one of them")
        rows[utterance] = audio.absolute(), speaker
        if text := transcripts.pop(_stem(audio), None):
            spoken[utterance] = _words(text, issues)
    for path in (path for path in found if path.suffix.lower() in OTHER_AUDIO):
        issues.add(f"recording that is none of {' '.join(AUDIO)}: not used, convert it", str(path))
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
    if lower(written) != written:
        issues.add("transcripts with upper case: in lower case", str(transcript))
    if words != " ".join(lower(written).split()):
        issues.add("transcripts with punctuation: without", str(transcript))
    return words


def plain_words(text: str) -> list[str]:
    """Returns the words in lower case without punctuation. Marks in brackets stay as they are."""
    words = []
    for word in clean(text).split():
        if not is_mark(word):
            letters = "".join(c if c == "'" or _is_letter(c) else " " for c in lower(word))
            words += [part for part in (part.strip("_'") for part in letters.split()) if part]
        else:
            words.append(word)
    return words


def lower(text: str) -> str:
    """Returns a text in lower case. A Turkish I with a dot is an i, without the second dot that Unicode gives it."""
    return text.lower().replace("i\u0307", "i")


def spell(word: str) -> tuple[str, ...]:
    """Returns the letters, marks (vowel signs of Indic scripts) and digits of a word as its phones."""
    return tuple(c for c in unicodedata.normalize("NFC", lower(word)) if c != "_" and _is_letter(c))


def _is_letter(character: str) -> bool:
    return character == "_" or character.isalnum() or unicodedata.category(character).startswith("M")


def folder_stamp(folder: Path) -> str:
    """Returns a digest of names, sizes and times of the recordings and transcripts."""
    digest = hashlib.sha256()
    for path in _files(folder):
        if path.suffix.lower() not in (*AUDIO, TRANSCRIPT) or not path.exists():  # a link to nothing
            continue
        found = path.stat()
        digest.update(
            f"{path.relative_to(folder)} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    """Returns the files in a folder and below it, also in linked folders, each once, but for macOS' `._` files."""
    found: list[Path] = []
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (true_name := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(true_name)
        folders.sort()
        found += [Path(parent, name) for name in names if not name.startswith(SIDECAR)]
    return sorted(found)


def _stem(path: Path) -> str:
    """Returns a path without its ending. An accent is one character, whatever the file system made of it."""
    return unicodedata.normalize("NFC", str(path.with_suffix("")))
