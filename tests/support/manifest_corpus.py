"""A tiny real data directory for tests: noise bursts as speech, one two-channel recording per speaker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
from lhotse import Recording, SupervisionSegment

from asr_am.data.manifests import SETS, write_set
from asr_am.data.stm import write_stm
from asr_am.data.textfile import write_lines

RATE = 8000
WORDS = ("YES", "NO", "ONE", "TWO")


def write_corpus(data_dir: Path, *, speakers: int = 2, utterances: int = 3, subtype: str = "PCM_16") -> Path:
    """Writes for each set `speakers` speakers with `utterances` utterances on alternate channels of one recording."""
    for number, subset in enumerate(SETS):
        recordings, segments = [], []
        for speaker in range(speakers):
            recording = write_recording(data_dir, f"{subset}{speaker}", 10 * number + speaker, subtype)
            recordings.append(recording)
            segments += [utterance(recording, f"{subset}spk{speaker}", index) for index in range(utterances)]
        write_set(data_dir, subset, recordings, segments)
        if subset != "train":
            write_stm(data_dir / subset / "ref.stm", segments)
    write_lines(data_dir / "lexicon.txt", [f"{word} {word[0]}" for word in WORDS])
    (data_dir / "lm").mkdir(exist_ok=True)
    write_lines(data_dir / "lm" / "train.txt", WORDS)
    return data_dir


def write_recording(data_dir: Path, name: str, seed: int, subtype: str) -> Recording:
    """Writes four seconds of two-channel noise whose level follows a slow wave."""
    random = np.random.default_rng(seed)
    level = 0.02 + 0.1 * np.sin(np.arange(4 * RATE) * 2 * np.pi / RATE)[:, None] ** 2
    path = data_dir / "wav" / f"{name}.wav"
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.clip(random.standard_normal((4 * RATE, 2)) * level, -1, 1), RATE, subtype=subtype)
    return Recording.from_file(path)


def utterance(recording: Recording, speaker: str, index: int) -> SupervisionSegment:
    """Returns an utterance of 0.9 s that starts at second `index`, on channel 0 or 1."""
    return SupervisionSegment(
        id=f"{speaker}-{recording.id}-{index}",
        recording_id=recording.id,
        start=float(index),
        duration=0.9,
        channel=index % 2,
        text=" ".join(WORDS[: index + 1]),
        speaker=speaker,
    )
