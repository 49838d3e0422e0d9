"""The calls of HarperValleyBank: JSON transcripts and metadata, one wav file per side, and who is in which set."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asr_am.data.textfile import SIDECAR, load_json
from asr_am.errors import InputError

ROLES = ("agent", "caller")
STARTS = ("offset_ms", "start_ms")
SPLITS = ("hash", "creators", "espnet")
DEV_SHARE, TEST_SHARE = 0.1, 0.1
LFS = b"version https://git-lfs"
REMEDY = "get a complete copy of github.com/cricketclub/gridspace-stanford-harper-valley"
NOISES = {
    "[noise]": "NSN", "[laughter]": "LAU", "[cough]": "NSN", "[baby]": "NSN", "[kids]": "NSN", "[dogs]": "NSN",
    "[music]": "NSN", "[ringing]": "NSN", "[unintelligible]": "SPN",
}  # fmt: skip
NOT_UNDERSTOOD = "<unk>"  # a word


@dataclass(frozen=True)
class Segment:
    """What one side says without a pause.

    Attributes:
        starts: milliseconds from the begin of the recording and of the conversation, by name of the JSON field.
        duration: milliseconds.
        words: the human transcript. Empty where the machine heard words and the transcribers wrote nothing.
    """

    starts: dict[str, int]
    duration: int
    words: tuple[str, ...]

    @property
    def scorable(self) -> bool:
        """True if a word was understood."""
        return any(word not in NOISES and word != NOT_UNDERSTOOD for word in self.words)


@dataclass(frozen=True)
class Side:
    """One side of a call.

    Attributes:
        name: of the recording, <role>_<call>.
        speaker: number of the speaker.
        audio: mono wav file.
        segments: in time order.
    """

    name: str
    speaker: int
    audio: Path
    segments: tuple[Segment, ...]


def find_root(data_dir: Path) -> Path:
    """Returns the folder with audio/, metadata/ and transcript/. Raises InputError if they are not there."""
    for folder in (data_dir, data_dir / "data"):
        lacking = [
            name for name in ("audio/agent", "audio/caller", "metadata", "transcript") if not (folder / name).is_dir()
        ]
        if not lacking:
            return folder
    raise InputError(f"{data_dir}: lacks {', '.join(lacking)}, and so does data/ in it; {REMEDY}")


def read_sides(root: Path) -> list[Side]:
    """Reads both sides of all calls.

    Raises:
        InputError: a file is missing or malformed, or audio is a pointer of git-lfs.
    """
    sides = []
    for path in sorted((root / "transcript").glob("*.json")):
        if path.name.startswith(SIDECAR):
            continue
        metadata = root / "metadata" / path.name
        rows, about = _load(path), _load(metadata)
        for role in ROLES:
            audio = root / "audio" / role / f"{path.stem}.wav"
            try:
                segments = [_segment(row) for row in rows if row["speaker_role"] == role]
                speaker = int(about[role]["speaker_id"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise InputError(
                    f"{path}: not a transcript of this corpus with its metadata ({error!r}); {REMEDY}"
                ) from error
            if segments:
                _check_audio(audio)
                ordered = sorted(segments, key=lambda segment: segment.starts["offset_ms"])
                sides.append(Side(f"{role}_{path.stem}", speaker, audio, tuple(ordered)))
    if not sides:
        raise InputError(f"{root / 'transcript'}: holds no *.json with segments; {REMEDY}")
    return sides


def _load(path: Path) -> Any:
    try:
        return load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); {REMEDY}") from error


def _segment(row: dict) -> Segment:
    text = row["human_transcript"].lower()
    words = [f"{word.strip('~')}-" if "~" in word else word for word in text.split()]
    return Segment({name: int(row[name]) for name in STARTS}, int(row["duration_ms"]), tuple(words))


def _check_audio(path: Path) -> None:
    try:
        with path.open("rb") as file:
            if file.read(len(LFS)) == LFS:
                raise InputError(f"{path}: is a pointer of git-lfs, not audio; run git lfs pull in its repository")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from error


def usable(sides: Sequence[Side], split: str) -> list[Side]:
    """Returns the sides with the segments that a split uses.

    The published splits have segments of four words or more, and speakers with more than ten of them. ESPnet's also
    have none below 0.1 s.
    """
    if split == "hash":
        return list(sides)
    kept = []
    for side in sides:
        long = [s for s in side.segments if len(s.words) >= 4 and (split == "creators" or s.duration >= 100)]
        kept.append(Side(side.name, side.speaker, side.audio, tuple(long)))
    counts = Counter({side.speaker: 0 for side in kept})
    for side in kept:
        counts[side.speaker] += len(side.segments)
    return [side for side in kept if side.segments and counts[side.speaker] > 10]


def split_speakers(sides: Sequence[Side], split: str) -> dict[str, set[int]]:
    """Returns the speakers of train, dev and test.

    Args:
        sides: those that the split uses.
        split: `hash` takes speakers in the order of the hashes of their numbers, a tenth of the speech for test and for
            dev. `creators` is that of Wu et al. (HarperValleyBank, arXiv 2010.13929, by speaker), `espnet` that of
            ESPnet's egs2/harpervalley: 80, 10 and 10 % of the shuffled speakers.

    Raises:
        InputError: a set has no speaker.
    """
    speakers = sorted({side.speaker for side in sides})
    if split == "hash":
        sets = _by_hash(sides)
    else:
        if split == "creators":
            shuffled = np.array(speakers)
            np.random.RandomState(42).shuffle(shuffled)
            order = [int(speaker) for speaker in shuffled]
        else:
            names = sorted(map(str, speakers))
            random.Random(42).shuffle(names)
            order = [int(name) for name in names]
        train, dev = int(0.8 * len(order)), int(0.1 * len(order))
        sets = {"train": set(order[:train]), "dev": set(order[train : train + dev]), "test": set(order[train + dev :])}
    if empty := [name for name, members in sets.items() if not members]:
        raise InputError(f"corpus.prepare.split={split}: {len(speakers)} speakers leave none for {empty[0]}; {REMEDY}")
    return sets


def _by_hash(sides: Sequence[Side]) -> dict[str, set[int]]:
    seconds: Counter[int] = Counter()
    for side in sides:
        seconds[side.speaker] += sum(segment.duration for segment in side.segments)
    order = sorted(seconds, key=lambda speaker: hashlib.sha256(str(speaker).encode()).digest())
    sets: dict[str, set[int]] = {"test": set(), "dev": set(), "train": set()}
    name, taken = "test", 0.0
    for speaker in order:
        share = {"test": TEST_SHARE, "dev": DEV_SHARE, "train": 1.0}[name]
        if taken >= share * seconds.total():
            name, taken = ("dev" if name == "test" else "train"), 0.0
        sets[name].add(speaker)
        taken += seconds[speaker]
    return sets


def describe(sets: dict[str, set[int]]) -> str:
    return json.dumps({name: sorted(members) for name, members in sets.items()})
