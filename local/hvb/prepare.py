"""Stage data of `recipes/hvb`: HarperValleyBank as Kaldi data directories, prepared as those are.

Simulated calls to a bank by 57 speakers, 8 kHz, a wav file per side (M. Wu et al., "HarperValleyBank: A domain-specific
spoken dialog corpus", arXiv 2010.13929). A side is in the set of its speaker. Audio stays in place.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from asr_am import disk
from asr_am.data.download import download, unpack
from asr_am.data.textfile import numbered_lines, write_lines
from asr_am.errors import InputError
from local.hvb.calls import NOISES, SPLITS, STARTS, Side, describe, find_root, read_sides, split_speakers, usable
from local.hvb.cut import choose_start
from local.kaldi import prepare as kaldi
from local.minicts.glm import glm

logger = logging.getLogger(__name__)

URL = "https://github.com/cricketclub/gridspace-stanford-harper-valley/archive/HEAD.tar.gz"
LEXICON_URL = "https://www.openslr.org/resources/11/librispeech-lexicon.txt"
MAX_BYTES = 4_000_000_000
REMEDY = "get the repository with git, and pass its folder with --data-dir"
LEXICON_REMEDY = f"get {LEXICON_URL} or another English lexicon, and pass it with --lexicon"


def prepare(
    out: Path, *, data_dir: Path | str | None, lexicon: str | None, split: str, start: str, url: str = URL,
    lexicon_url: str = LEXICON_URL, jobs: int = 1, **options: object,
) -> None:  # fmt: skip
    """Writes the data directory `out`.

    Args:
        out: output directory. Downloads go to `download` beside it.
        data_dir: the repository, or its folder data/. None: download it (0.7 GB).
        lexicon: pronunciations. None: download LibriSpeech's.
        split: hash, creators or espnet, see `local.hvb.calls.split_speakers`.
        start: field of the transcripts that says when a segment begins. auto: decide by the audio.
        url, lexicon_url: where they are downloaded from.
        jobs: worker processes.
        options: see `local.kaldi.prepare.Options`.

    Raises:
        InputError: something is missing or damaged.
    """
    for name, value, known in (("split", split, SPLITS), ("start", start, ("auto", *STARTS))):
        if value not in known:
            raise InputError(f"corpus.prepare.{name}={value}: must be one of {', '.join(known)}")
    folder = out.parent / "download"
    root = find_root(Path(data_dir)) if data_dir else _download(folder, url)
    sides = read_sides(root)
    if lexicon is None:
        lexicon = str(folder / LEXICON_URL.rsplit("/", 1)[1])
        if not Path(lexicon).is_file():
            download(lexicon_url, Path(lexicon), LEXICON_REMEDY, max_bytes=MAX_BYTES)
    field = choose_start(sides) if start == "auto" else start
    sides = usable(sides, split)
    speakers = split_speakers(sides, split)
    logger.info("speakers: %s", describe(speakers))
    made = out / "kaldi"
    directories = {}
    for name, members in speakers.items():
        chosen = [side for side in sides if side.speaker in members]
        directories[name] = write_kaldi_dir(made / name, chosen, field, train=name == "train")
    write_lines(made / "test/glm", glm().splitlines())
    kaldi.prepare(out, jobs=jobs, **directories, lexicon=_with_noises(Path(lexicon), made), **options)


def write_kaldi_dir(folder: Path, sides: Sequence[Side], start: str, *, train: bool) -> str:
    """Writes a set, and returns its folder.

    Args:
        folder: the directory.
        sides: its sides.
        start: field of the begin of a segment.
        train: keep segments that cannot be scored, of noises and words that nobody understood.
    """
    tables: dict[str, list[str]] = {name: [] for name in ("wav.scp", "segments", "text", "utt2spk")}
    for side in sides:
        speaker = f"hvb{side.speaker:03d}"
        tables["wav.scp"].append(f"{side.name} {side.audio.resolve()}")
        for segment in side.segments:
            if segment.scorable or (train and segment.words):
                begin, end = segment.starts[start], segment.starts[start] + segment.duration
                name = f"{speaker}-{side.name}-{begin:07d}-{end:07d}"
                tables["segments"].append(f"{name} {side.name} {begin / 1000:.3f} {end / 1000:.3f}")
                tables["text"].append(f"{name} {' '.join(segment.words)}")
                tables["utt2spk"].append(f"{name} {speaker}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in tables.items():
        write_lines(folder / name, sorted(set(lines)))
    return str(folder)


def stamp(data_dir: str | None, **options: object) -> str:
    """Returns a digest of name, size and time of all files of the corpus, "" if it is downloaded or missing."""
    digest = hashlib.sha256()
    try:
        root = find_root(Path(data_dir)) if data_dir else None
    except InputError:
        return ""  # the preparation reports it
    if root is None:
        return ""
    for path in sorted(root.rglob("*.*")):
        found = path.stat()
        digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _download(folder: Path, url: str) -> Path:
    """Returns the folder of the corpus below `folder`."""
    target = folder / "hvb"
    if not target.is_dir():
        archive, unpacked = folder / "hvb.tar.gz", folder / "hvb.partial"
        download(url, archive, REMEDY, max_bytes=MAX_BYTES)
        try:
            unpack(archive, unpacked, REMEDY)
        finally:
            disk.remove(archive)
        unpacked.rename(target)
    (top,) = target.iterdir()  # named by the branch
    return find_root(top)


def _with_noises(lexicon: Path, folder: Path) -> str:
    """Writes the lexicon with the corpus' noises, and silence_phones.txt beside it."""
    lines = [line for _, line in numbered_lines(lexicon)]
    write_lines(folder / "lexicon.txt", [*(f"{word} {phone}" for word, phone in NOISES.items()), *lines])
    write_lines(folder / "silence_phones.txt", ["SIL", "SPN", *NOISES.values()])
    return str(folder / "lexicon.txt")
