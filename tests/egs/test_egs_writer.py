from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asr_am.disk import write_at
from asr_am.egs.egs_writer import _create_array, make_egs
from asr_am.egs.store import EgsSet, load_pdf_counts
from asr_am.errors import InputError
from asr_am.features.extract import extract_features
from asr_am.features.reader import FeatureReader
from asr_am.features.spectral import SpectralOptions
from asr_am.hmm.states import StateTable
from tests.support.egs_alignments import PDFS, write_alignments
from tests.support.manifest_corpus import RATE, write_corpus


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("features")
    data = write_corpus(root / "data")
    extract_features(data, root / "features" / "logmel", "logmel", SpectralOptions(RATE, 40))
    return root / "features"


@pytest.fixture
def labels(features: Path) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    alignments = {}
    for subset in ("train", "dev"):
        reader = FeatureReader(features, "logmel", subset)
        alignments[subset] = {u: rng.integers(1, 61, len(reader[u])).astype(np.int32) for u in reader.utterances}
    return alignments


@pytest.mark.parametrize(("jobs", "shard_frames", "dtype"), [(1, 200, "float32"), (2, 10**6, "float16")])
def test_examples_are_the_features_and_pdfs_of_every_utterance(
    features: Path, labels: dict[str, dict[str, np.ndarray]], tmp_path: Path, jobs: int, shard_frames: int, dtype: str
) -> None:
    align = write_alignments(tmp_path / "align", labels)
    make_egs(features, "logmel", align, tmp_path / "egs", shard_frames=shard_frames, dtype=dtype, jobs=jobs)
    states, counts_P = StateTable.load(align / "states.npz"), np.zeros(PDFS, dtype=np.int64)
    for subset in ("train", "dev"):
        egs, reader = EgsSet(tmp_path / "egs", subset), FeatureReader(features, "logmel", subset)
        assert egs.index.utterances == reader.utterances
        assert (len(egs.features) > 1) == (shard_frames == 200)
        for u, utterance in enumerate(reader.utterances):
            shard, begin = egs.index.shard_U[u], egs.index.begin_U[u]
            rows = slice(begin, begin + egs.index.frames_U[u])
            np.testing.assert_array_equal(egs.features[shard][rows], reader[utterance].astype(dtype))
            pdfs_T = states.pdf_L[labels[subset][utterance] - 1]
            np.testing.assert_array_equal(egs.targets[shard][rows], pdfs_T)
            if subset == "train":
                counts_P += np.bincount(pdfs_T, minlength=PDFS)
        assert all((x[-21:] == 0).all() for x in egs.features)
    np.testing.assert_array_equal(load_pdf_counts(tmp_path / "egs"), counts_P)


def test_an_utterance_without_alignment_is_left_out_and_listed(
    features: Path, labels: dict[str, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    lost = sorted(labels["train"])[2]
    del labels["train"][lost]
    info = make_egs(features, "logmel", write_alignments(tmp_path / "align", labels), tmp_path / "egs")
    assert info.sets["train"]["unaligned"] == 1
    assert (tmp_path / "egs" / "train" / "unaligned.txt").read_text() == f"{lost}\n"
    assert lost not in EgsSet(tmp_path / "egs", "train").index.utterances


def test_alignments_that_do_not_fit_name_the_utterance(
    features: Path, labels: dict[str, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    victim = sorted(labels["train"])[1]
    right = labels["train"][victim]
    wrongs = {
        "short": (right[:-1], "frames of features"),
        "beyond": (np.where(np.arange(len(right)) == 4, 61, right).astype(np.int32), "outside 1..60"),
        "zero": (np.zeros_like(right), "outside 1..60"),
        "empty": (right[:0], "is empty"),
    }
    for name, (wrong, message) in wrongs.items():
        labels["train"][victim] = wrong
        align = write_alignments(tmp_path / name, labels)
        with pytest.raises(InputError, match=message) as error:
            make_egs(features, "logmel", align, tmp_path / f"{name}-egs")
        assert victim in str(error.value)
    labels["train"][victim] = right
    labels["train"]["stranger"] = right
    with pytest.raises(InputError, match="no features for 1 utterances, such as stranger"):
        make_egs(features, "logmel", write_alignments(tmp_path / "stray", labels), tmp_path / "stray-egs")


def test_missing_inputs(features: Path, labels: dict[str, dict[str, np.ndarray]], tmp_path: Path) -> None:
    align = write_alignments(tmp_path / "align", {"train": labels["train"]})
    with pytest.raises(InputError, match="dev"):
        make_egs(features, "logmel", align, tmp_path / "egs")
    with pytest.raises(InputError, match=r"states\.npz"):
        make_egs(features, "logmel", tmp_path / "nowhere", tmp_path / "egs2")
    with pytest.raises(InputError, match="float16 or float32"):
        make_egs(features, "logmel", align, tmp_path / "egs3", dtype="int8")


def test_rows_of_a_killed_run_stay(tmp_path: Path) -> None:
    path = tmp_path / "features.0.npy"
    _create_array(path, "float16", (4, 3))
    write_at(path, np.load(path, mmap_mode="r").offset + 6, np.ones(3, np.float16).tobytes())
    _create_array(path, "float16", (4, 3))
    np.testing.assert_array_equal(np.load(path), [[0] * 3, [1] * 3, [0] * 3, [0] * 3])
    path.write_bytes(path.read_bytes()[:-1])  # killed while it was made
    _create_array(path, "float16", (4, 3))
    assert np.load(path).shape == (4, 3) and not np.load(path).any()
