"""fMLLR of the speakers of a set: the choice of the transform, independence of workers, storage."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from asr_am.errors import InputError
from asr_am.features.adapted import MATRIX, Projection, apply, open_features, read_transforms, write_transforms
from asr_am.hmm.adaptation import FmllrOptions, adapt_speakers, aligned_groups
from asr_am.hmm.frames import FrameStore
from tests.support.gmm_cases import D, model, random_transforms, sample_frames
from tests.support.kaldi_scp import load_scp
from tests.support.synthetic_speech import make_lang, speak, store, write_features

FRAMES = {"long": 1500, "middle": 200, "brief": 20}  # by speaker


def write_two_utterances_per_speaker(folder: Path) -> tuple[FrameStore, list[str], np.ndarray]:
    """Returns a store with two utterances per speaker, the speaker of each utterance, and the pdfs.

    Utterances of different speakers interleave.
    """
    frames, speakers, pdfs = {}, {}, {}
    for seed, ((speaker, length), transform) in enumerate(zip(FRAMES.items(), random_transforms(3), strict=True)):
        x_ND, pdf_N = sample_frames(model(), transform, length, seed)
        for half, rows in enumerate((slice(0, length // 2), slice(length // 2, length))):
            name = f"utt{half}-{speaker}"
            frames[name], pdfs[name], speakers[name] = x_ND[rows], pdf_N[rows], speaker
    base = store(folder / "frames", frames)
    return base, [speakers[u] for u in base.utterances], np.concatenate([pdfs[u] for u in base.utterances])


def test_little_speech_gets_an_offset_or_no_transform(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, speakers_U, pdf_N = write_two_utterances_per_speaker(tmp_path)
    groups = list(aligned_groups(base, base, speakers_U, pdf_N))
    with caplog.at_level(logging.INFO):
        found = adapt_speakers(groups, model(), FmllrOptions(), 1, "set")
    np.testing.assert_array_equal(found["brief"], np.eye(D, D + 1))
    np.testing.assert_array_equal(found["middle"][:, :-1], np.eye(D))
    assert np.abs(found["middle"][:, -1]).max() > 0.1
    np.testing.assert_allclose(found["long"], random_transforms(3)[0], atol=0.15)
    assert "brief (20)" in caplog.text and "middle (200)" in caplog.text and "long" not in caplog.text


def test_speakers_with_little_speech_keep_the_start_transform(tmp_path: Path) -> None:
    base, speakers_U, pdf_N = write_two_utterances_per_speaker(tmp_path)
    groups = list(aligned_groups(base, base, speakers_U, pdf_N))
    average = random_transforms(5)[4]
    found = adapt_speakers(groups, model(), FmllrOptions(), 1, "set", start=average)
    np.testing.assert_allclose(found["brief"], average, atol=1e-6)
    np.testing.assert_allclose(found["middle"][:, :-1], average[:, :-1], atol=1e-6)
    assert np.abs(found["middle"][:, -1] - average[:, -1]).max() > 0.1


def test_result_does_not_depend_on_workers_or_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, speakers_U, pdf_N = write_two_utterances_per_speaker(tmp_path)
    monkeypatch.setattr("asr_am.hmm.adaptation.GROUP_SIZE", 1)
    groups = list(aligned_groups(base, base, speakers_U, pdf_N))
    one_job, two_jobs = (adapt_speakers(groups, model(), FmllrOptions(), jobs, "set") for jobs in (1, 2))
    monkeypatch.setattr("asr_am.hmm.adaptation.BLOCK", 100)
    small_blocks = adapt_speakers(groups, model(), FmllrOptions(), 1, "set")
    for speaker in FRAMES:
        np.testing.assert_allclose(one_job[speaker], two_jobs[speaker], atol=1e-5)  # thread counts differ
        np.testing.assert_allclose(one_job[speaker], small_blocks[speaker], atol=1e-4)


def test_frames_without_a_pdf_are_ignored(tmp_path: Path) -> None:
    base, speakers_U, pdf_N = write_two_utterances_per_speaker(tmp_path)
    groups = list(aligned_groups(base, base, speakers_U, np.full_like(pdf_N, -1)))
    found = adapt_speakers(groups, model(), FmllrOptions(), 1, "set")
    assert all((transform == np.eye(D, D + 1)).all() for transform in found.values())


def test_constant_frames_give_a_finite_transform(tmp_path: Path) -> None:
    base = store(tmp_path / "frames", {"u": np.ones((2000, D), dtype=np.float32)})
    groups = list(aligned_groups(base, base, ["still"], np.zeros(2000, dtype=int)))
    found = adapt_speakers(groups, model(), FmllrOptions(), 1, "set")
    assert np.isfinite(found["still"]).all()


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(InputError, match="min_shift_frames"):
        FmllrOptions(min_shift_frames=600)


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """MFCCs of the speakers spk0 and spk1, with a projection and their transforms in features/fmllr."""
    root = tmp_path / "features"
    write_features(root, speak(make_lang(tmp_path), 4, dim=13), "dev")
    rng = np.random.default_rng(0)
    for kind in ("lda", "fmllr"):
        (root / kind).mkdir()
        Projection(rng.normal(size=(6, 39)).astype(np.float32), 13).save(root / kind / MATRIX)
    matrices = {speaker: rng.normal(size=(6, 7)) for speaker in ("spk0", "spk1")}
    write_transforms(root / "fmllr", "dev", matrices)
    return root


def test_reader_applies_the_stored_transforms(features: Path) -> None:
    reader = open_features(features, "fmllr", "dev")
    projection = Projection.load(features / "fmllr" / MATRIX, 13)
    stored = load_scp(features / "fmllr" / "dev_trans.scp")
    assert reader.dim == 6 and len(reader.utterances) == 4
    for utterance in reader.utterances:
        static = open_features(features, "mfcc", "dev")[utterance][:, :13]
        expected = apply(stored[reader.speaker(utterance)], projection(static))
        np.testing.assert_allclose(reader[utterance], expected, atol=1e-4)


def test_a_missing_transform_names_the_speaker(features: Path) -> None:
    remaining = read_transforms(features / "fmllr", "dev")
    del remaining["spk1"]
    write_transforms(features / "fmllr", "dev", remaining)
    with pytest.raises(InputError, match="speaker spk1; run stage 4"):
        open_features(features, "fmllr", "dev")


def test_damaged_transforms_are_input_errors(features: Path) -> None:
    write_transforms(features / "fmllr", "dev", {"spk0": np.eye(3, 4), "spk1": np.eye(6, 7)})
    with pytest.raises(InputError, match="spk0 has no transform of 6 features"):
        open_features(features, "fmllr", "dev")
    archive = features / "fmllr" / "dev_trans.ark"
    archive.write_bytes(archive.read_bytes()[:100])
    with pytest.raises(InputError, match=r"dev_trans\.ark"):
        open_features(features, "fmllr", "dev")
    archive.unlink()
    (features / "fmllr" / "dev_trans.scp").unlink()
    with pytest.raises(InputError, match=r"dev_trans\.scp: no such file; run stage 4"):
        open_features(features, "fmllr", "dev")
