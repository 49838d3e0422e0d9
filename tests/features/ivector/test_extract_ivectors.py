from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from asr_am.errors import InputError
from asr_am.features.extract import extract_features
from asr_am.features.ivector import extract_ivectors as make
from asr_am.features.ivector import train_extractor as train
from asr_am.features.ivector.extract_ivectors import load_estimator, make_ivectors
from asr_am.features.ivector.ivector_archive import IvectorReader
from asr_am.features.ivector.speech import Speech
from asr_am.features.ivector.train_extractor import IvectorOptions
from asr_am.features.reader import FeatureReader
from asr_am.features.spectral import SpectralOptions
from tests.support.kaldi_scp import load_scp
from tests.support.manifest_corpus import RATE, write_corpus

OPTIONS = IvectorOptions(
    gaussians=2, dim=3, ubm_iterations=3, iterations=2, max_count=5.0, period=40, online_utterances=2
)  # fmt: skip
SETS = ("train", "dev", "test")


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("features")
    data = write_corpus(root / "data", speakers=4)
    extract_features(data, root / "mfcc", "mfcc", SpectralOptions(RATE, 23, 13))
    return root


@pytest.fixture(scope="module", autouse=True)
def small_files() -> Iterator[None]:
    """Makes every set have several files of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "BLOCK", 5)
        patch.setattr(make, "ARCHIVE", 4)
        yield


@pytest.fixture(scope="module")
def made(features: Path) -> Path:
    make_ivectors(features, features / "ivector", OPTIONS, sets=SETS)
    return features / "ivector"


def reader(made: Path, subset: str) -> IvectorReader:
    return IvectorReader(made, subset, FeatureReader(made.parent, "mfcc", subset).speaker)


def test_ivectors_are_per_speaker_or_in_training_per_segment(features: Path, made: Path) -> None:
    estimate = load_estimator(made)
    for subset in SETS:
        speech, vectors = Speech(features, subset, normalise=False), reader(made, subset)
        archive = dict(load_scp(made / f"{subset}_ivectors.scp"))
        for speaker, utterances in speech.by_speaker().items():
            frames = [speech.frames(utterance) for utterance in utterances]
            if subset != "train":
                np.testing.assert_allclose(archive[speaker], estimate.offline([frames]), rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(vectors[utterances[1]], archive[speaker])
                continue
            rows = [*estimate.online(frames[:2]), *estimate.online(frames[2:])]
            for utterance, rows_KS in zip(utterances, rows, strict=True):
                np.testing.assert_allclose(archive[utterance], rows_KS, rtol=1e-5, atol=1e-6)
                frames_TS = vectors.per_frame(utterance, 88)
                np.testing.assert_array_equal(frames_TS[[0, 39, 40, 87]], archive[utterance][[0, 0, 1, 2]])
        assert len(archive) == (12 if subset == "train" else 4)


def test_likelihoods_rise_and_are_stored(made: Path) -> None:
    report = json.loads((made / "training.json").read_text())
    assert [len(report[name]) for name in ("ubm", "extractor")] == [3, 2]
    assert all((np.diff(values) > 0).all() for values in report.values())
    assert not (made / "work").exists()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_output_does_not_depend_on_jobs(features: Path, made: Path, tmp_path: Path) -> None:
    make_ivectors(features, tmp_path / "out", OPTIONS, sets=SETS, jobs=2)
    assert content(tmp_path / "out") == content(made)
    assert (made / "train_ivectors.2.ark").exists() and not (made / "train_ivectors.1.scp").exists()


@pytest.mark.parametrize(
    ("module", "stop"),
    [(make, "train_ubm"), (train, "write_block"), (train, "maximise"), (make, "save_extractor"), (make, "write_group")],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    features: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, stop: str
) -> None:
    real, calls = getattr(module, stop), []

    def killed(*arguments: object, **named: object) -> object:
        calls.append(stop)
        if len(calls) == 2 or stop in ("train_ubm", "save_extractor"):
            raise KeyboardInterrupt
        return real(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, stop, killed)
        make_ivectors(features, tmp_path / "out", OPTIONS, sets=SETS)
    times = content_times(tmp_path / "out")
    make_ivectors(features, tmp_path / "out", OPTIONS, sets=SETS)
    assert content(tmp_path / "out") == content(made)
    unchanged = {name for name, time in content_times(tmp_path / "out").items() if times.get(name) == time}
    assert times.keys() & {"ubm.npz", "extractor.npz", "train_ivectors.1.ark"} <= unchanged


def content_times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_too_little_speech_suggests_smaller_sizes(features: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gaussians=64: 10\d\d frames .* choose ivectors.gaussians=2 or fewer"):
        make_ivectors(features, tmp_path / "out", replace(OPTIONS, gaussians=64), sets=SETS)
    with pytest.raises(InputError, match=r"dim=32: 12 training utterances are enough for 6 dimensions"):
        make_ivectors(features, tmp_path / "out", replace(OPTIONS, dim=32), sets=SETS)
    with pytest.raises(InputError, match="online: 'held' is not one of the sets"):
        make_ivectors(features, tmp_path / "out", replace(OPTIONS, online=("held",)), sets=SETS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{"gaussians": 0}, {"dim": 0}, {"posterior_scale": 0.0}, {"max_count": -1.0}])
def test_options_out_of_range_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        replace(OPTIONS, **wrong)  # type: ignore[arg-type]


def test_a_missing_ivector_names_its_speaker(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "mfcc" / "ivector")
    scp = folder / "dev_ivectors.scp"
    scp.write_text("".join(line for line in scp.open() if not line.startswith("devspk1 ")))
    speaker = FeatureReader(made.parent, "mfcc", "dev").speaker
    vectors = IvectorReader(folder, "dev", speaker)
    assert vectors["devspk0-dev0-0"].shape == (1, 3)
    with pytest.raises(InputError, match=r"dev_ivectors\.scp: no i-vector for speaker devspk1"):
        vectors["devspk1-dev1-2"]
    with pytest.raises(InputError, match="no set 'eval'"):
        IvectorReader(folder, "eval", speaker)
    (folder / "ivectors.json").write_text("{}")
    with pytest.raises(InputError, match=r"ivectors\.json: missing or damaged"):
        IvectorReader(folder, "dev", speaker)
