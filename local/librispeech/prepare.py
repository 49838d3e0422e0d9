"""Stage data of `recipes/librispeech`: LibriSpeech's own folders as Kaldi data directories, prepared as those are.

LibriSpeech holds `<part>/<speaker>/<chapter>/<utterance>.flac` and one `.trans.txt` per chapter (V. Panayotov et al.,
"LibriSpeech: an ASR corpus based on public domain audio books", ICASSP 2015). Audio stays in place.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from lhotse.recipes.librispeech import LIBRISPEECH, MINI_LIBRISPEECH
from lhotse.utils import resumable_download

from asr_am import disk
from asr_am.data.download import download, unpack
from asr_am.data.textfile import SIDECAR, numbered_lines, write_lines
from asr_am.errors import InputError
from local.kaldi import prepare as kaldi

logger = logging.getLogger(__name__)

URL = "https://www.openslr.org/resources"
LEXICON, ARPA = "librispeech-lexicon.txt", "3-gram.pruned.1e-7.arpa.gz"  # of resource 11
PARTS = (*MINI_LIBRISPEECH, *LIBRISPEECH)
REMEDY = f"download it from {URL}/12 (mini: /31) and pass the folder that holds LibriSpeech/ with --data-dir"
GENDERS = ("f", "m")
MAX_LANGUAGE_BYTES = 4_000_000_000  # of a file of the language part. The largest, 4-gram.arpa.gz, has 1.4 billion.
LANGUAGE_REMEDY = f"get {LEXICON} and {ARPA} from {URL}/11 and pass them with --lexicon and --arpa"


def prepare(
    out: Path, *, data_dir: Path | str | None, train: Sequence[str], dev: Sequence[str], test: Sequence[str],
    lexicon: str | None, arpa: str | None, url: str = URL, jobs: int = 1, **options: object,
) -> None:  # fmt: skip
    """Writes the data directory `out`.

    Args:
        out: output directory. Downloads go to `download` beside it.
        data_dir: folder with the parts, or with LibriSpeech/ that holds them. None: download the parts.
        train, dev, test: names of the parts of each set. No dev part: hold out some training speakers.
        lexicon: pronunciations. None: download LibriSpeech's.
        arpa: n-gram LM. None: download LibriSpeech's pruned trigram.
        url: where resources are downloaded from.
        jobs: worker processes.
        options: see `local.kaldi.prepare.Options`.

    Raises:
        InputError: a part or file is missing or damaged.
    """
    sets = {"train": list(train), "dev": list(dev), "test": list(test)}
    check_parts(sets)
    folder = out.parent / "download"
    parts = [part for names in sets.values() for part in names]
    root = _find(Path(data_dir), parts) if data_dir else _download(folder, parts, url)
    directories = {
        name: str(write_kaldi_dir(out / "kaldi" / name, root, names)) if names else None for name, names in sets.items()
    }
    lexicon = lexicon or _language_file(folder, LEXICON, url)
    arpa = arpa or _language_file(folder, ARPA, url)
    kaldi.prepare(out, jobs=jobs, **directories, lexicon=lexicon, arpa=arpa, **options)


def check_parts(sets: dict[str, list[str]]) -> None:
    """Raises InputError for a part that does not exist or that two sets share, and for a set without parts."""
    owner: dict[str, str] = {}
    for name, parts in sets.items():
        if not parts and name != "dev":
            raise InputError(f"corpus.prepare.{name}: names no part of LibriSpeech; give some of {', '.join(PARTS)}")
        for part in parts:
            if part not in PARTS:
                raise InputError(f"corpus.prepare.{name}: {part!r} is no part of LibriSpeech; give {', '.join(PARTS)}")
            if part in owner:
                raise InputError(f"corpus.prepare.{name}: {part} is also in {owner[part]}; take it out of one of them")
            owner[part] = name


def stamp(data_dir: str | None, train: Sequence[str], dev: Sequence[str], test: Sequence[str], **others: object) -> str:
    """Returns a digest of name, size and time of all files of the parts, "" if they are downloaded or missing."""
    digest = hashlib.sha256()
    try:
        root = _find(Path(data_dir), [*train, *dev, *test]) if data_dir else None
    except InputError:
        return ""  # the preparation reports it
    if root is None:
        return ""
    for part in [*train, *dev, *test]:
        for path in sorted((root / part).glob("*/*/*")):
            found = path.stat()
            digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _find(data_dir: Path, parts: Sequence[str]) -> Path:
    """Returns the folder that holds the parts."""
    for root in (data_dir, data_dir / "LibriSpeech"):
        missing = [part for part in parts if not (root / part).is_dir()]
        if len(missing) < len(parts):
            if missing:
                raise InputError(f"{root}: lacks {', '.join(missing)}; {REMEDY}")
            return root
    raise InputError(f"{data_dir}: holds none of {', '.join(parts)}, nor does LibriSpeech/ in it; {REMEDY}")


def _download(folder: Path, parts: Sequence[str], url: str) -> Path:
    """Returns the folder of the parts. Downloads go on where they ended."""
    root = folder / "LibriSpeech"
    for part in parts:
        complete, archive = root / part / ".completed", folder / f"{part}.tar.gz"
        if complete.is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        address = f"{url}/{'31' if part in MINI_LIBRISPEECH else '12'}/{archive.name}"
        try:
            resumable_download(address, archive, force_download=False)
        except (OSError, HTTPException, ValueError) as error:
            raise InputError(f"{address}: cannot be downloaded ({error}); {REMEDY}") from error
        try:
            unpack(archive, folder, REMEDY)
            if not complete.parent.is_dir():
                raise InputError(f"{archive}: does not hold LibriSpeech/{part}; {REMEDY}")
        except InputError as error:
            if getattr(error.__cause__, "errno", None) is not None:  # of the disk: the archive may be good
                raise
            disk.remove(archive)  # the next download would take it for complete
            raise InputError(f"{error}. The archive is removed, so the same command downloads it again") from error
        complete.touch()
    return root


def _language_file(folder: Path, name: str, url: str) -> str:
    if not (folder / name).is_file():
        download(f"{url}/11/{name}", folder / name, LANGUAGE_REMEDY, max_bytes=MAX_LANGUAGE_BYTES)
    return str(folder / name)


def write_kaldi_dir(folder: Path, root: Path, parts: Sequence[str]) -> Path:
    """Writes the parts as one Kaldi data directory. Recordings are named `<part>_<utterance>`.

    Args:
        folder: the directory to write.
        root: folder of the parts.
        parts: their names.

    Raises:
        InputError: a part has no transcripts, or a transcript has no audio.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {name: [] for name in ("wav.scp", "segments", "text", "utt2spk", "spk2gender")}
    speakers = set()
    for part in parts:
        found = (root / part).glob("*/*/*.trans.txt")
        transcripts = sorted(path for path in found if not path.name.startswith(SIDECAR))
        if not transcripts:
            raise InputError(f"{root / part}: holds no <speaker>/<chapter>/*.trans.txt; {REMEDY}")
        for path in transcripts:
            for number, line in numbered_lines(path):
                if not line.strip():
                    continue
                utterance, _, words = line.partition(" ")
                if "/" in utterance:
                    raise InputError(f"{path}:{number}: {utterance} is no name of an utterance; {REMEDY}")
                audio = path.with_name(f"{utterance}.flac")
                if not audio.is_file():
                    raise InputError(f"{path}:{number}: {audio.name} is missing; {REMEDY}")
                speaker = path.parent.parent.name
                speakers.add(speaker)
                lines["wav.scp"].append(f"{part}_{utterance} {audio.resolve()}")
                lines["segments"].append(f"{utterance} {part}_{utterance} 0 -1")
                lines["text"].append(f"{utterance} {words}")
                lines["utt2spk"].append(f"{utterance} {speaker}")
    genders = _genders(root / "SPEAKERS.TXT")
    lines["spk2gender"] = [f"{speaker} {genders[speaker]}" for speaker in sorted(speakers) if speaker in genders]
    for name, content in lines.items():
        if content:
            write_lines(folder / name, sorted(content))
    return folder


def _genders(path: Path) -> dict[str, str]:
    """Reads `<speaker> | F | <part> | ...` lines, leaving out other genders than F and M. {} without the file."""
    if not path.is_file():
        return {}
    fields = [line.split("|") for _, line in numbered_lines(path) if not line.startswith(";")]
    genders = {row[0].strip(): row[1].strip().lower() for row in fields if len(row) > 2}
    return {speaker: gender for speaker, gender in genders.items() if gender in GENDERS}
