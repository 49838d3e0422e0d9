from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from asr_am.data.kaldi_archive import write_archive
from asr_am.data.textfile import write_lines
from asr_am.errors import InputError
from asr_am.features.adapted import MATRIX, Projection, open_features, write_transforms
from asr_am.features.extract import extract_features
from asr_am.features.fusion import InputReader, columns
from asr_am.features.ivector.ivector_archive import IvectorInfo
from asr_am.features.spectral import SpectralOptions
from tests.support.manifest_corpus import RATE, write_corpus

FUSION = "fmllr+ivector+logmel"
SETS = ("train", "dev", "test")
PERIOD = 40


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds: real MFCCs and log-mel, and random projections, transforms and i-vectors of the paper's sizes."""
    root = tmp_path_factory.mktemp("features")
    data = write_corpus(root / "data")
    extract_features(data, root / "mfcc", "mfcc", SpectralOptions(RATE, 23, 13))
    extract_features(data, root / "logmel", "logmel", SpectralOptions(RATE, 40))
    rng = np.random.default_rng(0)
    (root / "fmllr").mkdir()
    (root / "ivector").mkdir()
    Projection(rng.standard_normal((40, 7 * 13)).astype(np.float32), 13).save(root / "fmllr" / MATRIX)
    for subset in SETS:
        reader = open_features(root, "logmel", subset)
        speakers = sorted({reader.speaker(utterance) for utterance in reader.utterances})
        write_transforms(root / "fmllr", subset, {s: rng.standard_normal((40, 41)) for s in speakers})
        keys, rows = (reader.utterances, 3) if subset == "train" else (speakers, 1)
        vectors = {key: rng.standard_normal((rows, 100)).astype(np.float32) for key in keys}
        write_archive(root / "ivector", f"{subset}_ivectors", vectors.items())
    IvectorInfo(100, PERIOD, {"train": "utterance", "dev": "speaker", "test": "speaker"}).save(root / "ivector")
    return root


def test_fusion_concatenates_fmllr_ivector_and_log_mel(features: Path) -> None:
    for subset in SETS:
        reader = InputReader(features, FUSION, subset)
        fmllr, logmel = (open_features(features, kind, subset) for kind in ("fmllr", "logmel"))
        assert reader.dim == 260 and reader.streams == {"fmllr": 40, "ivector": 100, "logmel": 120}
        assert reader.vectors is not None
        for utterance in reader.utterances:
            x_TV = reader[utterance]
            assert x_TV.shape == (88, 260) and x_TV.dtype == np.float32
            np.testing.assert_array_equal(x_TV[:, :40], fmllr[utterance])
            np.testing.assert_array_equal(x_TV[:, 140:], logmel[utterance])
            rows_KS = reader.vectors[utterance]
            for frame in (0, 39, 40, 79, 80, 87):
                row = frame // PERIOD if subset == "train" else 0
                np.testing.assert_array_equal(x_TV[frame, 40:140], rows_KS[row])
            np.testing.assert_array_equal(reader.frames(utterance), np.delete(x_TV, slice(40, 140), axis=1))


def test_streams_are_in_the_order_of_the_kind(features: Path) -> None:
    utterance = InputReader(features, "logmel", "dev").utterances[0]
    fused = InputReader(features, FUSION, "dev")[utterance]
    for kind, order in (
        ("logmel+ivector", np.r_[140:260, 40:140]), ("ivector+logmel", np.r_[40:260]), ("logmel", np.r_[140:260]),
        ("fmllr+logmel", np.r_[:40, 140:260]), ("fmllr", np.r_[:40]),
    ):  # fmt: skip
        np.testing.assert_array_equal(InputReader(features, kind, "dev")[utterance], fused[:, order])
    assert columns({"a": 2, "b": 3}) == {"a": slice(0, 2), "b": slice(2, 5)}


@pytest.mark.parametrize("kind", ["ivector", "logmel+logmel", "logmel+", "", "ivector+ivector"])
def test_invalid_kinds_are_rejected(features: Path, kind: str) -> None:
    with pytest.raises(InputError, match="joined by"):
        InputReader(features, kind, "dev")


def test_missing_entries_are_named(features: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(features, tmp_path / "features")
    scp = copy / "ivector" / "train_ivectors.scp"
    write_lines(scp, [line for line in scp.read_text().splitlines() if not line.startswith("trainspk1-")])
    reader = InputReader(copy, FUSION, "train")
    with pytest.raises(InputError, match=r"no i-vector for speaker trainspk1 .*run stage 4 \(speaker\)"):
        reader["trainspk1-train1-0"]
    scp = copy / "fmllr" / "dev_trans.scp"
    write_lines(scp, [line for line in scp.read_text().splitlines() if not line.startswith("devspk0")])
    with pytest.raises(InputError, match="no fMLLR transform for speaker devspk0"):
        InputReader(copy, FUSION, "dev")
    shutil.rmtree(copy / "ivector")
    with pytest.raises(InputError, match=r"ivectors\.json"):
        InputReader(copy, FUSION, "test")


def test_streams_of_different_utterances_or_lengths_are_rejected(features: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(features, tmp_path / "features")
    for name in ("test.scp", "test_utt2spk"):
        path = copy / "logmel" / name
        write_lines(path, path.read_text().splitlines()[1:])
    with pytest.raises(InputError, match="utterance testspk0-test0-0 of test has only one of fmllr and logmel"):
        InputReader(copy, FUSION, "test")
    locations = (copy / "logmel" / "dev.scp").read_text().splitlines()
    short = np.zeros((50, 40), dtype=np.float32)
    write_archive(copy / "logmel", "short", [(locations[0].split()[0], short)])
    write_lines(copy / "logmel" / "dev.scp", [(copy / "logmel" / "short.scp").read_text().strip(), *locations[1:]])
    (copy / "logmel" / "dev.crc32").unlink()
    reader = InputReader(copy, FUSION, "dev")
    with pytest.raises(InputError, match=r"devspk0-dev0-0: numbers of frames differ, .*'logmel': 50"):
        reader["devspk0-dev0-0"]
