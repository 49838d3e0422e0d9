from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import AudioSource, Recording
from lhotse.audio.backend import audio_backend

from asr_am.data.audio import read_utterances
from asr_am.data.validate import check_header
from asr_am.errors import InputError
from tests.support.manifest_corpus import RATE, utterance, write_recording


@pytest.mark.parametrize("subtype", ["PCM_16", "ULAW", "FLOAT"])
def test_pieces_equal_the_samples_of_the_file(tmp_path: Path, subtype: str) -> None:
    recording = write_recording(tmp_path, "r", 1, subtype)
    expected_NC = soundfile.read(tmp_path / "wav" / "r.wav")[0] * 32768
    segments = [utterance(recording, "amy", index) for index in (2, 0, 1)]
    for segment, samples_N in read_utterances(recording, segments):
        begin = int(segment.start) * RATE
        np.testing.assert_allclose(samples_N, expected_NC[begin : begin + 7200, segment.channel], rtol=1e-6)
        assert samples_N.dtype == np.float32


def test_a_command_gives_the_same_samples_as_its_file(tmp_path: Path) -> None:
    recording = write_recording(tmp_path, "r", 1, "PCM_16")
    command = AudioSource(type="command", channels=[0, 1], source=f"cat {recording.sources[0].source}")
    piped = replace(recording, sources=[command])
    segments = [utterance(recording, "amy", 1)]
    for (_, plain_N), (_, piped_N) in zip(
        read_utterances(recording, segments), read_utterances(piped, segments), strict=True
    ):
        np.testing.assert_array_equal(plain_N, piped_N)


@pytest.mark.parametrize("backend", ["default", "LibsndfileBackend"])
def test_a_failing_command_is_an_input_error(tmp_path: Path, backend: str) -> None:
    recording = write_recording(tmp_path, "r", 1, "PCM_16")
    piped = replace(recording, sources=[AudioSource(type="command", channels=[0, 1], source="false")])
    with audio_backend(backend), pytest.raises(InputError, match="recording r"):
        list(read_utterances(piped, [utterance(recording, "amy", 1)]))


def test_an_end_rounded_past_the_recording_is_its_end(tmp_path: Path) -> None:
    recording = write_recording(tmp_path, "r", 1, "PCM_16")
    ((_, samples_N),) = read_utterances(
        recording, [replace(utterance(recording, "amy", 0), start=3.0, duration=1.0005)]
    )
    assert len(samples_N) == RATE


@pytest.mark.parametrize("rate", [RATE, 11025, 6000])
@pytest.mark.parametrize("keep", [0, 30, 40000, 110_000])
def test_cut_audio_is_an_input_error(tmp_path: Path, keep: int, rate: int) -> None:
    recording = write_recording(tmp_path, "r", 1, "PCM_16")
    path = Path(recording.sources[0].source)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"r.wav"):
        list(read_utterances(recording.resample(rate), [utterance(recording, "amy", 3)]))


def test_missing_audio_is_an_input_error(tmp_path: Path) -> None:
    recording = Recording("r", [AudioSource("file", [0], str(tmp_path / "none.wav"))], RATE, 2 * RATE, 2.0)
    with pytest.raises(InputError, match=r"none.wav"):
        list(read_utterances(recording, [utterance(recording, "amy", 0)]))


@pytest.mark.parametrize("rate", [16000, 11025, 6000])
def test_pieces_resampled_one_by_one_equal_the_whole_resampled(tmp_path: Path, rate: int) -> None:
    recording = write_recording(tmp_path, "r", 1, "PCM_16").resample(rate)
    whole_CN = recording.load_audio() * 32768
    for segment, samples_N in read_utterances(recording, [utterance(recording, "amy", index) for index in (0, 2, 3)]):
        begin = round(segment.start * rate)
        expected_N = whole_CN[segment.channel, begin : begin + len(samples_N)]
        assert abs(len(samples_N) - 0.9 * rate) <= 1
        np.testing.assert_allclose(samples_N, expected_N, atol=0.05)


def test_the_end_of_a_resampled_recording_is_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.wav"
    soundfile.write(path, np.random.default_rng(0).standard_normal(44103) / 10, 44100)
    recording = Recording.from_file(path, recording_id="odd").resample(16000)
    segment = replace(utterance(recording, "amy", 0), duration=recording.duration)
    ((_, samples_N),) = read_utterances(recording, [segment])
    np.testing.assert_allclose(samples_N, recording.load_audio()[0] * 32768, atol=0.05)


@pytest.mark.parametrize("rate", [RATE, 16000])
def test_audio_without_a_header_is_an_input_error(tmp_path: Path, rate: int) -> None:
    (tmp_path / "talk.raw").write_bytes(bytes(4 * RATE))
    recording = Recording("r", [AudioSource("file", [0], str(tmp_path / "talk.raw"))], RATE, 2 * RATE, 2.0)
    with pytest.raises(InputError, match=r"talk.raw"):
        list(read_utterances(recording.resample(rate) if rate != RATE else recording, [utterance(recording, "amy", 0)]))
    with pytest.raises(InputError, match=r"talk.raw"):
        check_header(recording)
