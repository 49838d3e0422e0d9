"""Recordings of wav.scp with a missing, unknown or wrong length in their header."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr_am.data.audio import read_utterances
from asr_am.data.kaldi_audio import AudioOptions, CheckedRecording, ScpRecording, check_recording
from asr_am.data.kaldi_dir import TableEntry, UtteranceSpan
from asr_am.data.length import decode_blocks
from asr_am.data.validate import check_header
from tests.support.manifest_corpus import utterance
from tests.support.sphere_files import write_sphere

RATE = 16000
SECONDS = 5
WHOLE = UtteranceSpan("r", 0.0, None, None)


def speech(loud: str = "-+---") -> np.ndarray:
    """Returns int16 [N] of SECONDS, over three blocks of decoding: noise, loud in the seconds with a plus."""
    level_N = np.repeat([10_000 if second == "+" else 10 for second in loud], RATE)
    return np.clip(level_N * np.random.default_rng(0).standard_normal(SECONDS * RATE), -32768, 32767).astype(np.int16)


def check_line(tmp_path: Path, value: object, *spans: UtteranceSpan, pipes: bool = False) -> CheckedRecording:
    """Checks the recording of line 7 of wav.scp, which is `value`."""
    scp = ScpRecording(
        "r", TableEntry(str(value), f"{tmp_path}/wav.scp:7"), None, tuple((f"u{i}", x) for i, x in enumerate(spans))
    )
    return check_recording(scp, AudioOptions(None, pipes, tmp_path / "copies"))


def samples(found: CheckedRecording, channel: int = 0) -> np.ndarray:
    """Returns [N] of a channel of the whole recording, after the check that ends stage 0."""
    assert found.recording is not None
    check_header(found.recording)
    segment = utterance(found.recording, "amy", channel)
    segment.duration = found.recording.duration
    ((_, samples_N),) = read_utterances(found.recording, [segment])
    return samples_N


def write_flac_stream(path: Path, subtype: str = "PCM_16") -> Path:
    """Writes FLAC as to a pipe: the 36 bits of the number of samples in STREAMINFO are 0."""
    soundfile.write(path, speech(), RATE, subtype=subtype)
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    path.write_bytes(content)
    assert soundfile.info(path).frames == 2**63 - 1
    return path


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24"])
def test_a_flac_stream_of_unknown_length_is_copied_whole(tmp_path: Path, subtype: str) -> None:
    path = write_flac_stream(tmp_path / "stream.flac", subtype)
    found = check_line(tmp_path, path, WHOLE)
    assert found.utterances == {"u0": (0.0, SECONDS, 0)} and not found.problems
    np.testing.assert_array_equal(samples(found), speech())
    assert [copy.name for copy in (tmp_path / "copies").iterdir()] == ["7.wav"]
    late = check_line(tmp_path, path, UtteranceSpan("r", 1.0, 2.0, None), UtteranceSpan("r", 9.0, 10.0, None))
    assert list(late.utterances) == ["u0"] and late.problems[0][0] == "segment outside its recording: left out"


def test_a_command_that_gives_a_flac_stream_is_left_out(tmp_path: Path) -> None:
    path = write_flac_stream(tmp_path / "stream.flac")
    ((what, where),) = check_line(tmp_path, f"cat < {path} |", WHOLE, pipes=True).problems
    assert what == "command that gives no audio: left out" and "let the command write a wav file" in where


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("head -c 90000 {0}; false |", False),
        ("{{ head -c 90000 {0}; false; }} | cat |", False),
        ("sh -c 'cat {0}; echo oh dear >&2; exit 3' |", False),
        ("cat {0} {0} {0} | head -c 90000 |", True),
        ("head -c 90000 {0} |", True),
    ],
)
def test_a_command_that_fails_is_left_out(tmp_path: Path, command: str, kept: bool) -> None:
    """Except one whose reader has stopped reading."""
    path = tmp_path / "talk.wav"
    soundfile.write(path, speech(), RATE)
    found = check_line(tmp_path, command.format(path), WHOLE, pipes=True)
    if kept:
        assert list(found.utterances) == ["u0"] and not found.problems
    else:
        ((what, where),) = found.problems
        assert what == "command that fails: left out" and "wav.scp:7: exit status" in where
        assert ("exit status 3: oh dear" in where) == ("exit 3" in command)


def bare_mp3(path: Path, loud: str, tag_bytes: int | None = None) -> Path:
    """Writes an mp3 of variable bit rate without the Xing frame, with an ID3 tag of `tag_bytes` if given."""
    soundfile.write(path, speech(loud), RATE, format="MP3", bitrate_mode="VARIABLE", compression_level=0.3)
    content = path.read_bytes()
    first_frame = content.index(content[:2], 2)
    assert b"Xing" in content[:first_frame]
    tag = b""
    if tag_bytes is not None:
        tag = b"ID3\x03\0\0" + bytes(tag_bytes >> shift & 0x7F for shift in (21, 14, 7, 0)) + bytes(tag_bytes)
    path.write_bytes(tag + content[first_frame:])
    return path


@pytest.mark.parametrize(
    ("loud", "tag_bytes"), [("--+++", None), ("+----", None), ("+++++", 300_000)], ids=["long", "short", "picture"]
)
def test_an_mp3_file_is_as_long_as_what_it_decodes_to(tmp_path: Path, loud: str, tag_bytes: int | None) -> None:
    path = bare_mp3(tmp_path / "talk.mp3", loud, tag_bytes)
    claimed = soundfile.info(path).frames
    found = check_line(tmp_path, path, WHOLE)
    samples_N = samples(found)
    assert found.utterances and abs(claimed - len(samples_N)) > RATE, "the header is right: nothing is tested"
    # The encoder's delay and padding, at most three frames of 576 samples, which the Xing frame says to remove.
    assert SECONDS * RATE < len(samples_N) <= SECONDS * RATE + 3 * 576
    delay = np.correlate(samples_N, speech(loud).astype(np.float32), "valid").argmax()
    rest_N = samples_N[delay : delay + SECONDS * RATE] - speech(loud)
    assert np.linalg.norm(rest_N) < 0.5 * np.linalg.norm(speech(loud).astype(np.float32))


def test_an_mp3_file_that_says_its_length_is_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "talk.mp3"
    soundfile.write(path, speech(), RATE, format="MP3", bitrate_mode="VARIABLE")
    assert len(samples(check_line(tmp_path, path, WHOLE))) == SECONDS * RATE
    path.write_bytes(path.read_bytes()[:2000])
    assert check_line(tmp_path, path, WHOLE).problems, (
        "a cut file, which its header tells, is not taken for a short one"
    )
    assert not (tmp_path / "copies").exists()


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000])
def test_a_wav_file_from_a_pipe_is_read_in_place(tmp_path: Path, size: int) -> None:
    path = tmp_path / "talk.wav"
    soundfile.write(path, speech(), RATE)
    content = bytearray(path.read_bytes())
    begin = content.index(b"data") + 4
    content[begin : begin + 4] = size.to_bytes(4, "little")
    path.write_bytes(content)
    found = check_line(tmp_path, path, WHOLE)
    assert list(found.utterances) == ["u0"]
    np.testing.assert_array_equal(samples(found), speech())
    assert not (tmp_path / "copies").exists()


@pytest.mark.parametrize("kind", ["WAV", "NIST"])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_file_that_ends_before_its_header_says_is_used_up_to_there(tmp_path: Path, kind: str, channels: int) -> None:
    path = tmp_path / "talk"
    soundfile.write(path, np.stack([speech()] * channels, axis=1), RATE, format=kind)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    assert list(check_line(tmp_path, path, WHOLE).utterances) == ["u0"]
    path.write_bytes(content[: len(content) // 2])
    found = check_line(tmp_path, path, WHOLE, UtteranceSpan("r", 1.0, 2.0, None), UtteranceSpan("r", 3.0, 4.0, None))
    assert list(found.utterances) == ["u1"]
    assert [what for what, _ in found.problems] == [
        "utterance without its end, as its file is cut: left out", "segment outside its recording: left out",
    ]  # fmt: skip
    assert any("ends before its header says" in what for what, _ in found.notes)


def test_an_ogg_file_without_its_last_page_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "talk.ogg"
    soundfile.write(path, speech(), RATE, format="OGG")
    content = path.read_bytes()
    assert list(check_line(tmp_path, path, WHOLE).utterances) == ["u0"]
    for size in (len(content) - 100, content.rfind(b"OggS"), len(content) // 2):
        path.write_bytes(content[:size])
        found = check_line(tmp_path, path, WHOLE)
        assert not found.utterances and "its file is cut" in found.problems[0][0], size


def test_audio_without_a_header_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "talk.raw"
    path.write_bytes(speech().tobytes())
    ((what, where),) = check_line(tmp_path, path, WHOLE).problems
    assert what == "audio that cannot be read: left out" and "without a header" in where


@pytest.mark.parametrize("name", ["stream.flac", "talk.mp3"])
def test_what_is_not_audio_is_left_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"ID3 no audio" * 100)
    assert check_line(tmp_path, path, WHOLE).problems[0][0] == "audio that cannot be read: left out"


def test_an_mpeg4_file_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "talk.m4a"
    path.write_bytes(b"\0\0\0\x20ftypM4A \0\0\0\0M4A mp42isom\0\0\0\0")
    ((what, where),) = check_line(tmp_path, path, WHOLE).problems
    assert what == "audio that cannot be read: left out" and "MPEG-4" in where and "convert it with ffmpeg" in where


@pytest.mark.parametrize("command", ["cat {0} (1).wav | cat |", "cat 'it{0} | cat |"])
def test_a_command_that_bash_cannot_parse_is_told_with_its_first_message(tmp_path: Path, command: str) -> None:
    ((what, where),) = check_line(tmp_path, command.format(tmp_path / "a"), WHOLE, pipes=True).problems
    assert what == "syntax error in a command: left out" and "bash: " in where
    assert ("syntax error" in where or "unexpected EOF" in where) and "into quotes" in where


@pytest.mark.parametrize("subtype", ["PCM_U8", "ULAW", "PCM_24"])
def test_an_archive_of_another_sample_format_is_left_out(tmp_path: Path, subtype: str) -> None:
    soundfile.write(tmp_path / "talk.wav", speech(), RATE, subtype=subtype)
    archive = tmp_path / "wav.ark"
    archive.write_bytes(b"r " + (tmp_path / "talk.wav").read_bytes())
    assert check_line(tmp_path, f"{archive}:2", WHOLE).problems[0][0] == "audio that cannot be read: left out"
    assert not list(tmp_path.glob("copies/*"))


@pytest.mark.parametrize("ulaw", [True, False])
def test_a_sphere_file_compressed_by_shorten_is_decompressed(tmp_path: Path, ulaw: bool) -> None:
    x_NC = np.random.default_rng(0).normal(0, 900, (16000, 2)).astype(np.int16)
    plain = check_line(tmp_path, write_sphere(tmp_path / "plain.sph", x_NC, ulaw=ulaw), WHOLE)
    path = write_sphere(tmp_path / "call.sph", x_NC, ulaw=ulaw, shorten=True)
    found = check_line(tmp_path, f"sph2pipe -f wav -p -c 2 {path} |", WHOLE)
    assert found.utterances == {"u0": (0.0, 2.0, 1)} and found.recording.num_channels == 2
    np.testing.assert_array_equal(samples(found, channel=1), samples(plain, channel=1))
    plain.recording = plain.recording.perturb_speed(1.1)  # read without sph2pipe
    found.recording = found.recording.perturb_speed(1.1)
    np.testing.assert_array_equal(samples(found, channel=1), samples(plain, channel=1))
    path.write_bytes(path.read_bytes()[:9000])
    ((what, where),) = check_line(tmp_path, path, WHOLE).problems
    assert what == "audio that cannot be read: left out" and "end too early" in where


@pytest.mark.parametrize("path", ["~nosuchuser/x.wav", f"/{'x' * 300}.wav"])
def test_a_path_that_cannot_be_is_missing_audio(tmp_path: Path, path: str) -> None:
    assert check_line(tmp_path, path, WHOLE).problems[0][0].startswith("missing audio")


def write_with_length(path: Path, samples_N: np.ndarray, share: float, tail: bytes = b"") -> Path:
    """Writes a file whose header gives this share of its samples."""
    if path.suffix == ".sph":
        write_sphere(path, samples_N[:, None], ulaw=False)
    else:
        soundfile.write(path, samples_N, RATE, subtype="PCM_16")
    content = bytearray(path.read_bytes())
    size, part = 2 * len(samples_N), round(share * len(samples_N))
    if path.suffix == ".sph":
        content = content.replace(f"-i {len(samples_N)}\n".encode(), f"-i {part}\n".encode())
        content[:] = content[: content.index(b"end_head\n") + 9].ljust(1024) + content[-size:]
    else:
        order, at = ("big", 8) if path.suffix == ".au" else ("little", content.index(b"data") + 4)
        assert int.from_bytes(content[at : at + 4], order) == size
        content[at : at + 4] = (2 * part).to_bytes(4, order)
    path.write_bytes(content + tail)
    return path


@pytest.mark.parametrize("kind", ["wav", "au", "sph"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_all_samples_are_used_of_a_file_whose_header_gives_fewer(tmp_path: Path, kind: str, share: float) -> None:
    path = write_with_length(tmp_path / f"a.{kind}", speech(), share)
    found = check_line(tmp_path, path, WHOLE)
    assert np.array_equal(samples(found), speech())
    assert [what for what, _ in found.notes] == [
        "file that goes on after the samples that its header gives: all are used"
    ]
    assert sum(map(len, decode_blocks(path))) == len(speech())  # as transcription reads it


@pytest.mark.parametrize(
    "tail",
    [b"", b"LIST" + (1000).to_bytes(4, "little") + bytes(range(250)) * 4, bytes(4096), b"ID3\x04" + 999 * b"\1",
     b"bext" + (602).to_bytes(4, "little") + 602 * b"x" + b"cue " + (4).to_bytes(4, "little") + 4 * b"c"],
)  # fmt: skip
def test_what_follows_the_samples_of_a_wav_file_is_no_audio(tmp_path: Path, tail: bytes) -> None:
    path = write_with_length(tmp_path / "a.wav", speech(), 1.0, tail)
    found = check_line(tmp_path, path, WHOLE)
    assert np.array_equal(samples(found), speech()) and found.notes == []
    assert found.recording is not None and found.recording.sources[0].source == str(path)


@pytest.mark.parametrize("begin", [0, 36])
def test_two_wav_files_or_data_chunks_in_one_are_left_out(tmp_path: Path, begin: int) -> None:
    soundfile.write(tmp_path / "one.wav", speech(), RATE)
    content = (tmp_path / "one.wav").read_bytes()
    (tmp_path / "two.wav").write_bytes(content + content[begin:])
    ((what, _),) = check_line(tmp_path, tmp_path / "two.wav", WHOLE).problems
    assert what == "audio that cannot be read: left out"


def test_an_aiff_file_that_goes_on_after_its_samples_is_left_out(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.aiff", speech(), RATE)
    content = bytearray((tmp_path / "a.aiff").read_bytes())
    frames, size = content.index(b"COMM") + 10, content.index(b"SSND") + 4
    content[frames : frames + 4] = (len(speech()) // 2).to_bytes(4, "big")
    content[size : size + 4] = (len(speech()) + 8).to_bytes(4, "big")
    (tmp_path / "a.aiff").write_bytes(content)
    assert soundfile.info(tmp_path / "a.aiff").frames == len(speech()) // 2
    ((what, where),) = check_line(tmp_path, tmp_path / "a.aiff", WHOLE).problems
    assert what == "audio that cannot be read: left out" and "goes on after the samples that its header" in where


def test_a_command_whose_header_gives_too_few_samples_is_left_out(tmp_path: Path) -> None:
    path = write_with_length(tmp_path / "a.wav", speech(), 0.5)
    ((what, _),) = check_line(tmp_path, f"cat < {path} |", WHOLE, pipes=True).problems
    assert what == "command whose audio goes on after the samples that its header gives: left out"


def test_a_silent_channel_beside_one_that_speaks_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.stack([0 * speech(), speech()], axis=1), RATE)
    ((what, where),) = check_line(tmp_path, path, WHOLE).problems
    assert what == "the first channel is silent and another is not: left out"
    assert f"u0: channel 2 of {path} is not silent" in where and "`r FILE 2` into reco2file_and_channel" in where
    assert check_line(tmp_path, path, WHOLE._replace(channel=1)).utterances == {"u0": (0.0, SECONDS, 1)}
    soundfile.write(path, np.zeros((RATE, 2)), RATE)
    assert check_line(tmp_path, path, WHOLE).problems == [("digital silence: left out", "u0")]
