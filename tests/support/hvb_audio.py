"""Generated audio for transcripts of HarperValleyBank, where its 0.6 GB of audio are not at hand.

    python -m tests.support.hvb_audio REPOSITORY LEXICON

Each speaker says the words of a segment between its times, as tones. Noises and words outside the lexicon are bursts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import soundfile

from asr_am.data.textfile import numbered_lines
from tests.support.spoken_tones import RATE, Voice


def write_audio(data: Path, pronunciations: Mapping[str, str]) -> None:
    """Writes audio/<role>/<call>.wav for all transcripts in the folder `data` of the repository."""
    for path in sorted((data / "transcript").glob("*.json")):
        rows = json.loads(path.read_text())
        about = json.loads((data / "metadata" / path.name).read_text())
        seconds = max(row["offset_ms"] + row["duration_ms"] for row in rows) / 1000 + 1
        for role in ("agent", "caller"):
            speaker = about[role]["speaker_id"]
            voice = Voice(pronunciations, speaker)
            samples_N = np.random.default_rng(int(path.stem, 16)).normal(0, 30, round(seconds * RATE))
            for row in rows:
                if row["speaker_role"] == role and row["human_transcript"]:
                    said_N = voice.say(row["human_transcript"].split(), row["duration_ms"] / 1000)
                    begin = RATE * row["offset_ms"] // 1000
                    samples_N[begin : begin + len(said_N)] += said_N
            wav = data / "audio" / role / f"{path.stem}.wav"
            wav.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(wav, samples_N.astype(np.int16), RATE)


def read_pronunciations(lexicon: Path) -> dict[str, str]:
    """Returns the first pronunciation of each word, in lower case and without stress."""
    found: dict[str, str] = {}
    for _, line in numbered_lines(lexicon):
        word, phones = line.split(maxsplit=1)
        found.setdefault(word.lower(), "".join(c for c in phones if not c.isdigit()))
    return found


if __name__ == "__main__":
    write_audio(Path(sys.argv[1]) / "data", read_pronunciations(Path(sys.argv[2])))
