from __future__ import annotations

from collections import ChainMap
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_am.data.kaldi_archive import write_archive
from asr_am.egs.augment import Masking, draw_ivector_noise
from asr_am.egs.egs_writer import make_egs
from asr_am.egs.loader import Loader, feature_moments
from asr_am.egs.stateless_rng import string_keys
from asr_am.egs.store import EgsInfo, EgsSet
from asr_am.errors import InputError
from asr_am.features.extract import extract_features
from asr_am.features.fusion import InputReader
from asr_am.features.ivector.ivector_archive import IvectorInfo
from asr_am.features.spectral import SpectralOptions
from tests.support.egs_alignments import write_alignments
from tests.support.manifest_corpus import RATE, write_corpus

KIND, AT = "mfcc+ivector+logmel", slice(39, 46)
CHUNK = 21


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fused")
    data, rng = write_corpus(root / "data"), np.random.default_rng(1)
    features = root / "features"
    extract_features(data, features / "mfcc", "mfcc", SpectralOptions(RATE, 23, 13))
    extract_features(data, features / "logmel", "logmel", SpectralOptions(RATE, 40))
    (features / "ivector").mkdir()
    labels = {}
    for subset, by in (("train", "utterance"), ("dev", "speaker")):
        reader = InputReader(features, "logmel", subset)
        labels[subset] = {u: rng.integers(1, 61, len(reader[u])).astype(np.int32) for u in reader.utterances}
        speakers = {reader.speaker(utterance) for utterance in reader.utterances}
        keys, rows = (reader.utterances, 3) if by == "utterance" else (sorted(speakers), 1)
        vectors = {key: 3 * rng.standard_normal((rows, 7)).astype(np.float32) for key in keys}
        write_archive(features / "ivector", f"{subset}_ivectors", vectors.items())
    IvectorInfo(7, 40, {"train": "utterance", "dev": "speaker"}).save(features / "ivector")
    write_alignments(root / "align", labels)
    make_egs(features, KIND, root / "align", root / "egs", chunk=CHUNK, shard_frames=200, jobs=2)
    return root


@pytest.mark.parametrize("subsets", [["train"], ["dev"], ["train", "dev"]])
def test_a_batch_is_what_decoding_reads(root: Path, subsets: list[str]) -> None:
    egs, readers = EgsSet(root / "egs", *subsets), [InputReader(root / "features", KIND, name) for name in subsets]
    assert egs.index.utterances == [name for reader in readers for name in reader.utterances]
    reader = ChainMap(*({name: reader[name] for name in reader.utterances} for reader in readers))
    assert egs.info.dim == 39 + 7 + 120 == readers[0].dim and egs.features[0].shape[1] == 39 + 120
    loader = Loader(egs, 4, seed=1, random_offset=True)
    plan = loader.plan(3)
    for number in range(len(plan)):
        batch, part = loader.batch(plan, number), plan.chunks(number)
        for b, (u, begin) in enumerate(zip(plan.utterance_N[part], plan.begin_N[part], strict=True)):
            length = int(batch.lengths_B[b])
            expected = reader[egs.index.utterances[u]][begin : begin + length].astype(np.float16)
            np.testing.assert_array_equal(batch.x_BTF[b, :length].numpy(), expected)
            assert (batch.x_BTF[b, length:] == 0).all()


def test_an_ivector_is_on_disk_once(root: Path) -> None:
    train, dev = (EgsSet(root / "egs", subset).ivectors for subset in ("train", "dev"))
    assert train is not None and dev is not None
    assert len(train.rows_RS) == 6 * 3 and len(dev.rows_RS) == 2
    assert (root / "egs" / "dev" / "vectors.f32").stat().st_size == 2 * 7 * 4
    assert dev.first_U.tolist() == [0, 0, 0, 1, 1, 1]


def test_masks_leave_ivectors_alone_and_bands_are_of_log_mel(root: Path) -> None:
    egs = EgsSet(root / "egs", "train")
    fill_F = np.full(egs.info.dim, 999.0, dtype=np.float32)
    for masking, hidden in (
        (Masking(spans=1, span_width=CHUNK), np.r_[:39, 46:166]), (Masking(bands=1, band_width=40), np.r_[46:166]),
    ):  # fmt: skip
        loader = Loader(egs, 24, masking=masking, mean_F=fill_F)
        masked_F = (loader.batch(loader.plan(0), 0).x_BTF == 999.0).any(dim=0).any(dim=0).numpy()
        assert np.flatnonzero(masked_F).tolist() == hidden.tolist()
    with pytest.raises(InputError, match=r"streams=7: must divide 120"):
        Loader(egs, 4, masking=Masking(bands=1, band_width=2, streams=7))


def test_noise_is_one_draw_a_chunk_in_deviations_of_each_dimension(root: Path) -> None:
    egs = EgsSet(root / "egs", "train")
    plain, noisy = Loader(egs, 64, seed=2), Loader(egs, 64, seed=2, ivector_noise=0.5)
    x_BTF, y_BTF = (loader.batch(loader.plan(1), 0).x_BTF.numpy() for loader in (plain, noisy))
    difference_BTS = (y_BTF - x_BTF)[:, :, AT]
    whole = (x_BTF[:, -1] != 0).any(axis=1)
    np.testing.assert_allclose(difference_BTS[whole] - difference_BTS[whole, :1], 0, atol=0.01)
    assert np.abs(difference_BTS[whole, 0]).min() > 0
    np.testing.assert_array_equal(np.delete(y_BTF, AT, axis=2), np.delete(x_BTF, AT, axis=2))
    again = Loader(egs, 64, seed=2, ivector_noise=0.5)
    np.testing.assert_array_equal(again.batch(again.plan(1), 0).x_BTF.numpy(), y_BTF)
    assert (again.batch(again.plan(2), 0).x_BTF.numpy() != y_BTF).any()
    noise_BS = draw_ivector_noise(string_keys([str(n) for n in range(4000)]), np.array([1.0, 5.0], dtype=np.float32))
    np.testing.assert_allclose(noise_BS.std(axis=0), [1.0, 5.0], rtol=0.05)
    np.testing.assert_allclose(noise_BS.mean(axis=0), 0, atol=0.3)


def test_moments_have_the_ivector_in_its_place(root: Path) -> None:
    egs = EgsSet(root / "egs", "train")
    assert egs.ivectors is not None
    for found_F, of_rows in zip(feature_moments(egs), (np.mean, np.std), strict=True):
        assert found_F.shape == (166,) and found_F.dtype == np.float32
        np.testing.assert_allclose(found_F[AT], of_rows(egs.ivectors.rows_RS, axis=0), rtol=1e-5)


def test_examples_without_ivectors_have_no_noise_and_damaged_ones_are_refused(root: Path, tmp_path: Path) -> None:
    egs = make_egs(root / "features", "logmel", root / "align", tmp_path / "plain")
    assert egs.streams == {"logmel": 120} and egs.frame_dim == 120
    plain, noisy = (Loader(EgsSet(tmp_path / "plain", "train"), 4, ivector_noise=noise) for noise in (0.0, 1.0))
    assert torch.equal(plain.batch(plain.plan(1), 0).x_BTF, noisy.batch(noisy.plan(1), 0).x_BTF)
    folder = root / "egs" / "dev"
    for name in ("vectors.f32", "vectors.npz"):
        content = (folder / name).read_bytes()
        for damaged in (b"", content[: len(content) // 2], content[:-3]):
            (folder / name).write_bytes(damaged)
            with pytest.raises(InputError, match=r"vectors\.npz"):
                EgsSet(root / "egs", "dev")
        (folder / name).write_bytes(content)


def test_a_speaker_without_ivector_is_named_when_examples_are_made(root: Path, tmp_path: Path) -> None:
    scp = root / "features" / "ivector" / "dev_ivectors.scp"
    content = scp.read_text()
    scp.write_text(content.splitlines(keepends=True)[0])
    with pytest.raises(InputError, match="no i-vector for speaker devspk1"):
        make_egs(root / "features", KIND, root / "align", tmp_path / "egs")
    scp.write_text(content)


def test_examples_without_streams_in_egs_json_are_read(tmp_path: Path) -> None:
    (tmp_path / "egs.json").write_text(
        '{"kind": "logmel", "dim": 6, "num_pdfs": 6, "chunk": 7, "sets": {}, "format": 1}'
    )
    info = EgsInfo.load(tmp_path)
    assert info.frame_dim == 6 and info.band_columns == slice(0, 6)
    wrong = info.__dict__ | {"streams": {"mfcc": 2, "ivector": 4}}
    EgsInfo(**wrong).save(tmp_path)
    with pytest.raises(InputError, match="period"):
        EgsInfo.load(tmp_path)
    EgsInfo(**wrong | {"streams": {"mfcc": 3}}).save(tmp_path)
    with pytest.raises(InputError, match="widths of streams"):
        EgsInfo.load(tmp_path)
