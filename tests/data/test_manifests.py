from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lhotse import SupervisionSegment

from asr_am.data.manifests import channel_of, read_recordings, read_supervisions, write_set
from asr_am.errors import InputError
from asr_am.features.extract import extract_features
from asr_am.features.spectral import SpectralOptions
from tests.support.manifest_corpus import utterance, write_corpus, write_recording


def test_a_set_reads_back_sorted_by_id(tmp_path: Path) -> None:
    recording = write_recording(tmp_path, "r", 0, "PCM_16")
    segments = [utterance(recording, speaker, 0) for speaker in ("zoe", "amy", "bob")]
    write_set(tmp_path, "train", [recording], segments)
    assert [segment.speaker for segment in read_supervisions(tmp_path, "train")] == ["amy", "bob", "zoe"]


def test_audio_is_found_after_the_directory_was_renamed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    recording = next(iter(read_recordings(tmp_path / "after", "dev")))
    assert recording.load_audio().shape == (2, 32000)


def test_audio_is_found_below_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "exp").symlink_to(tmp_path / "disk")
    write_corpus(tmp_path / "exp" / "before")
    (tmp_path / "exp" / "before").rename(tmp_path / "exp" / "after")
    recording = next(iter(read_recordings(tmp_path / "exp" / "after", "dev")))
    assert recording.load_audio().shape == (2, 32000)


def test_audio_outside_keeps_its_absolute_path(tmp_path: Path) -> None:
    recording = write_recording(tmp_path / "elsewhere", "r", 0, "PCM_16")
    write_set(tmp_path / "data", "dev", [recording], [utterance(recording, "amy", 0)])
    (read,) = read_recordings(tmp_path / "data", "dev")
    assert read.sources[0].source == str(tmp_path / "elsewhere" / "wav" / "r.wav")


def test_lhotse_refusals_become_input_errors(tmp_path: Path) -> None:
    recording = write_recording(tmp_path, "r", 0, "PCM_16")
    bad = SupervisionSegment(id="u", recording_id="r", start=0.0, duration=-1.0, text="YES", speaker="amy")
    with pytest.raises(InputError, match="duration"):
        write_set(tmp_path, "train", [recording], [bad])


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\x1f\x8b\x08",
        gzip.compress(b"", mtime=0),
        gzip.compress(b"{", mtime=0),
        gzip.compress(b'{"id": 1}', mtime=0),
        gzip.compress(b"\xff\n", mtime=0),
        b"no gzip",
    ],
)
def test_a_broken_manifest_is_an_input_error(tmp_path: Path, contents: bytes) -> None:
    write_corpus(tmp_path)
    (tmp_path / "dev" / "supervisions.jsonl.gz").write_bytes(contents)
    with pytest.raises(InputError, match=r"supervisions.jsonl.gz"):
        read_supervisions(tmp_path, "dev")


def test_a_truncated_manifest_is_an_input_error(tmp_path: Path) -> None:
    path = write_corpus(tmp_path) / "dev" / "recordings.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"recordings.jsonl.gz"):
        read_recordings(tmp_path, "dev")


def test_a_missing_manifest_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stage 0"):
        read_recordings(tmp_path, "train")


def test_an_utterance_on_two_channels_is_refused() -> None:
    segment = SupervisionSegment(id="u", recording_id="r", start=0, duration=1, channel=[0, 1])
    with pytest.raises(InputError, match="exactly one"):
        channel_of(segment)


def foreign(data_dir: Path, subset: str, **changes: Any) -> Path:
    """Changes the first recording of a set, as a manifest from somebody else may. Returns the manifest."""
    path = data_dir / subset / "recordings.jsonl.gz"
    first, *others = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress("\n".join([json.dumps(json.loads(first) | changes), *others]).encode()))
    return path


@pytest.mark.parametrize("place", ["source", "transform"])
def test_no_command_of_a_manifest_is_run_unless_the_user_allows_it(tmp_path: Path, place: str) -> None:
    write_corpus(tmp_path)
    audio = next(iter(read_recordings(tmp_path, "train"))).sources[0].source
    command = {"type": "command", "channels": [0, 1], "source": f"touch {tmp_path / 'ran'}; cat {audio}"}
    response = {"id": "rir", "sources": [command], "sampling_rate": 8000, "num_samples": 32000, "duration": 4.0}
    reverb = {"name": "ReverbWithImpulseResponse", "kwargs": {"rir": response}}
    path = foreign(tmp_path, "train", **({"sources": [command]} if place == "source" else {"transforms": [reverb]}))
    extract = partial(extract_features, tmp_path, tmp_path / "out", "logmel", SpectralOptions(8000, 8), sets=["train"])
    with pytest.raises(InputError, match=rf"^{path}: train0: .*(add --allow-pipes|is not known here)"):
        extract()
    assert not (tmp_path / "ran").exists()
    if place == "source":
        extract(allow_commands=True)
        assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["url", "memory", "shar", "Command"])
def test_audio_of_another_type_is_refused(tmp_path: Path, kind: str) -> None:
    write_corpus(tmp_path)
    foreign(tmp_path, "dev", sources=[{"type": kind, "channels": [0], "source": "http://192.0.2.1/x.wav"}])
    for allow_commands in (False, True):
        with pytest.raises(InputError, match=f"of type '{kind}', not a file"):
            read_recordings(tmp_path, "dev", allow_commands=allow_commands)
