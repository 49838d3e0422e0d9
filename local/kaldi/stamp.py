"""Digest of the audio files in wav.scp, on which stage data depends in addition to the directories."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from asr_am.data.kaldi_audio import AudioOptions, audio_file
from asr_am.data.kaldi_dir import TableEntry
from asr_am.data.textfile import numbered_lines
from asr_am.errors import InputError
from local.kaldi.folder import folder_stamp
from local.kaldi.manifests import manifest_files


def audio_stamp(
    train: str | None, dev: str | None, test: str | None, audio_root: str | None = None, folder: str | None = None,
    **others: object,
) -> str:  # fmt: skip
    """Returns a digest of size and time of each audio file in wav.scp of the directories, including missing ones.

    Commands count by the files they read if they only decode a file. A wav.scp that cannot be read is left out, as the
    preparation reports the error. Returns "" if none can. The audio of lhotse manifests does not count: to read
    hundreds of thousands of cuts would take too long for each stage.
    """
    if folder:
        return folder_stamp(Path(folder))
    options = AudioOptions(Path(audio_root) if audio_root else None, False, Path())
    digest = hashlib.sha256()
    for given in (Path(path) for path in (train, dev, test) if path and Path(path).is_file()):
        for partner in manifest_files(given):  # the file itself is an input of the stage
            digest.update(_stamp(partner).encode(errors="surrogateescape") if partner != given else b"")
    for scp in (Path(directory) / "wav.scp" for directory in (train, dev, test) if directory):
        with suppress(InputError):
            for number, line in numbered_lines(scp):
                value = line.split(maxsplit=1)[1:]
                path = audio_file(TableEntry(value[0].strip(), f"{scp}:{number}"), options) if value else None
                digest.update(_stamp(path).encode(errors="surrogateescape"))
    return "" if digest.digest() == hashlib.sha256().digest() else digest.hexdigest()[:16]


def _stamp(path: Path | None) -> str:
    try:
        found = path.stat() if path else None
    except OSError:  # deleted since it was found
        found = None
    return f"{path} {found.st_size} {found.st_mtime_ns}\n" if found else "none\n"
