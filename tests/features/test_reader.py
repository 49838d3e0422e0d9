from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from asr_am.errors import InputError
from asr_am.features.extract import extract_features
from asr_am.features.reader import FeatureReader
from asr_am.features.spectral import SpectralOptions
from asr_am.parallel import parallel_map
from tests.support.kaldi_scp import load_scp
from tests.support.manifest_corpus import RATE, write_corpus

KINDS = [("mfcc", 39), ("logmel", 120)]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("features")
    data = write_corpus(root / "data")
    extract_features(data, root / "made" / "mfcc", "mfcc", SpectralOptions(RATE, 23, 13))
    extract_features(data, root / "made" / "logmel", "logmel", SpectralOptions(RATE, 40))
    return (root / "made").rename(root / "moved")  # the reader must still find its archives


@pytest.mark.parametrize(("kind", "dim"), KINDS)
def test_reader_normalises_speakers_and_adds_deltas(features: Path, kind: str, dim: int) -> None:
    reader = FeatureReader(features, kind, "train")
    assert reader.dim == dim and len(reader) == 6 and reader.utterances == sorted(reader.utterances)
    for speaker in ("trainspk0", "trainspk1"):
        x_TF = np.concatenate([reader[name] for name in reader.utterances if reader.speaker(name) == speaker])
        assert x_TF.dtype == np.float32 and x_TF.shape == (3 * 88, dim)
        static = x_TF[:, : dim // 3]
        np.testing.assert_allclose(static.mean(axis=0), 0.0, atol=1e-4)
        deviation = static.std(axis=0)
        assert np.allclose(deviation, 1.0, atol=1e-3) == (kind == "logmel")


def test_variance_normalisation_can_be_chosen(features: Path) -> None:
    reader = FeatureReader(features, "mfcc", "dev", variance=True)
    x_TF = np.concatenate([reader[name] for name in reader.utterances if reader.speaker(name) == "devspk0"])
    np.testing.assert_allclose(x_TF[:, :13].std(axis=0), 1.0, atol=1e-3)


def frames(item: tuple[FeatureReader, str]) -> float:
    reader, utterance = item
    return float(reader[utterance].sum())


def test_reader_works_in_worker_processes(features: Path) -> None:
    reader = FeatureReader(features, "logmel", "test")
    expected = [float(reader[name].sum()) for name in reader.utterances]
    assert parallel_map(frames, [(reader, name) for name in reader.utterances], 2, "read") == expected


def test_an_unknown_utterance_is_an_input_error(features: Path) -> None:
    with pytest.raises(InputError, match="nobody"):
        FeatureReader(features, "mfcc", "dev")["nobody"]


@pytest.mark.parametrize("name", ["dev.scp", "dev_cmvn.scp", "dev_utt2spk", "dev_cmvn.ark", "options.json"])
@pytest.mark.parametrize("contents", [None, b"", b"\xff\n", b"one\n"])
def test_missing_or_damaged_files_are_input_errors(
    features: Path, tmp_path: Path, name: str, contents: bytes | None
) -> None:
    shutil.copytree(features, tmp_path / "features")
    path = tmp_path / "features" / "mfcc" / name
    path.unlink()
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(InputError):
        FeatureReader(tmp_path / "features", "mfcc", "dev")


def test_an_option_out_of_range_names_the_file(features: Path, tmp_path: Path) -> None:
    shutil.copytree(features, tmp_path / "features")
    path = tmp_path / "features" / "mfcc" / "options.json"
    path.write_text(path.read_text().replace('"num_ceps": 13', '"num_ceps": 99'))
    with pytest.raises(InputError, match=r"options\.json: .*num_ceps=99"):
        FeatureReader(tmp_path / "features", "mfcc", "dev")


def test_an_impossible_name_of_an_archive_is_an_input_error(features: Path, tmp_path: Path) -> None:
    shutil.copytree(features, tmp_path / "features")
    scp = tmp_path / "features" / "mfcc" / "dev.scp"
    scp.write_text(scp.read_text().replace("dev.1.ark", f"{'x' * 5000}.ark"))
    reader = FeatureReader(tmp_path / "features", "mfcc", "dev")
    with pytest.raises(InputError, match="damaged or missing archive"):
        reader[reader.utterances[0]]


def test_fuzzed_archives_give_a_matrix_or_an_input_error(features: Path, tmp_path: Path) -> None:
    shutil.copytree(features, tmp_path / "features")
    path = tmp_path / "features" / "mfcc" / "dev.1.ark"
    reader = FeatureReader(tmp_path / "features", "mfcc", "dev")
    content, rejected = path.read_bytes(), 0
    rng = random.Random(0)
    for _ in range(150):
        damaged = bytearray(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
        for _ in range(rng.randrange(8)):
            damaged[rng.randrange(60) % max(1, len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            assert reader[reader.utterances[0]].shape[1] == 39
        except InputError as error:
            assert "dev.1.ark" in str(error)
            rejected += 1
    assert rejected > 20


def test_archives_hold_static_features(features: Path) -> None:
    assert {matrix.shape for matrix in load_scp(features / "logmel" / "dev.scp").values()} == {(88, 40)}


@pytest.mark.parametrize("name", ["dev.1.ark", "dev_cmvn.ark"])
def test_every_changed_bit_of_an_archive_is_found(features: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(features / "mfcc", tmp_path / "mfcc")
    path, rng = tmp_path / "mfcc" / name, random.Random(4)
    content, keys = path.read_bytes(), len(b"devspk0 ")  # keys are read from the .scp
    reader = FeatureReader(tmp_path, "mfcc", "dev")
    matrices = [reader[utterance] for utterance in reader.utterances]
    found = 0
    for _ in range(60):
        damaged = bytearray(content)
        damaged[rng.randrange(keys + 1, len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            reader = FeatureReader(tmp_path, "mfcc", "dev")
            read = [reader[utterance] for utterance in reader.utterances]
        except InputError as error:
            found += 1
            assert "checksum is wrong" in str(error) and f"remove {name} and run stage 2" in str(error)
        else:
            pairs = zip(read, matrices, strict=True)
            assert all(np.array_equal(*pair) for pair in pairs), "only a bit of a key may change"
    assert found > 50
