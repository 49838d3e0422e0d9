"""Transcription of a user's recordings: any rate and channels, long recordings, clear errors, one load per model."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr_am.decode import loading
from asr_am.decode.decode_set import decode_sets
from asr_am.decode.lattice import LmScale
from asr_am.decode.search import SearchOptions
from asr_am.decode.shards import DecodeOptions
from asr_am.decode.system import System
from asr_am.errors import InputError
from asr_am.hmm.states import StateTable
from asr_am.lang.lang_dir import Lang
from asr_am.models import model_file
from asr_am.transcribe import MAX_SEGMENT, MIN_SEGMENT, load_system, main, read_audio, split_at_pauses
from tests.support.decoding_corpus import write_network, write_system
from tests.support.manifest_corpus import RATE

RUN_OPTIONS = DecodeOptions(SearchOptions(beam=10.0, lattice_beam=3.0), (LmScale(10.0),), nbest=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    system = write_system(root)
    out = root / "decode"
    out.mkdir()
    decode_sets(system, root / "data", out, RUN_OPTIONS)
    return out


def tone(rate: int, seconds: float, channels: int = 1) -> np.ndarray:
    t_N1 = np.arange(int(rate * seconds))[:, None] / rate
    return 0.3 * np.sin(2 * np.pi * 440 * t_N1) * np.ones(channels) * (1 + 0.5 * np.sin(9 * t_N1))


def write(path: Path, samples: np.ndarray, rate: int) -> Path:
    soundfile.write(path, samples, rate)
    return path


def test_words_are_printed_for_each_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((run.parent / "data" / "wav").glob("test*.wav"))
    assert main(["--model", str(run), *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{channel}" for path in files for channel in "AB"]
    assert all(set(line.split(": ")[1].split()) <= {"YES", "NO", "ONE", "TWO"} for line in lines)
    assert any(line.split(": ")[1].split() for line in lines)


def test_the_channels_of_a_call_are_two_speakers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is transcribed as if it were alone: with statistics of its own."""
    path = run.parent / "data" / "wav" / "test0.wav"
    samples_N2 = soundfile.read(path)[0] * [1.0, 0.2]
    call = write(tmp_path / "call.wav", samples_N2, RATE)
    sides = [write(tmp_path / f"{side}.wav", soundfile.read(call)[0][:, i], RATE) for i, side in enumerate("AB")]
    assert main(["--model", str(run), str(call), *map(str, sides)]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.replace("call.wav:", "call").splitlines())
    assert [lines[f"{tmp_path}/call{side}"] for side in "AB"] == [lines[str(path)] for path in sides]
    assert all(words.strip() for words in lines.values()) and len(set(lines.values())) == 2


def test_channels_with_one_speaker_are_averaged(tmp_path: Path) -> None:
    noise_N2 = 0.1 * np.random.default_rng(0).standard_normal((RATE, 2))
    speech_N2 = tone(RATE, 1.0, 2)
    cases = {"call": speech_N2 * [1, 0] + noise_N2, "room": speech_N2 + 0.1 * noise_N2, "many": tone(RATE, 1.0, 3)}
    cases |= {"one side": speech_N2 * [1, 0], "mono": speech_N2[:, :1]}
    found = {name: len(read_audio(write(tmp_path / "x.wav", x_NC, RATE), RATE)) for name, x_NC in cases.items()}
    assert found == {"call": 2, "room": 1, "many": 1, "one side": 2, "mono": 1}
    for channels, counts in (("separate", [2, 2, 3, 2, 1]), ("average", [1] * 5)):
        for x_NC, count in zip(cases.values(), counts, strict=True):
            assert len(read_audio(write(tmp_path / "x.wav", x_NC, RATE), RATE, channels)) == count


def test_of_channels_in_opposite_phase_the_speech_is_left(tmp_path: Path) -> None:
    noise_N2 = 0.01 * np.random.default_rng(0).standard_normal((RATE, 2))
    speech_N2 = tone(RATE, 1.0, 2)
    (found_N,) = read_audio(write(tmp_path / "x.wav", speech_N2 * [1, -1] + noise_N2, RATE), RATE)
    np.testing.assert_allclose(found_N / 32768, speech_N2[:, 0], atol=0.05)


def test_channels_and_times(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.parent / "data" / "wav" / "test0.wav"
    silent = write(tmp_path / "silent side.wav", soundfile.read(path)[0] * [0, 1], RATE)
    assert main(["--model", str(run), "--times", str(silent)]) == 0
    assert {tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()} == {("silent_side", "B")}
    assert main(["--model", str(run), "--times", str(path)]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {word[1] for word in words} == {"A", "B"}
    for channel in "AB":
        begins = [float(word[2]) for word in words if word[1] == channel]
        assert begins == sorted(begins) and begins[-1] < 4.0
    assert all(len(word) == 6 and 0 <= float(word[5]) <= 1 for word in words)
    other = tmp_path / "other/silent side.flac"
    assert main(["--model", str(run), "--times", str(silent), str(other)]) == 1
    assert "are both silent_side in a CTM file; rename one" in capsys.readouterr().err


def test_from_python(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.parent / "data" / "wav" / "test0.wav"
    system = load_system(run)
    words = system.transcribe(path)
    assert main(["--model", str(run), "--times", str(path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(word.channel, word.text, f"{word.begin:.2f}", f"{word.confidence:.2f}") for word in words] == [
        (line[1], line[4], line[2], line[5]) for line in lines
    ]
    assert all(0 <= word.begin < word.end for word in words)
    samples_N2, rate = soundfile.read(path, dtype="int16")
    assert system.transcribe(samples_N2, rate) == system.transcribe(samples_N2.astype(">i2"), rate) == words
    assert system.transcribe(samples_N2[:, 1], rate) == [
        word._replace(channel="A") for word in words if word.channel == "B"
    ]
    assert system.transcribe((samples_N2[:, 0] / 32768).astype(np.float32), rate) == system.transcribe(
        samples_N2[:, 0], rate
    )
    (scores_TP,), (features,) = system.log_likelihoods(path), system.features(path)
    assert {len(static_TD) for static_TD in features.values()} == {len(scores_TP)} and np.isfinite(scores_TP).all()
    for wrong, rate, message in (
        (samples_N2, None, "give the rate"), (np.zeros(0), 8000, "give .N. or"), (np.zeros(800), 8000, "every sample"),
        (np.full(800, np.nan), 8000, "NaN"), (samples_N2.T, 8000, "more channels than samples"),
        (torch.zeros(800), 8000, "audio of type Tensor: give a file, or a NumPy array"),
        (samples_N2, 7999.5, "a whole number"), (samples_N2.astype(np.int64), 8000, "type int64: give int16, int32"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            system.transcribe(wrong, rate)
    for audio in (path, samples_N2):
        with pytest.raises(InputError, match="channels='seperate': must be one of auto, separate, average"):
            system.transcribe(audio, 8000, channels="seperate")  # type: ignore[arg-type]


def count_calls(patch: pytest.MonkeyPatch, counts: Counter[str], owner: object, name: str) -> None:
    """Makes the function `name` of a module or class count its calls in `counts`."""
    call: Callable = getattr(owner, name)

    def counted(*given: object) -> object:
        counts[call.__qualname__] += 1
        return call(*given)

    patch.setattr(owner, name, counted)


def test_every_model_is_loaded_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transcribes two files of two channels each."""
    system = System.load(run)
    model = write_network(run.parent, StateTable.load(system.states).num_pdfs)
    replace(system, model=model, feature_kind="logmel").save(tmp_path)
    for loader in (loading.load_graph, loading.load_lang, loading.load_states, loading.load_gmms, loading.load_network):
        loader.cache_clear()
    counts: Counter[str] = Counter()
    loads = ((loading, "read_hclg"), (model_file, "load_acoustic_model"), (Lang, "load"), (StateTable, "load"))
    for owner, name in loads:
        count_calls(monkeypatch, counts, owner, name)
    files = [str(run.parent / "data" / "wav" / f"test{number}.wav") for number in range(2)]
    assert main(["--model", str(tmp_path), *files]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert counts == {"read_hclg": 1, "load_acoustic_model": 1, "Lang.load": 1, "StateTable.load": 1}


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16000, 2), (44100, 1), (11025, 3)])
def test_any_rate_and_channels_become_the_models(tmp_path: Path, rate: int, channels: int) -> None:
    path = write(tmp_path / "x.wav", tone(rate, 1.0, channels), rate)
    (mixed,) = read_audio(path, RATE, "average")
    assert abs(len(mixed) - RATE) <= 1
    inner = slice(200, -200)  # the edges ring
    assert mixed[inner] == pytest.approx(32768 * tone(RATE, 1.0)[: len(mixed), 0][inner], abs=120)
    assert len(read_audio(path, RATE, "separate")) == channels


def test_a_recording_shorter_than_a_phone_has_no_words(run: Path, tmp_path: Path) -> None:
    assert load_system(run).words((32768 * tone(RATE, 0.05)[:, 0]).astype(np.float32)) == []


def test_long_recordings_are_cut_where_it_is_quiet() -> None:
    level_T = np.full(5000, 10.0)
    quiet = [1500, 2600, 4000]
    for centre in quiet:
        level_T[centre - 30 : centre + 30] = 0.0
    found = list(split_at_pauses(np.repeat(level_T[:, None], 40, axis=1).astype(np.float32)))
    assert next(begin for begin, _ in found) == 0 and found[-1][1] == 5000
    assert all(first[1] == second[0] for first, second in itertools.pairwise(found))
    assert all(MIN_SEGMENT <= end - begin <= MAX_SEGMENT for begin, end in found[:-1])
    assert all(min(abs(end - centre) for centre in quiet) <= 30 for _, end in found[:-1])


@pytest.mark.parametrize("num_frames", [1999, 2000, 2001, 2014, 2499, 2500, 4001, 9000])
def test_no_piece_is_left_too_short_for_words(num_frames: int) -> None:
    """Even where the level is constant."""
    found = list(split_at_pauses(np.full((num_frames, 40), 10.0, dtype=np.float32)))
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == num_frames
    assert all(MIN_SEGMENT <= end - begin <= MAX_SEGMENT for begin, end in found)


def test_a_name_in_latin_1_and_output_that_nobody_reads_to_its_end(run: Path, tmp_path: Path) -> None:
    path = run.parent / "data" / "wav" / "test0.wav"
    latin = os.fsencode(tmp_path) + b"/caf\xe9.wav"
    Path(os.fsdecode(latin)).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "asr_am.transcribe", "--model", str(run), latin, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert said.count(b"\n") == 1, said
        assert b"caf" in said and b"cannot be read as audio ('utf-8'" in said and process.wait() == 1


def bad_files(folder: Path) -> dict[str, Path]:
    (folder / "text.wav").write_text("this is no audio")
    (folder / "empty.wav").write_bytes(b"")
    loud, hole = folder / "loud.wav", folder / "hole.wav"
    soundfile.write(loud, np.clip(1e30 * tone(RATE, 1.0), -3e29, 3e29), RATE, subtype="FLOAT")
    soundfile.write(hole, np.where(np.arange(RATE) == 99, np.nan, tone(RATE, 1.0)[:, 0]), RATE, subtype="FLOAT")
    return {
        "no such file": folder / "missing.wav",
        "is a folder": folder,
        "cannot be read as audio": folder / "text.wav",
        "cannot be read as audio ": folder / "empty.wav",
        "no samples": write(folder / "none.wav", np.zeros((0, 1)), RATE),
        "far beyond full scale (-3e+29 to 3e+29": loud,
        "samples that are NaN, Inf": hole,
        "every sample is 0": write(folder / "silent.wav", np.zeros((RATE, 2)), RATE),
    }


def test_bad_recordings_end_with_one_clear_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message, path in bad_files(tmp_path).items():
        assert main(["--model", str(run), str(path)]) == 1
        error = capsys.readouterr().err
        assert str(path) in error and message.strip() in error and len(error.splitlines()) == 1


def test_a_bad_recording_does_not_keep_the_others_from_being_transcribed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = run.parent / "data" / "wav" / "test0.wav"
    opposite = write(tmp_path / "opposite.wav", tone(RATE, 1.0, 2) * [1, -1], RATE)
    assert main(["--model", str(run), "--average", str(opposite), str(good)]) == 1
    printed = capsys.readouterr()
    assert "cancel each other" in printed.err and printed.out.startswith(f"{good}: ")


def test_a_folder_that_is_no_decoding_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run stage 7 \(decode\)"):
        load_system(tmp_path)
