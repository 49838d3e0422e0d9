"""Finds the files of Switchboard, Fisher and the test sets on the LDC's discs, and names everything that is missing.

Only folder listings are read. Discs may have been copied with or without their top folder, and in any case of letters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asr_am.data.textfile import SIDECAR
from asr_am.errors import InputError

MAX_LACKING = 0.02  # largest share of the transcribed calls of a corpus without audio (copies of LDC97S62 lack up to 3)
DICTIONARY = "sw-ms98-dict.text"
MS98 = "swb_ms98_transcriptions"


@dataclass(frozen=True)
class Disc:
    """A release of the LDC.

    Attributes:
        option: name of the option that names its folder.
        number: its catalogue number.
        holds: what is on it.
    """

    option: str
    number: str
    holds: str

    def __str__(self) -> str:
        return f"{self.number} ({self.holds}, --{self.option.replace('_', '-')} DIR)"


SWBD = Disc("swbd", "LDC97S62", "Switchboard")
FISHER = (
    (Disc("fisher1_speech", "LDC2004S13", "Fisher part 1, speech"), Disc("fisher1_text", "LDC2004T19", "its text")),
    (Disc("fisher2_speech", "LDC2005S13", "Fisher part 2, speech"), Disc("fisher2_text", "LDC2005T19", "its text")),
)
EVAL2000 = Disc("eval2000", "LDC2002S09", "Hub5'00, speech")
EVAL2000_TEXT = Disc("eval2000_text", "LDC2002T43", "Hub5'00, text")
RT03 = Disc("rt03", "LDC2007S10", "RT-03")
DISCS = (SWBD, *(disc for pair in FISHER for disc in pair), EVAL2000, EVAL2000_TEXT, RT03)


@dataclass(frozen=True)
class Calls:
    """Calls of a corpus: audio and transcripts by call. Calls without transcripts are left out.

    Attributes:
        audio: sphere files, each with both sides.
        texts: transcripts. Switchboard has one for each side.
    """

    audio: dict[str, Path]
    texts: dict[str, list[Path]]


@dataclass(frozen=True)
class TestSet:
    """A test set.

    Attributes:
        audio: sphere files by name of the STM.
        stm: references, parts of one file.
        glm: scoring rules.
        pem: segments to recognise. None: those of the STM.
    """

    audio: dict[str, Path]
    stm: list[Path]
    glm: Path
    pem: Path | None


@dataclass(frozen=True)
class Found:
    """All files that the preparation reads. `transcripts` is None if they have to be downloaded."""

    swbd_audio: dict[str, Path]
    transcripts: Path | None
    fisher: list[Calls]
    test: TestSet


def find_discs(folders: Mapping[str, str | None], transcripts: str | None, test: str) -> Found:
    """Finds all files.

    Args:
        folders: folder of each disc by option, None for a disc that is not used.
        transcripts: folder of the Mississippi State transcripts, None to look on the disc and else download them.
        test: name of the test set, hub5 or rt03.

    Raises:
        InputError: with all discs and files that are missing.
    """
    missing: list[str] = []
    swbd = _folder(folders, SWBD, missing)
    audio = {call_name(path): path for path in _sphere_files(swbd, SWBD, missing)}
    fisher = [calls for pair in FISHER if (calls := _find_fisher(folders, *pair, missing)) is not None]
    found = _find_hub5(folders, missing) if test == "hub5" else _find_rt03(folders, missing)
    texts = _find_transcripts(swbd, transcripts, missing)
    if missing or found is None:
        raise InputError("; ".join(missing))
    return Found(audio, texts, fisher, found)


def call_name(path: Path) -> str:
    """Returns the name of a call of Switchboard from that of a file: sw2001 and SW02001 are sw02001."""
    return re.sub(r"^sw0?(\d{4}).*", r"sw0\1", path.stem.lower())


def check_calls(calls: Calls, disc: str) -> Calls:
    """Returns the calls with audio and transcript. Raises InputError if audio is missing for too many."""
    lacking = sorted(calls.texts.keys() - calls.audio.keys())
    if len(lacking) > MAX_LACKING * len(calls.texts):
        raise InputError(
            f"{disc}: {len(lacking)} of {len(calls.texts)} transcribed calls have no .sph file, the first {lacking[0]}"
            "; name a folder that holds all of its discs"
        )
    kept = sorted(calls.texts.keys() & calls.audio.keys())
    return Calls({name: calls.audio[name] for name in kept}, {name: calls.texts[name] for name in kept})


def transcript_files(folder: Path) -> dict[str, list[Path]]:
    """Returns the Mississippi State transcripts by call. Raises InputError if they or the dictionary are missing."""
    texts: dict[str, list[Path]] = {}
    for path in _found(folder, ".*-trans[.]text"):
        texts.setdefault(call_name(path), []).append(path)
    if not texts or not (folder / DICTIONARY).is_file():
        what = DICTIONARY if texts else "*/*/*-trans.text"
        raise InputError(f"{folder}: lacks {what}; give the folder {MS98} of the release with --transcripts")
    return texts


def _found(folder: Path, name: str) -> list[Path]:
    """Returns the files below a folder whose names match a pattern. macOS' `._` files are left out."""
    names = re.compile(name)
    return sorted(
        path for path in folder.rglob("*") if names.fullmatch(path.name) and not path.name.startswith(SIDECAR)
    )


def _folder(folders: Mapping[str, str | None], disc: Disc, missing: list[str]) -> Path | None:
    """Returns the folder of a disc that is needed."""
    given = folders.get(disc.option)
    if not given:
        missing.append(f"{disc} is missing")
        return None
    if not Path(given).is_dir():
        missing.append(f"{disc}: {given} is no folder")
        return None
    return Path(given)


def _sphere_files(folder: Path | None, disc: Disc, missing: list[str]) -> list[Path]:
    if folder is None:
        return []
    found = _found(folder, "(?i:.*[.]sph)")
    if not found:
        missing.append(f"{disc}: {folder} holds no .sph file")
    return found


def _find_transcripts(swbd: Path | None, given: str | None, missing: list[str]) -> Path | None:
    """Returns the folder with the Mississippi State transcripts, None to download them."""
    candidates = [Path(given), Path(given) / MS98] if given else []
    if swbd is not None and not given:
        candidates = [swbd / MS98, swbd / "transcriptions" / MS98]
    for folder in candidates:
        if folder.is_dir() and any(folder.glob("*/*/*-trans.text")):
            if not (folder / DICTIONARY).is_file():
                missing.append(f"{folder}: lacks the dictionary {DICTIONARY}")
            return folder
    if given:
        missing.append(f"--transcripts: {given} holds no */*/*-trans.text, nor does {MS98} in it")
    return None


def _find_fisher(folders: Mapping[str, str | None], speech: Disc, text: Disc, missing: list[str]) -> Calls | None:
    """Returns the calls of one part, with text alone if there is no speech. None if neither is given."""
    if not folders.get(speech.option) and not folders.get(text.option):
        return None
    folder = _folder(folders, text, missing)
    texts = _found(folder, "fe_03_.*[.]txt") if folder else []
    if folder and not texts:
        missing.append(f"{text}: {folder} holds no data/trans/*/fe_03_*.txt")
    audio = []
    if folders.get(speech.option):
        audio = _sphere_files(_folder(folders, speech, missing), speech, missing)
    calls = Calls({path.stem.lower(): path for path in audio}, {path.stem.lower(): [path] for path in texts})
    if audio and texts:
        try:
            return check_calls(calls, str(speech))
        except InputError as error:
            missing.append(str(error))
    return calls


def _find_hub5(folders: Mapping[str, str | None], missing: list[str]) -> TestSet | None:
    speech, text = _folder(folders, EVAL2000, missing), _folder(folders, EVAL2000_TEXT, missing)
    tops = (
        "",
        "hub5e_00",
        "LDC2002S09/hub5e_00",
        "2000_hub5_eng_eval_tr",
        "LDC2002T43",
        "LDC2002T43/2000_hub5_eng_eval_tr",
    )
    pem = _below(speech, EVAL2000, tops, "english/hub5e_00.pem", missing)
    audio = _sphere_files(pem.parent, EVAL2000, missing) if pem else []
    stm = _below(text, EVAL2000_TEXT, tops, "reference/hub5e00.english.000405.stm", missing)
    glm = _below(text, EVAL2000_TEXT, tops, "reference/en20000405_hub5.glm", missing)
    return TestSet({path.stem.lower(): path for path in audio}, [stm], glm, pem) if pem and stm and glm else None


def _find_rt03(folders: Mapping[str, str | None], missing: list[str]) -> TestSet | None:
    folder = _folder(folders, RT03, missing)
    tops = ("", "LDC2007S10")
    audio = _below(folder, RT03, tops, "data/audio/eval03/english/cts", missing)
    references = _below(folder, RT03, tops, "data/references/eval03/english/cts", missing)
    glm = _below(folder, RT03, tops, "data/trans_rules/en20030506.glm", missing)
    files = _sphere_files(audio, RT03, missing)
    stm = sorted(references.glob("*.stm")) if references else []
    if references and not stm:
        missing.append(f"{RT03}: {references} holds no .stm file")
    return TestSet({path.stem.lower(): path for path in files}, stm, glm, None) if glm and stm else None


def _below(folder: Path | None, disc: Disc, tops: Sequence[str], name: str, missing: list[str]) -> Path | None:
    """Returns the file or folder `name` of a disc, which may have one of the top folders `tops`."""
    if folder is None:
        return None
    for top in tops:
        if (folder / top / name).exists():
            return folder / top / name
    missing.append(f"{disc}: {folder} lacks {name}")
    return None
