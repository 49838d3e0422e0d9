"""Speed-perturbed copies of the training set: names, times, and signal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import Recording, SupervisionSegment

from asr_am.data.audio import read_utterances
from asr_am.data.manifests import read_recordings, read_supervisions, write_set
from asr_am.data.speed import perturb_speed
from asr_am.data.validate import validate_data_dir
from asr_am.errors import InputError
from tests.support.manifest_corpus import RATE, write_corpus


def test_every_utterance_has_a_copy_at_each_speed_from_another_speaker(tmp_path: Path) -> None:
    data_dir = write_corpus(tmp_path)
    before = {segment.id: segment for segment in read_supervisions(data_dir, "train")}
    perturb_speed(data_dir, "train", [0.9, 1.1])
    validate_data_dir(data_dir)
    after = {segment.id: segment for segment in read_supervisions(data_dir, "train")}
    assert len(after) == 3 * len(before)
    for name, segment in before.items():
        assert after[name] == segment
        for factor in (0.9, 1.1):
            copy = after[f"sp{factor}-{name}"]
            assert (copy.speaker, copy.text) == (f"sp{factor}-{segment.speaker}", segment.text)
            assert copy.duration == pytest.approx(segment.duration / factor, abs=1 / RATE)
            assert copy.start == pytest.approx(segment.start / factor, abs=1 / RATE)
    assert Counter(segment.speaker for segment in after.values()).keys() == {
        f"{prefix}trainspk{number}" for prefix in ("", "sp0.9-", "sp1.1-") for number in range(2)
    }


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_tone_is_as_much_higher_as_it_is_shorter(tmp_path: Path, factor: float) -> None:
    """A segment in the middle of a recording (the second of three tones) is found in the faster copy."""
    tone = np.concatenate([np.sin(2 * np.pi * hertz * np.arange(RATE) / RATE) for hertz in (300, 1000, 300)])
    soundfile.write(tmp_path / "tones.wav", tone / 2, RATE)
    recording = Recording.from_file(tmp_path / "tones.wav")
    said = SupervisionSegment("u", "tones", start=1.0, duration=1.0, channel=0, text="YES", speaker="s")
    write_set(tmp_path, "train", [recording], [said])
    perturb_speed(tmp_path, "train", [factor])
    copy = {recording.id: recording for recording in read_recordings(tmp_path, "train")}[f"sp{factor}-tones"]
    faster = {segment.id: segment for segment in read_supervisions(tmp_path, "train")}[f"sp{factor}-u"]
    ((_, samples_N),) = read_utterances(copy, [faster])
    assert len(samples_N) == pytest.approx(RATE / factor, abs=1)
    power = np.abs(np.fft.rfft(samples_N * np.hanning(len(samples_N)))) ** 2
    hertz = np.fft.rfftfreq(len(samples_N), 1 / RATE)
    near = np.abs(hertz - 1000 * factor) < 20
    assert power[near].sum() > 0.999 * power.sum()


@pytest.mark.parametrize("factors", [[1.0], [0.1], [3.0], [0.9, 0.9]])
def test_senseless_speeds_are_refused(tmp_path: Path, factors: list[float]) -> None:
    with pytest.raises(InputError, match=r"speed_perturb=.*\[0.9,1.1\]"):
        perturb_speed(tmp_path, "train", factors)
