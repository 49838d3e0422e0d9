from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kaldiio
import lhotse
import numpy as np
import pytest
import soundfile
from lhotse import Recording, SupervisionSegment, SupervisionSet

from asr_am.data.manifests import SUPERVISIONS, read_supervisions, write_set
from asr_am.errors import InputError
from asr_am.features import extract
from asr_am.features.extract import extract_features
from asr_am.features.spectral import SpectralExtractor, SpectralOptions
from tests.support.kaldi_scp import load_scp
from tests.support.manifest_corpus import RATE, write_corpus

LOGMEL = "logmel", SpectralOptions(RATE, 40)
MFCC = "mfcc", SpectralOptions(RATE, 23, 13)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "data")


def expected(data: Path, segment: SupervisionSegment, options: SpectralOptions) -> np.ndarray:
    """Computes features directly from the wav file."""
    samples_NC = soundfile.read(data / "wav" / f"{segment.recording_id}.wav", dtype="int16")[0]
    begin = int(segment.start * RATE)
    return SpectralExtractor(options)(samples_NC[begin : begin + 7200, segment.channel].astype(np.float32))


@pytest.mark.parametrize("options", [LOGMEL, MFCC])
def test_archives_hold_the_features_of_every_utterance(
    data: Path, tmp_path: Path, options: tuple[str, SpectralOptions]
) -> None:
    extract_features(data, tmp_path / "out", *options, jobs=2)
    for subset in ("train", "dev", "test"):
        features = load_scp(tmp_path / "out" / f"{subset}.scp")
        segments = list(read_supervisions(data, subset))
        assert list(features) == [segment.id for segment in segments]
        for segment in segments:
            np.testing.assert_allclose(features[segment.id], expected(data, segment, options[1]), atol=1e-4)


def test_output_does_not_depend_on_jobs(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "ARCHIVE_SECONDS", 2.0)  # several archives
    for jobs in (1, 3):
        extract_features(data, tmp_path / str(jobs), *MFCC, jobs=jobs)
    one, three = sorted((tmp_path / "1").iterdir()), sorted((tmp_path / "3").iterdir())
    assert [path.name for path in one] == [path.name for path in three]
    assert len(list((tmp_path / "1").glob("train.*.ark"))) > 1
    for path in one:
        if path.suffix != ".gz":  # gzip headers contain the time
            assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes(), path.name


def test_lhotse_and_kaldi_load_the_features_of_a_moved_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract_features(data, tmp_path / "out", *LOGMEL)
    folder = (tmp_path / "out").rename(tmp_path / "moved")
    manifest = lhotse.load_manifest(folder / "test_features.jsonl.gz").with_path_prefix(folder)
    lhotse.validate(manifest, read_data=True)
    monkeypatch.chdir(folder)  # as for Kaldi's programs
    stored = kaldiio.load_scp("test.scp")
    assert len(stored) == len(manifest) > 0
    for item in manifest:
        np.testing.assert_array_equal(item.load(), stored[item.storage_key])


def test_cmvn_statistics_are_sums_per_speaker(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "ARCHIVE_SECONDS", 2.0)
    extract_features(data, tmp_path / "out", *MFCC)
    stats = load_scp(tmp_path / "out" / "train_cmvn.scp")
    features = load_scp(tmp_path / "out" / "train.scp")
    assert list(stats) == ["trainspk0", "trainspk1"]
    for speaker, matrix in stats.items():
        x = np.concatenate([features[key] for key in features if key.startswith(speaker)]).astype(np.float64)
        assert matrix.dtype == np.float64
        np.testing.assert_allclose(matrix, [[*x.sum(axis=0), len(x)], [*(x * x).sum(axis=0), 0]])


def silence(samples_NC: np.ndarray) -> None:
    samples_NC[:RATE] = 0.0


def nan_sample(samples_NC: np.ndarray) -> None:
    samples_NC[100] = np.nan


@pytest.mark.parametrize(("damage", "message"), [(silence, "every sample is 0"), (nan_sample, "not finite")])
def test_invalid_samples_name_file_and_utterance(
    data: Path, tmp_path: Path, damage: Callable[[np.ndarray], None], message: str
) -> None:
    path = data / "wav" / "dev0.wav"
    samples_NC = soundfile.read(path, dtype="float32")[0]
    damage(samples_NC)
    soundfile.write(path, samples_NC, RATE, subtype="FLOAT")
    with pytest.raises(InputError, match=rf"dev0.wav: utterance devspk0-dev0-0: .*{message}"):
        extract_features(data, tmp_path / "out", *LOGMEL, jobs=2)


def test_clipped_utterances_are_reported(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = data / "wav" / "dev0.wav"
    soundfile.write(path, np.clip(20 * soundfile.read(path)[0], -1, 1), RATE)
    with caplog.at_level(logging.WARNING):
        extract_features(data, tmp_path / "out", *LOGMEL)
    assert "dev: 3 utterances are clipped, worst devspk0-dev0" in caplog.text


def shorten(data: Path, duration: float, count: int) -> None:
    segments = list(read_supervisions(data, "train"))
    short = [replace(segment, duration=duration) for segment in segments[:count]]
    SupervisionSet.from_segments([*short, *segments[count:]]).to_file(data / "train" / SUPERVISIONS)


def test_short_utterances_are_dropped_and_listed(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shorten(data, 0.100, 1)  # eight frames (0.105 s is nine)
    with caplog.at_level(logging.WARNING):
        extract_features(data, tmp_path / "out", *LOGMEL)
    assert (tmp_path / "out" / "train_dropped.txt").read_text() == "trainspk0-train0-0 8\n"
    assert "trainspk0-train0-0" not in (tmp_path / "out" / "train.scp").read_text()
    assert "1 utterances under 9 frames dropped" in caplog.text


def test_a_set_of_short_utterances_is_rejected(data: Path, tmp_path: Path) -> None:
    shorten(data, 0.100, 100)
    with pytest.raises(InputError, match="train: every utterance is under 9 frames"):
        extract_features(data, tmp_path / "out", *LOGMEL)


def test_another_rate_is_rejected_or_resampled(data: Path, tmp_path: Path) -> None:
    options = SpectralOptions(16000, 40)
    with pytest.raises(InputError, match=r"sampled at 8000 Hz, but features are for 16000"):
        extract_features(data, tmp_path / "out", "logmel", options)
    extract_features(data, tmp_path / "out", "logmel", replace(options, resample=True))
    assert load_scp(tmp_path / "out" / "dev.scp")["devspk0-dev0-0"].shape == (88, 40)


def test_mu_law_audio_is_on_the_same_scale(tmp_path: Path) -> None:
    for subtype in ("PCM_16", "ULAW"):
        data = write_corpus(tmp_path / subtype, subtype=subtype)
        extract_features(data, tmp_path / f"{subtype}_features", *LOGMEL, sets=["dev"])
    linear, mu_law = (
        load_scp(tmp_path / f"{subtype}_features" / "dev.scp")["devspk0-dev0-1"] for subtype in ("PCM_16", "ULAW")
    )
    assert abs(linear - mu_law).mean() < 0.05


def test_a_short_set_is_one_archive(tmp_path: Path) -> None:
    path = tmp_path / "data" / "wav" / "r.wav"
    path.parent.mkdir(parents=True)
    soundfile.write(path, np.random.default_rng(0).standard_normal(RATE) * 0.1, RATE)
    segment = SupervisionSegment("amy-r", "r", 0.0, 1.0, text="YES", speaker="amy")
    write_set(tmp_path / "data", "train", [Recording.from_file(path)], [segment])
    extract_features(tmp_path / "data", tmp_path / "out", *LOGMEL, sets=["train"], jobs=4)
    assert [path.name for path in (tmp_path / "out").glob("train.*.ark")] == ["train.1.ark"]


def test_what_a_killed_run_has_finished_is_kept_unless_it_is_damaged(data: Path, tmp_path: Path) -> None:
    kind, options = MFCC
    extract_features(data, tmp_path / "whole", kind, options, jobs=1)
    out = tmp_path / "out"
    finished = out / "finished"
    finished.mkdir(parents=True)
    [first, *_] = [
        task for subset in ("train", "dev", "test") for task in extract.make_tasks(data, subset, out, RATE, False)
    ]
    extract.extract_once(first, options, finished)
    first.archive.chmod(0o400)  # a sign that survives, as the archive is not written again
    extract_features(data, out, kind, options, jobs=1)
    assert first.archive.stat().st_mode & 0o777 == 0o400 and not finished.exists()
    finished.mkdir()
    (finished / f"{first.archive.name}.json").write_text("{")
    extract_features(data, out, kind, options, jobs=1)
    assert first.archive.stat().st_mode & 0o777 != 0o400
    for path in (tmp_path / "whole").iterdir():
        if path.suffix != ".gz":  # gzip headers contain the time
            assert path.read_bytes() == (out / path.name).read_bytes(), path.name
