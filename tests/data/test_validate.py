from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import SupervisionSegment, SupervisionSet

from asr_am.data.audio import read_utterances
from asr_am.data.manifests import SUPERVISIONS, read_recordings, read_supervisions
from asr_am.data.validate import validate_data_dir
from asr_am.errors import InputError
from tests.support.manifest_corpus import RATE, write_corpus


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


def rewrite(data: Path, subset: str, change: Callable[[list[SupervisionSegment]], list[SupervisionSegment]]) -> None:
    """Replaces the utterances of a set."""
    segments = change(list(read_supervisions(data, subset)))
    SupervisionSet.from_segments(segments).to_file(data / subset / SUPERVISIONS)


def first(**changes: object) -> Callable[[list[SupervisionSegment]], list[SupervisionSegment]]:
    return lambda segments: [replace(segments[0], **changes), *segments[1:]]


def test_a_sound_directory_passes(data: Path) -> None:
    validate_data_dir(data, jobs=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (first(speaker=None), "has no speaker"),
        (first(text=None), "has no text"),
        (first(text="  "), "has no text"),
        (first(text="YES  NO"), "single blanks"),
        (first(recording_id="elsewhere"), "no recording elsewhere"),
        (first(start=3.5), "outside its recording"),
        (first(channel=2), "is on channel 2"),
        (first(id="trainspk0 x"), "holds a blank"),
        (lambda segments: segments[::-1], "not sorted"),
        (lambda segments: [segments[0], *segments], "twice"),
    ],
)
def test_bad_utterances_are_refused(
    data: Path, change: Callable[[list[SupervisionSegment]], list[SupervisionSegment]], message: str
) -> None:
    rewrite(data, "train", change)
    with pytest.raises(InputError, match=message):
        validate_data_dir(data)


def test_an_utterance_in_two_sets_is_refused(data: Path) -> None:
    rewrite(data, "train", first(id=next(iter(read_supervisions(data, "dev"))).id))
    with pytest.raises(InputError, match="in both train and dev"):
        validate_data_dir(data)


def test_a_training_speaker_in_test_is_refused(data: Path) -> None:
    rewrite(data, "train", first(speaker="testspk0"))
    with pytest.raises(InputError, match="speaker testspk0 is in both train and test"):
        validate_data_dir(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "no such audio file"),
        (lambda path: path.write_bytes(b""), "empty or not audio"),
        (lambda path: path.write_bytes(path.read_bytes()[:20000]), "empty or truncated"),
        (lambda path: soundfile.write(path, np.zeros((0, 2)), RATE), "empty or truncated"),
        (lambda path: soundfile.write(path, np.zeros((4 * RATE, 2)), 2 * RATE), "sampled at 16000 Hz"),
        (lambda path: soundfile.write(path, np.zeros(4 * RATE), RATE), "1 of 2 channels"),
    ],
)
def test_bad_audio_is_refused(data: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(data / "wav" / "dev1.wav")
    with pytest.raises(InputError, match=rf"dev1.wav.*{message}"):
        validate_data_dir(data, jobs=2)


@pytest.mark.parametrize("name", ["lexicon.txt", "lm/train.txt", "test/ref.stm"])
@pytest.mark.parametrize("contents", [None, b"", b"CAF\xe9 K\n"])
def test_bad_text_files_are_refused(data: Path, name: str, contents: bytes | None) -> None:
    (data / name).unlink()
    if contents is not None:
        (data / name).write_bytes(contents)
    with pytest.raises(InputError):
        validate_data_dir(data)


STRANGE = (None, "", -1, 0, 1e30, "x", [], {}, [0], True, float("nan"), "a b", "\ud800")


def test_fuzzed_manifests_pass_or_are_input_errors(data: Path) -> None:
    dice, refused = random.Random(0), 0
    for _ in range(200):
        path = data / dice.choice(["train", "dev"]) / dice.choice(["recordings.jsonl.gz", SUPERVISIONS])
        whole = path.read_bytes()
        items = [json.loads(line) for line in gzip.decompress(whole).splitlines()]
        item = dice.choice(items)
        target = dice.choice([item, *item.get("sources", [])])
        target[dice.choice([*target, "custom", "transforms"])] = dice.choice(STRANGE)
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, items)).encode()))
        try:
            validate_data_dir(data)
        except InputError:
            refused += 1
        path.write_bytes(whole)
    assert 100 < refused < 200  # some values are harmless


def test_fuzzed_audio_passes_or_is_an_input_error(data: Path, tmp_path: Path) -> None:
    path = data / "wav" / "dev0.wav"
    whole, dice, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(whole[: dice.randrange(len(whole))] if dice.random() < 0.3 else whole)
        for _ in range(dice.randrange(1, 5)):
            damaged[dice.randrange(60) % max(1, len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            validate_data_dir(data, ["dev"])
            list(
                read_utterances(next(iter(read_recordings(data, "dev"))), [next(iter(read_supervisions(data, "dev")))])
            )
        except InputError as error:
            assert "dev0.wav" in str(error)
            refused += 1
    assert 50 < refused < 150
