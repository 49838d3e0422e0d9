"""Audio that changes, disappears or reappears reruns stage data of recipes/kaldi, wherever it is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import soundfile

from asr_am.stages.data import targets
from local.kaldi.prepare import prepare
from tests.support.configurations import config
from tests.support.kaldi_corpus import LEXICON, RATE, edit, noise, write_kaldi_dir


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Data directories with audio elsewhere: in a file, behind a command, in an archive, by a relative path."""
    for name, prefix in (("train", "a"), ("test", "b")):
        write_kaldi_dir(tmp_path / name, prefix)
    (tmp_path / "audio").mkdir()
    for name in ("a0-0", "a0-1", "a0-2"):
        (tmp_path / f"train/{name}.wav").rename(tmp_path / f"audio/{name}.wav")
        edit(tmp_path / "train/wav.scp", f"{tmp_path}/train/{name}.wav", f"{tmp_path}/audio/{name}.wav")
    edit(tmp_path / "train/wav.scp", f"{tmp_path}/audio/a0-1.wav", f"cat {tmp_path}/audio/a0-1.wav |")
    edit(tmp_path / "train/wav.scp", f"{tmp_path}/audio/a0-2.wav", "audio/a0-2.wav")
    write_kaldi_dir(tmp_path / "ark", "b", kind="ark")
    (tmp_path / "test/wav.scp").write_text((tmp_path / "ark/wav.scp").read_text())
    (tmp_path / "lexicon.txt").write_text(LEXICON)
    return tmp_path


def key(root: Path) -> str:
    given = [f"corpus.prepare.{name}={root / path}" for name, path in (("train", "train"), ("test", "test"))]
    given += [f"corpus.prepare.lexicon={root / 'lexicon.txt'}", "corpus.name=own", f"exp={root / 'exp'}"]
    return targets(config("corpus=kaldi", *given))[0].key()


@pytest.mark.parametrize("file", ["audio/a0-0.wav", "audio/a0-1.wav", "audio/a0-2.wav", "ark/wav.ark"])
def test_what_happens_to_audio_is_noticed(root: Path, file: str) -> None:
    first = key(root)
    assert key(root) == first
    (root / file).rename(root / "away")
    assert key(root) != first
    (root / "away").rename(root / file)
    assert key(root) == first
    soundfile.write(root / file, noise(99), RATE, format="WAV")
    assert key(root) != first


def test_without_a_list_of_audio_the_preparation_tells(root: Path) -> None:
    (root / "train/wav.scp").unlink()
    assert key(root)


def test_audio_after_a_set_without_a_list_counts(root: Path) -> None:
    (root / "train/wav.scp").unlink()  # as of lhotse manifests
    (root / "train/cuts.jsonl").touch()
    first = key(root)
    soundfile.write(root / "ark/wav.ark", noise(99), RATE, format="WAV")
    assert key(root) != first


def test_paths_begin_where_a_linked_list_lies(root: Path) -> None:
    (root / "lists").mkdir()
    (root / "train/wav.scp").rename(root / "lists/train.scp")
    edit(root / "lists/train.scp", "audio/a0-2.wav", "beside.wav")
    (root / "audio/a0-2.wav").rename(root / "train/beside.wav")
    (root / "train/wav.scp").symlink_to(root / "lists/train.scp")
    folders = {name: str(root / name) for name in ("train", "test")}
    prepare(root / "data", lexicon=str(root / "lexicon.txt"), sampling_rate=RATE, max_bad_audio=0.0, **folders)
