"""Small Kaldi data directory of real files: noise bursts as speech, in every form that wav.scp may name."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np
import soundfile

RATE = 16000
WORDS = ("YES", "NO", "ONE", "TWO")
LEXICON = "YES Y EH S\nNO N OW\nONE W AH N\nTWO T UW\n!SIL SIL\n<UNK> SPN\n"


def noise(seed: int, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    """Returns noise, int16 [N]."""
    return (3000 * np.random.default_rng(seed).standard_normal(round(seconds * rate))).astype(np.int16)


def write_kaldi_dir(
    folder: Path, prefix: str, *, speakers: int = 4, utterances: int = 3, kind: str = "wav", rate: int = RATE
) -> Path:
    """Writes `speakers` speakers `<prefix>0`, ... with `utterances` utterances each, every one a file of the given
    kind.
    """
    folder.mkdir(parents=True)
    lines: dict[str, list[str]] = {"wav.scp": [], "text": [], "utt2spk": []}
    samples = {}
    for speaker in range(speakers):
        for index in range(utterances):
            name = f"{prefix}{speaker}-{index}"
            samples[name] = noise(len(lines["text"]), rate=rate)
            if kind != "ark":
                path = folder / f"{name}.{kind}"
                soundfile.write(path, samples[name], rate, format="NIST" if kind == "sph" else None)
                lines["wav.scp"].append(f"{name} {path}")
            lines["text"].append(f"{name} {WORDS[index % len(WORDS)]} {WORDS[speaker % len(WORDS)]}")
            lines["utt2spk"].append(f"{name} {prefix}{speaker}")
    for name, content in lines.items():
        (folder / name).write_text("".join(f"{line}\n" for line in content))
    if kind == "ark":
        archive = {name: (rate, samples_N) for name, samples_N in samples.items()}
        kaldiio.save_ark(str(folder / "wav.ark"), archive, scp=str(folder / "wav.scp"))
    return folder


def edit(path: Path, old: str, new: str) -> None:
    """Replaces the first `old` in a file, which must contain it."""
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
